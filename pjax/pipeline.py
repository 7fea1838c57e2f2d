"""The stages in order, each taken from the workdir if it is there and was made from the same things.

checkpoint, hardware -> profile -> placement, predictors -> quality -> speed -> report
"""

import array
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pjax.base import (
    MODES,
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
from pjax.executor import OneProgram, TwoPrograms, check_mode, make_executor, measure_overlap, on_host
from pjax.formats import expand_path, load_tokenizer, read_checkpoint, read_texts
from pjax.imported import Imports, import_placement
from pjax.model import Decoder
from pjax.placement import explain_placement, solve_placement
from pjax.plan import MemoryPlan, make_plan
from pjax.predictor_stages import run_predictors
from pjax.profiler import collect_stats
from pjax.quality import Quality, chunks, measure_quality
from pjax.report import (
    decode_part,
    executor_part,
    hardware_part,
    model_part,
    placement_part,
    predictor_part,
    profile_part,
    quality_part,
    speed_part,
)
from pjax.sampling import greedy
from pjax.settings import Settings
from pjax.speed import measure_ffn, measure_speed
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
    write_atomically,
)

PROFILE_SEQ = 512
"""Tokens of a profiled sequence, at most the context: activations depend on what came before."""

SPEED_PROMPT = 64
"""Tokens of the prompt that speed is measured after; PowerInfer's plots use 64 too."""

SPEED_CAPACITY = 512
"""Of the KV cache while a split step is timed: the next bucket after the prompt and the timed steps."""


class Prepared(NamedTuple):
    """A model with all that was found out about it.

    Attributes:
        model: the decoder.
        tokenizer: of the model.
        prompt: as `generate` takes it.
        mode: that `mode=None` stands for.
        simulated: whether the hardware is.
        predictors, placement: None for a model whose activation is not sparse.
        report: see `report`, without its key `text`.
    """

    model: Decoder
    tokenizer: Any
    prompt: str | list[int]
    mode: Mode
    simulated: bool
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
        verify: hash every byte of the weights, and compare with the last time this was asked for.
        say_fn: told what the stages find out on their way.

    Raises:
        ValueError, FileNotFoundError: from the stages, about their inputs.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    stages = Stages(workdir, stage_fn)
    checkpoint = read_checkpoint(settings.model, activation=settings.activation)
    hardware, imports, memory, dtypes = make_plan(settings, checkpoint, stages)
    stage_fn("load")
    origin = weights_origin(checkpoint, settings.dtype)
    with on_host():
        kept = load_weights(workdir / WEIGHTS_FILE, checkpoint.config, origin)
        model = load_checkpoint(checkpoint, dtype=settings.dtype) if kept is None else kept
    tokenizer = load_tokenizer(settings.model)
    # What would fail at the end is refused before the work.
    prompt = settings.prompt
    if settings.chat:
        prompt = encode_chat([{"role": "user", "content": settings.prompt}], tokenizer)
    encode_prompts(prompt, tokenizer, model.config)
    if settings.mode is not None and not model.config.is_sparse:
        check_mode(settings.mode, model.config, None)
    quality_rows = _quality_rows(settings, model, tokenizer)
    if kept is None:
        save_weights(workdir / WEIGHTS_FILE, model, origin)
    made_from = fingerprint(VERSION, jax.__version__, model_fingerprint(model))
    if verify:
        _verify(stages, model, made_from)
    stats = predictors = placement = None
    if model.config.is_sparse:
        ids = encode_text(tokenizer, settings.profile.text, settings.profile.num_tokens)
        rows = profile_rows(ids, model.config.context)
        made_from = fingerprint(made_from, rows)
        stats = _stats(stages, imports, model, rows, made_from)
        limits = {"device_bytes": memory.hot, "dtype": dtypes}
        placement = _placement(stages, settings, imports, model, stats, hardware, limits)
        predictors, made_from = run_predictors(
            stages, settings, imports, model, hardware, rows, made_from, say_fn
        )
    sources = imports.sources
    report: dict[str, Any] = {
        "model": model_part(model),
        "profile": profile_part(stats, sources["profile"]) if stats else None,
        "predictor": predictor_part(predictors, settings.predictor.kind, sources["predictor"])
        if predictors
        else None,
        "hardware": hardware_part(hardware),
        "placement": placement_part(
            placement,
            sources["placement"],
            explain_placement(placement, stats, model.config, hardware, dtype=dtypes),
            memory,
        )
        if stats and placement
        else None,
    }
    report["quality"] = _quality(stages, settings, model, quality_rows, predictors, made_from)
    passed = report["quality"]["guard"] == "passed"
    mode: Mode = "dense" if not model.config.is_sparse else "predicted" if passed else "exact"
    timed = encode_text(tokenizer, settings.quality.text, SPEED_PROMPT)
    simulated = hardware.source == "simulated"
    hot_mask = np.concatenate(placement.hot_mask) if placement else None
    devices, counted = list(map(str, jax.local_devices())), stages.made_from.get("profile")
    made_from = fingerprint(made_from, timed, counted, hot_mask, simulated, devices)
    report |= _speed(stages, model, predictors, stats, placement, simulated, memory, timed, made_from)
    _write_manifest(stages, settings, model, mode)
    return Prepared(model, tokenizer, prompt, mode, simulated, predictors, placement, report)


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
    manifest = {
        "version": VERSION,
        "model": str(expand_path(settings.model).absolute()),
        "dtype": settings.dtype,
        "activation": settings.activation,
        "fingerprint": model_fingerprint(model),
        "mode": mode,
        "made_from": stages.made_from,
    }
    write_atomically(stages.workdir / "workdir.json", json.dumps(manifest, indent=1).encode())


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


