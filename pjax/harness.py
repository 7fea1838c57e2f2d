"""pjax as a model of EleutherAI's lm-evaluation-harness; importing this registers it as "pjax"."""

import json
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # type: ignore  # of the extra `eval`
from lm_eval.api.registry import register_model  # type: ignore
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore
from tqdm import tqdm

from pjax.base import Mode
from pjax.chat import render_chat
from pjax.likelihood import score_continuations
from pjax.llm import LLM
from pjax.quality import mode_ways

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("pjax")
class PjaxLM(TemplateLM):
    """A model folder, file or prepared workdir in one of its modes.

    Every position that is scored runs the mode's own FFN with per-token masks, and so does every token that
    is generated; a prompt to generate from is read by all neurons, as always.

    Args:
        path: as of `LLM`.
        mode: "dense", "exact" or "predicted"; None takes the default of `LLM.mode`.
        dtype, activation: as of `LLM`.
        batch_size: prompts that are generated from at once.
        max_gen_toks: tokens of a task that does not say how many.
        max_batch_size, device: what the harness hands to every model; not used.

    Raises:
        ValueError, FileNotFoundError: as `LLM`; the model cannot run in that mode, or has no tokenizer.
    """

    def __init__(
        self,
        path: str,
        *,
        mode: Mode | None = None,
        dtype: str | None = None,
        activation: str | None = None,
        batch_size: int | str | None = None,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        if not str(batch_size or 1).isdecimal() or int(batch_size or 1) < 1:
            raise ValueError(f"batch_size: expected a number from 1, got {batch_size!r}")
        self.path, self.batch_size, self.max_gen_toks = path, int(batch_size or 1), int(max_gen_toks)
        self.llm = LLM(path, dtype=dtype, activation=activation)
        if self.llm.tokenizer is None:
            raise ValueError(f"path: {path} has no tokenizer, and the harness asks in texts")
        self.mode: Mode = self.llm.mode(mode)
        self.way = mode_ways(self.llm.model, (self.mode,), self.llm.predictors)[self.mode]

    @property
    def max_length(self) -> int:
        """Tokens of the model's context."""
        return self.llm.model.config.context

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        config = self.llm.model.config
        return config.eos_ids[0] if config.eos_ids else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id that stands where there is no context: BOS, else the end of the text before."""
        config = self.llm.model.config
        ids = [config.bos_id, *config.eos_ids, 0]
        return next(i for i in ids if i is not None)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return str(self.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Ids of a text, begun as the model wants it (None), or without BOS (False).

        Args:
            string: a text; one that begins with the BOS token itself, from a chat template, is left as it is.
            add_special_tokens: see above.
            **options: of other models; not used.
        """
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None, "checked in the constructor"
        bos = tokenizer.named_tokens.get("bos_token")
        if bos and string.startswith(bos):
            return tokenizer.encode_marked(string)
        ids = tokenizer.encode(string)
        begins = bool(ids) and ids[0] == self.llm.model.config.bos_id
        return ids[1:] if add_special_tokens is False and begins else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _, before, after in requests]
        with tqdm(total=len(pairs), disable=disable_tqdm, desc=f"pjax {self.mode}: scoring") as bar:

            def show(done: int, total: int) -> None:
                bar.update(done - bar.n)

            found = score_continuations(self.llm.model, pairs, self.way, progress_fn=show)
        for (strings, _, _), answer in zip(requests, found, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, tuple(answer))
        return [(answer.log_likelihood, answer.is_greedy) for answer in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once behind as much as the context holds."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            pieces = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            for before, after in map(make_disjoint_window, pieces):
                windows.append((None, before, after))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues prompts up to a stop string; those with the same settings go in batches."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc=f"pjax {self.mode}: generating") as bar:
            for numbers in groups.values():
                options = self._options(requests[numbers[0]].args[1])
                for start in range(0, len(numbers), self.batch_size):
                    batch = numbers[start : start + self.batch_size]
                    prompts = [self._prompt(requests[i].args[0], options["max_new_tokens"]) for i in batch]
                    found = self.llm.generate(prompts, mode=self.mode, **options)
                    assert isinstance(found, list)  # as it was given one
                    texts |= {i: generation.text for i, generation in zip(batch, found, strict=True)}
                    bar.update(len(batch))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[number])
        return [texts[number] for number in range(len(requests))]

    def _options(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What a task asks for, in the words of `LLM.generate`."""
        values = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
        del values["do_sample"]  # its temperature is 0 where it was false
        options = {"stop": [stop for stop in values.pop("until") if stop]}
        options |= {"max_new_tokens": values.pop("max_gen_toks")}
        options |= {name: values.pop(name) for name in _SAMPLING if name in values}
        if values:
            raise ValueError(f"gen_kwargs: pjax knows {', '.join(_SAMPLING)}, not {', '.join(values)}")
        return options

    def _prompt(self, text: str, max_new_tokens: int) -> list[int]:
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks: {max_new_tokens} new tokens leave no room for a prompt in a context of "
                f"{self.max_length}; set it with --gen_kwargs max_gen_toks=N"
            )
        return self.tok_encode(text)[-room:]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's own template, or None."""
        del chat_template
        return self.llm.tokenizer.chat_template if self.llm.tokenizer else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as the model's own template writes them, up to where its answer begins."""
        template = self.chat_template()
        if template is None or not add_generation_prompt:
            missing = "has no chat template" if template is None else "writes chats up to the answer only"
            raise ValueError(f"apply_chat_template: {self.path} {missing}; leave --apply_chat_template out")
        assert self.llm.tokenizer is not None, "checked in the constructor"
        return render_chat(template, chat_history, self.llm.tokenizer.named_tokens)
