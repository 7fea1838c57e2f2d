"""The token loop: prompts in; text, token ids and the reason of the end out, whole or as a stream."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from pjax.base import DecodeState, Executor, SampleFn
from pjax.sampling import NOT_A_TOKEN, check_integer, check_seed, make_sampler
from pjax.textio import (
    StopFilter,
    TextStream,
    Tokenizer,
    check_stop,
    encode_prompts,
    next_bucket,
    pad_prompts,
)

CAPACITY_STEP = 256
"""KV caches hold this many tokens times a power of two: a step program is compiled per capacity, and
attention reads all of it."""


@dataclasses.dataclass(frozen=True)
class Timings:
    """How long a generation took; programs that had to be compiled are included.

    Attributes:
        first_token_s: from the call to the first token, that of the whole batch.
        prefill_s: part of it, from the prompts' ids to the first token.
        decode_s: from the first to the last token of this sequence.
        prompt_tokens: tokens of the prompt.
        tokens: new tokens, with the one that ended the text.
    """

    first_token_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    tokens: int

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None with fewer than two."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Rate of reading the prompt; None if it was not read."""
        return self.prompt_tokens / self.prefill_s if self.tokens else None


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a model added to one prompt.

    Attributes:
        text: without the stop string and what follows it; "" without a tokenizer.
        ids: without the end-of-text id, up to the token that completed a stop string.
        finish_reason: "stop" for end of text or a stop string, "length" for a limit.
        seed: given again with the same settings, it gives the same text.
        timings: how long it took.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    seed: int
    timings: Timings


