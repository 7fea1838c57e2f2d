"""`LLM`: one object that loads a model, or a prepared workdir, and generates text. It never prepares."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pjax.base import Executor, Mode, Placement, Predictors
from pjax.chat import encode_chat
from pjax.compiled import keep_compiled
from pjax.executor import make_executor, on_host
from pjax.formats import expand_path, load_tokenizer, read_checkpoint
from pjax.formats.checkpoint import Checkpoint
from pjax.generate import Generation, generate, stream
from pjax.imported import import_predictors
from pjax.manifest import MANIFEST_FILE, Manifest, read_manifest
from pjax.model import Decoder
from pjax.ops.ffi import unusable_reason
from pjax.storage import load_checkpoint, model_fingerprint
from pjax.weights_file import WEIGHTS_FILE, load_weights, weights_origin
from pjax.workdir import load, unpack_placement, unpack_predictors, unpack_thresholds


class LLM:
    """A model ready to generate.

    Compiled programs are kept in the user's cache folder, unless this process has set up JAX's compilation
    cache itself or wants none: see `compiled.keep_compiled`.

    Args:
        path: a model folder or file (exact and dense modes; predicted, too, if it is a PowerInfer file with
            predictors), or a workdir prepared by `pjax.run`.
        dtype: storage type, see `load_model`; a workdir knows its own.
        activation: see `load_model`; a workdir knows its own.

    Raises:
        ValueError, FileNotFoundError: if it cannot be loaded, if the workdir was prepared from another model
            than the one that is there now, or if a variable of the environment makes no sense.
    """

    def __init__(self, path: str | os.PathLike, *, dtype: str | None = None, activation: str | None = None):
        unusable_reason()  # raises if PJAX_CPU or PJAX_NUM_THREADS make no sense
        workdir = expand_path(path)
        self.predictors: Predictors | None = None
        self.placement: Placement | None = None
        self._default_mode: Mode | None = None
        model_path: str | os.PathLike = path
        manifest = read_manifest(workdir)
        if manifest is not None:
            if dtype is not None or activation is not None:
                raise ValueError(
                    f"dtype, activation: {workdir} is a workdir, which was prepared with its own"
                )
            model_path, dtype, activation = manifest.model, manifest.dtype, manifest.activation
        keep_compiled()
        checkpoint = read_checkpoint(model_path, activation=activation)
        self.model = _load(checkpoint, dtype, None if manifest is None else workdir / WEIGHTS_FILE)
        if manifest is not None:
            self._read_workdir(workdir, manifest)
        elif self.model.config.is_sparse:
            stored = checkpoint.predictors
            self.predictors = Predictors(import_predictors(stored), ()) if stored else None
        try:
            self.tokenizer = load_tokenizer(model_path)
        except FileNotFoundError:
            self.tokenizer = None  # token-id prompts still work
        self._executors: dict[Mode, Executor] = {}

    def _read_workdir(self, workdir: Path, manifest: Manifest) -> None:
        if model_fingerprint(self.model) != manifest.fingerprint:
            raise ValueError(
                f"{workdir} was prepared from other weights than {manifest.model} holds now; run it again"
            )
        made_from = manifest.made_from
        if "predictors" in made_from:
            names = ("predictors", "placement", *(["thresholds"] if "thresholds" in made_from else []))
            found = {name: load(workdir, name, made_from.get(name, "")) for name in names}
            if missing := [name for name, artefact in found.items() if artefact is None]:
                raise ValueError(
                    f"{workdir}: expected {' and '.join(missing)} of the run that wrote {MANIFEST_FILE}, "
                    "found none: missing, damaged, or of another run; run pjax.run on it again"
                )
            predictors, placement, *thresholds = (
                artefact for artefact in found.values() if artefact is not None
            )
            self.predictors = unpack_predictors(predictors)
            if thresholds:  # imported predictors may have kept their own
                self.predictors = unpack_thresholds(thresholds[0], self.predictors)
            self.placement = unpack_placement(placement, self.model.config.neurons)
        self._default_mode = manifest.mode

    def mode(self, mode: Mode | None = None) -> Mode:
        """The mode that None stands for.

        A workdir's is predicted if its quality guard passed, else exact; that of a model folder or file is
        exact, since nobody measured what its predictors do to the text. All are dense if the activation is
        not sparse.
        """
        if mode is not None:
            return mode
        return self._default_mode or ("exact" if self.model.config.is_sparse else "dense")

    def executor(self, mode: Mode | None = None) -> Executor:
        """The executor of a mode, made at its first use."""
        mode = self.mode(mode)
        if mode not in self._executors:
            self._executors[mode] = make_executor(
                self.model, self.placement, mode=mode, predictors=self.predictors
            )
        return self._executors[mode]

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        mode: Mode | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Continues one prompt, or several as one batch.

        Args:
            prompts: text or token ids; see `generate.generate`, also for the other arguments.
            mode: None takes the default, see `mode`.
            **sampling: max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop.
        """
        return generate(self.executor(mode), self.tokenizer, prompts, **sampling)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, mode: Mode | None = None, **sampling: Any
    ) -> Generation:
        """Answers the last of some messages, which the model's own chat template writes as one prompt.

        The prompt is exactly what the template writes: it decides on the BOS id and on a system message
        where there is none.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on, see `chat.render_chat`.
            mode: as of `generate`.
            **sampling: as of `generate`.

        Raises:
            ValueError: the model has no chat template, messages of another form, or a template that refuses
                them; and as `generate`.
        """
        answer = generate(
            self.executor(mode), self.tokenizer, encode_chat(messages, self.tokenizer), **sampling
        )
        assert isinstance(answer, Generation)  # one prompt gives one
        return answer

    def stream(
        self, prompt: str | Sequence[int], *, mode: Mode | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Yields the text of `generate` piece by piece; same arguments, one prompt."""
        if self.tokenizer is None:
            raise ValueError("stream: this model's folder has no tokenizer; use generate with token ids")
        return stream(self.executor(mode), self.tokenizer, prompt, **sampling)


def _load(checkpoint: Checkpoint, dtype: str | None, weights_file: Path | None) -> Decoder:
    """The model, from a workdir's file of weights if there is one and it was made from this checkpoint."""
    with on_host():
        model = None
        if weights_file is not None:
            model = load_weights(weights_file, checkpoint.config, weights_origin(checkpoint, dtype))
        return load_checkpoint(checkpoint, dtype=dtype) if model is None else model
