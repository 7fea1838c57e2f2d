"""The stages in order, each taken from the workdir if it is there and was made from the same things.

checkpoint, hardware -> profile -> predictors -> placement -> quality -> speed -> report
"""

import array
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pjax.base import (
    VERSION,
    ActivationStats,
    HardwareSpec,
    Mode,
    Placement,
    Predictors,
    ProgressFn,
    SayFn,
)
from pjax.chat import encode_chat
from pjax.executor import check_mode, on_host
from pjax.formats import expand_path, load_tokenizer, read_checkpoint, read_texts
from pjax.imported import Imports, import_placement
from pjax.manifest import Manifest, write_manifest
from pjax.measure import quality_stage, speed_stage
from pjax.model import Decoder
from pjax.placement import explain_placement, solve_placement
from pjax.plan import Planned, make_plan
from pjax.predictor_stages import run_predictors
from pjax.profiler import collect_stats
from pjax.quality import chunks
from pjax.report.record import hardware_part, model_part, placement_part, predictor_part, profile_part
from pjax.settings import Settings
from pjax.stages import StageFn, Stages
from pjax.storage import load_checkpoint, model_fingerprint
from pjax.textio import encode_prompts
from pjax.weights_file import WEIGHTS_FILE, load_weights, save_weights, weights_origin
from pjax.workdir import (
    Artefact,
    fingerprint,
    pack_placement,
    pack_stats,
    unpack_placement,
    unpack_stats,
)

PROFILE_SEQ = 512
"""Tokens of a profiled sequence, at most the context: activations depend on what came before."""

SPEED_PROMPT = 64
"""Tokens of the prompt that speed is measured after; PowerInfer's plots use 64 too."""


class Prepared(NamedTuple):
    """A model with all that was found out about it.

    Attributes:
        model: the decoder.
        tokenizer: of the model.
        prompt: as `generate` takes it.
        mode: that `mode=None` stands for.
        simulated: whether the hardware is.
        stats, predictors, placement: None for a model whose activation is not sparse.
        report: see `report`, without its key `text`.
    """

    model: Decoder
    tokenizer: Any
    prompt: str | list[int]
    mode: Mode
    simulated: bool
    stats: ActivationStats | None
    predictors: Predictors | None
    placement: Placement | None
    report: dict[str, Any]


def encode_text(tokenizer: Any, source: str, num_tokens: int) -> np.ndarray:
    """The first `num_tokens` ids of a text or of several, one after the other."""
    ids = array.array("i")  # a list would take nine times the memory
    for text in read_texts(source):
        ids.extend(tokenizer.encode(text))
        if len(ids) >= num_tokens:
            break
    return np.asarray(ids[:num_tokens], np.int32)