def generate(
    executor: Executor,
    tokenizer: Tokenizer | None,
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> Generation | list[Generation]:
    """Continues one prompt or a batch of them.

    Each sequence of a batch gets what it would get alone, when sampling too.

    Args:
        executor: runs the model.
        tokenizer: None if prompts are ids and only ids are wanted.
        prompts: a text, its token ids in 0..vocab-1, or a list of either. An empty one becomes the
            BOS id alone; ids are taken as they are otherwise.
        max_new_tokens: 0 or more; None, and at most, what the context leaves.
        temperature: 0 is greedy; see `sampling.make_sampler` for this and the next four.
        top_k: the most tokens to choose from; 0 and -1 are off.
        top_p: probability to choose from, 0..1; 1 is off.
        min_p: least probability relative to the best token's, 0..1; 0 is off.
        repetition_penalty: above 1 repeats less; 1 is off.
        seed: 0..2**64-1; None takes a fresh one for each sequence, which its Generation tells.
        stop: texts that end a generation, wherever the tokens begin; none is part of the result.
        on_text: called with each piece of the text when it is certain; for one prompt only.

    Returns:
        A Generation for one prompt, else a list in the order of the prompts.

    Raises:
        ValueError: a value out of its range, ids that the model does not know, a text without
            tokenizer, a prompt that is empty or longer than the context, or logits that are NaN.
    """
    batch = _begin(
        executor,
        tokenizer,
        prompts,
        max_new_tokens,
        seed,
        stop,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    if on_text is not None and (tokenizer is None or not batch.is_single):
        raise ValueError("on_text: expected one prompt and a tokenizer; make one call per prompt")
    for piece in _decode(executor, batch):
        if on_text is not None:
            on_text(piece)
    generations = [sequence.result() for sequence in batch.sequences]
    return generations[0] if batch.is_single else generations


def stream(
    executor: Executor,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
) -> Iterator[str]:
    """Returns the pieces of `generate`'s text as they become certain; closing the iterator ends the work.

    Args:
        executor: runs the model.
        tokenizer: turns ids into text.
        prompt: one text or its ids.
        max_new_tokens: this and all that follow are as of `generate`.
        temperature: as of `generate`.
        top_k: as of `generate`.
        top_p: as of `generate`.
        min_p: as of `generate`.
        repetition_penalty: as of `generate`.
        seed: as of `generate`.
        stop: as of `generate`.

    Raises:
        ValueError: as `generate`, at the call and not at the first piece; and for a list of prompts.
    """
    batch = _begin(
        executor,
        tokenizer,
        prompt,
        max_new_tokens,
        seed,
        stop,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    if tokenizer is None or not batch.is_single:
        raise ValueError("prompt: a stream needs a tokenizer and one prompt, not a list of them")
    return _decode(executor, batch)


def read_ids(state: DecodeState) -> np.ndarray:
    """int32 [batch], the newest ids, on the host: the one place where a token step is waited for."""
    return np.asarray(state.ids)


class _Sequence:
    """One prompt on its way to a Generation.

    Args:
        prompt: its ids.
        budget: the most new tokens.
        seed: of its random numbers.
        text_stream: turns ids into text; None for no text.
        stops: strings that end it.
    """

    def __init__(
        self, prompt: list[int], budget: int, seed: int, text_stream: TextStream | None, stops: Sequence[str]
    ):
        self.prompt, self.budget, self.seed = prompt, budget, seed
        self.num_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None if budget else "length"
        self.timings = Timings(0.0, 0.0, 0.0, len(prompt), 0)
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._text_stream, self._filter = text_stream, StopFilter(stops)

    def push(self, token_id: int, eos_ids: Sequence[int]) -> str:
        """Takes the next id, and returns the text that has become certain."""
        if token_id == NOT_A_TOKEN:
            raise ValueError(
                f"the model's logits are NaN after {len(self.prompt) + self.num_tokens} tokens; "
                f"expected numbers: the weights are damaged, or their type is too narrow"
            )
        self.num_tokens += 1
        is_end = token_id in eos_ids
        piece = "" if is_end else self._take(token_id)
        if (is_end or self.num_tokens == self.budget) and not self._filter.is_stopped:
            piece += self._flush()
            self.finish_reason = "stop" if is_end else "length"
        if self._filter.is_stopped:
            self.finish_reason = "stop"
        self._pieces.append(piece)
        return piece

    def _take(self, token_id: int) -> str:
        self._ids.append(token_id)
        return "" if self._text_stream is None else self._filter.push(self._text_stream.push(token_id))

    def _flush(self) -> str:
        if self._text_stream is None:
            return ""
        return self._filter.push(self._text_stream.flush()) + self._filter.flush()

    def result(self) -> Generation:
        """The finished Generation."""
        assert self.finish_reason is not None, "asked for before its end"
        text = "".join(self._pieces)
        return Generation(text, tuple(self._ids), self.finish_reason, self.seed, self.timings)


class _Batch(NamedTuple):
    """Checked prompts, ready to be decoded.

    Attributes:
        sequences: one a prompt.
        is_single: whether the caller gave one prompt, not a list.
        sample_fn: chooses the tokens.
        sampler: its first state.
        started: `time.perf_counter()` at the call.
    """

    sequences: list[_Sequence]
    is_single: bool
    sample_fn: SampleFn
    sampler: Any
    started: float


def _begin(
    executor: Executor,
    tokenizer: Tokenizer | None,
    prompts: Any,
    max_new_tokens: int | None,
    seed: int | None,
    stop: str | Sequence[str],
    **sampling: Any,
) -> _Batch:
    """Checks everything that a caller gave."""
    started = time.perf_counter()
    config = executor.config
    prompt_ids, is_single = encode_prompts(prompts, tokenizer, config)
    stops = check_stop(stop)
    if stops and tokenizer is None:
        raise ValueError(f"stop: {stop!r} is matched on text, but there is no tokenizer")
    if max_new_tokens is None:
        max_new_tokens = config.context
    check_integer("max_new_tokens", max_new_tokens, 0, note="None for as many as the context leaves")
    sequences = [
        _Sequence(
            ids,
            min(max_new_tokens, config.context - len(ids)),
            check_seed(seed),
            None if tokenizer is None else tokenizer.stream(),
            stops,
        )
        for ids in prompt_ids
    ]
    seeds = [sequence.seed for sequence in sequences]
    sample_fn, sampler = make_sampler(prompt_ids, seeds, config.vocab, **sampling)
    return _Batch(sequences, is_single, sample_fn, sampler, started)


def _decode(executor: Executor, batch: _Batch) -> Iterator[str]:
    """Runs all sequences to their ends, and yields the pieces of their texts."""
    running = [(row, sequence) for row, sequence in enumerate(batch.sequences) if sequence.budget]
    if not running:
        return
    prefill_started = time.perf_counter()
    ids, lengths = pad_prompts([sequence.prompt for sequence in batch.sequences], executor.config.context)
    capacity = cache_capacity(max(ids.shape[1], int(lengths.max()) + 1))
    state = executor.prefill(
        jnp.asarray(ids),
        jnp.asarray(lengths),
        capacity=capacity,
        sample_fn=batch.sample_fn,
        sampler=batch.sampler,
    )
    new_ids = read_ids(state)
    first_token = time.perf_counter()
    to_first_s = first_token - batch.started, first_token - prefill_started
    while True:
        decode_s = time.perf_counter() - first_token
        for row, sequence in running:
            piece = sequence.push(int(new_ids[row]), executor.config.eos_ids)
            if sequence.finish_reason:
                sequence.timings = Timings(*to_first_s, decode_s, len(sequence.prompt), sequence.num_tokens)
            if piece:
                yield piece
        running = [(row, sequence) for row, sequence in running if not sequence.finish_reason]
        if not running:
            return
        # A finished sequence goes on beyond its end, unseen; only the running ones need their room.
        longest = max(len(sequence.prompt) + sequence.num_tokens for _, sequence in running)
        if longest > capacity:
            capacity = cache_capacity(longest)
            state = executor.reserve(state, capacity)
        state = executor.step(state, sample_fn=batch.sample_fn)
        new_ids = read_ids(state)


def cache_capacity(num_tokens: int) -> int:
    """The capacity of a KV cache for so many tokens."""
    return next_bucket(CAPACITY_STEP, num_tokens)