def _quality(
    stages: Stages,
    settings: Settings,
    model: Decoder,
    rows: np.ndarray,
    predictors: Predictors | None,
    made_from: str,
) -> dict[str, Any]:
    modes: tuple[Mode, ...] = MODES if model.config.is_sparse else ("dense",)

    def make(progress_fn: ProgressFn) -> Artefact:
        quality = measure_quality(model, rows, modes, predictors=predictors, progress_fn=progress_fn)
        return Artefact({}, quality._asdict())

    record = stages.run("quality", fingerprint(made_from, rows), make).record
    return quality_part(Quality(**record), modes, settings.quality.max_perplexity_rise)


def _speed(
    stages: Stages,
    model: Decoder,
    predictors: Predictors | None,
    stats: ActivationStats | None,
    placement: Placement | None,
    simulated: bool,
    memory: MemoryPlan,
    prompt: np.ndarray,
    made_from: str,
) -> dict[str, Any]:
    """The report's `executor`, `decode` and `speed`; on simulated hardware speed is that of the real CPU."""
    modes: tuple[Mode, ...] = MODES if predictors else ("dense",)

    def make(progress_fn: ProgressFn) -> Artefact:
        executors = {
            mode: OneProgram(model, mode=mode, predictors=predictors)
            if simulated
            else make_executor(model, placement, mode=mode, predictors=predictors)
            for mode in modes
        }
        speed = measure_speed(executors, prompt)
        split = make_executor(model, placement, mode=modes[-1], predictors=predictors, simulated=simulated)
        if isinstance(split, TwoPrograms) and placement:
            _check_allocation(split, memory, placement)
        shown = prompt[: speed.prompt_tokens]
        overlap = None
        if not isinstance(split, OneProgram):
            lengths = np.array([len(shown)], np.int32)
            state = split.prefill(
                shown[None], lengths, capacity=SPEED_CAPACITY, sample_fn=greedy, sampler=None
            )
            overlap = measure_overlap(split, state, greedy)
        times = measure_ffn(model, predictors, shown) if predictors else None
        record = {
            "executor": executor_part(split, simulated, stats, placement, overlap),
            "speed": speed_part(speed),
            "decode": decode_part(model, speed, times, predictors) if predictors and times else None,
        }
        return Artefact({}, record)

    return stages.run("speed", made_from, make).record


def _check_allocation(split: TwoPrograms, memory: MemoryPlan, placement: Placement) -> None:
    """What was planned is what the device got, to the byte or less."""
    planned = memory.predictors + memory.attention + memory.ends + placement.device_bytes
    if split.device_bytes > planned:
        raise RuntimeError(
            f"the device holds {split.device_bytes} bytes of weights, not the {planned} that were planned; "
            "please report this"
        )