def profile_rows(ids: np.ndarray, context: int) -> np.ndarray:
    """int32 [batch, seq]: the ids cut into sequences; a shorter rest is left out."""
    seq = min(PROFILE_SEQ, context, len(ids) // 2)
    if seq < 1:
        raise ValueError(f"profile.text: expected at least two tokens, got {len(ids)}; give more text")
    return ids[: len(ids) // seq * seq].reshape(-1, seq)


class Opened(NamedTuple):
    """A model before any work is done with it.

    Attributes:
        stages: of the workdir.
        planned: the machine, what is imported, what goes where.
        model: the decoder.
        tokenizer: of the model.
        quality_rows: int32 [chunks, seq], what the modes are scored on.
        made_from: fingerprint of the model and the versions.
        unsaved: origin of the weights if they are not yet in the workdir.
    """

    stages: Stages
    planned: Planned
    model: Decoder
    tokenizer: Any
    quality_rows: np.ndarray
    made_from: str
    unsaved: str | None


class Fitted(NamedTuple):
    """What is fitted to a model's activations; None for one whose activation is not sparse.

    Attributes:
        stats: how often each neuron is active.
        predictors: of mode "predicted".
        made_from: fingerprint of all of it, the model's own without them.
    """

    stats: ActivationStats | None
    predictors: Predictors | None
    made_from: str


def open_model(settings: Settings, workdir: Path, stage_fn: StageFn, *, verify: bool = False) -> Opened:
    """Loads the model, and refuses what would fail after the work.

    Args:
        settings: what to do.
        workdir: is made if it is not there.
        stage_fn: see `StageFn`.
        verify: hash every byte of the weights, and compare with the last time this was asked for.

    Raises:
        ValueError, FileNotFoundError: the model, the texts or a setting are not usable.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    stages = Stages(workdir, stage_fn)
    checkpoint = read_checkpoint(settings.model, activation=settings.activation)
    planned = make_plan(settings, checkpoint, stages)
    stage_fn("load")
    origin = weights_origin(checkpoint, settings.dtype)
    with on_host():
        kept = load_weights(workdir / WEIGHTS_FILE, checkpoint.config, origin)
        model = load_checkpoint(checkpoint, dtype=settings.dtype) if kept is None else kept
    tokenizer = load_tokenizer(settings.model)
    if settings.mode is not None and not model.config.is_sparse:
        check_mode(settings.mode, model.config, None)
    quality_rows = _quality_rows(settings, model, tokenizer)
    made_from = fingerprint(VERSION, jax.__version__, model_fingerprint(model))
    if verify:
        _verify(stages, model, made_from)
    unsaved = origin if kept is None else None
    return Opened(stages, planned, model, tokenizer, quality_rows, made_from, unsaved)


def fit(settings: Settings, opened: Opened, say_fn: SayFn = lambda line: None) -> Fitted:
    """Profiles the model and fits its predictors, or takes both from the workdir.

    Args:
        settings: what to do.
        opened: the model.
        say_fn: told what the stages find out on their way.

    Raises:
        ValueError, FileNotFoundError: the text or the imported files are not usable.
    """
    stages, model, (hardware, imports, *_) = opened.stages, opened.model, opened.planned
    if opened.unsaved is not None:
        save_weights(stages.workdir / WEIGHTS_FILE, model, opened.unsaved)
    if not model.config.is_sparse:
        return Fitted(None, None, opened.made_from)
    ids = encode_text(opened.tokenizer, settings.profile.text, settings.profile.num_tokens)
    rows = profile_rows(ids, model.config.context)
    made_from = fingerprint(opened.made_from, rows)
    stats = _stats(stages, imports, model, rows, made_from)
    predictors, made_from = run_predictors(
        stages, settings, imports, model, hardware, rows, made_from, say_fn
    )
    return Fitted(stats, predictors, made_from)


def prepare(
    settings: Settings,
    workdir: Path,
    stage_fn: StageFn,
    *,
    verify: bool = False,
    say_fn: SayFn = lambda line: None,
) -> Prepared:
    """Does all stages that are not yet in the workdir, and reads the others.

    Args:
        settings: what to do.
        workdir: is made if it is not there.
        stage_fn: see `StageFn`.
        verify: see `open_model`.
        say_fn: see `fit`.

    Raises:
        ValueError, FileNotFoundError: from the stages, about their inputs.
    """
    opened = open_model(settings, workdir, stage_fn, verify=verify)
    stages, model, tokenizer = opened.stages, opened.model, opened.tokenizer
    hardware, imports, memory, dtypes = opened.planned
    prompt = settings.prompt
    if settings.chat:
        prompt = encode_chat([{"role": "user", "content": settings.prompt}], tokenizer)
    encode_prompts(prompt, tokenizer, model.config)
    stats, predictors, made_from = fit(settings, opened, say_fn)
    report: dict[str, Any] = {"model": model_part(model), "profile": None, "predictor": None}
    report |= {"hardware": hardware_part(hardware), "placement": None}
    placement = None
    if stats and predictors:
        limits = {"device_bytes": memory.hot, "dtype": dtypes}
        placement = _placement(stages, settings, imports, model, stats, hardware, limits)
        explained = explain_placement(placement, stats, model.config, hardware, dtype=dtypes)
        sources = imports.sources
        report |= {
            "profile": profile_part(stats, sources["profile"]),
            "predictor": predictor_part(predictors, settings.predictor.kind, sources["predictor"]),
            "placement": placement_part(placement, sources["placement"], explained, memory),
        }
    report["quality"] = quality_stage(
        stages, settings.quality, model, opened.quality_rows, predictors, made_from
    )
    passed = report["quality"]["guard"] == "passed"
    mode: Mode = "dense" if not model.config.is_sparse else "predicted" if passed else "exact"
    timed = encode_text(tokenizer, settings.quality.text, SPEED_PROMPT)
    simulated = hardware.source == "simulated"
    report |= speed_stage(stages, model, predictors, stats, placement, simulated, memory, timed, made_from)
    _write_manifest(stages, settings, model, mode)
    return Prepared(model, tokenizer, prompt, mode, simulated, stats, predictors, placement, report)


def _verify(stages: Stages, model: Decoder, made_from: str) -> None:
    """Raises ValueError if the weights changed in bytes that the sampled fingerprint does not see."""
    full = model_fingerprint(model, full=True)
    known = stages.run("weights", made_from, lambda fn: Artefact({}, {"fingerprint": full})).record
    if known["fingerprint"] != full:
        raise ValueError(
            f"the weights of {model.config.name} are not those that {stages.workdir} was prepared "
            "from, though their samples agree; give another --workdir"
        )


def _write_manifest(stages: Stages, settings: Settings, model: Decoder, mode: Mode) -> None:
    """What `LLM` needs to open the workdir."""
    path = str(expand_path(settings.model).absolute())
    made_from = stages.made_from
    write_manifest(
        stages.workdir,
        Manifest(path, settings.dtype, settings.activation, model_fingerprint(model), mode, made_from),
    )


def _stats(
    stages: Stages, imports: Imports, model: Decoder, rows: np.ndarray, made_from: str
) -> ActivationStats:
    stats = imports.stats
    if stats is not None:
        made_from = fingerprint(made_from, *stats.counts)

    def make(progress_fn: ProgressFn) -> Artefact:
        return pack_stats(stats or collect_stats(model, rows, progress_fn=progress_fn))

    return unpack_stats(stages.run("profile", made_from, make))


def _placement(
    stages: Stages,
    settings: Settings,
    imports: Imports,
    model: Decoder,
    stats: ActivationStats,
    hardware: HardwareSpec,
    limits: dict[str, Any],
) -> Placement:
    wanted, hot_mask = settings.placement, imports.hot_mask
    solver: dict[str, Any] = {
        "objective": wanted.objective,
        "minimum": wanted.minimum,
        "group_size": wanted.group_size,
        "time_limit_s": wanted.time_limit_s,
    }

    def make(progress_fn: ProgressFn) -> Artefact:
        if hot_mask is not None:
            return pack_placement(import_placement(hot_mask, stats, model.config, hardware, **limits))
        return pack_placement(solve_placement(stats, model.config, hardware, **limits, **solver))

    how = [solver] if hot_mask is None else hot_mask
    made_from = fingerprint(stages.made_from["profile"], dataclasses.asdict(hardware), limits, *how)
    return unpack_placement(stages.run("placement", made_from, make), model.config.neurons)


def _quality_rows(settings: Settings, model: Decoder, tokenizer: Any) -> np.ndarray:
    ids = encode_text(tokenizer, settings.quality.text, settings.quality.num_tokens)
    try:
        return chunks(ids, model.config.context, model.config.bos_id)
    except ValueError as error:
        raise ValueError(f"quality.{error}") from error
