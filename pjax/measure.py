"""The stages that measure a prepared model: how good each mode's answers are, and how fast they come."""

from typing import Any

import jax
import numpy as np

from pjax.base import MODES, ActivationStats, Mode, Placement, Predictors, ProgressFn
from pjax.executor import OneProgram, TwoPrograms, make_executor, measure_overlap
from pjax.model import Decoder
from pjax.plan import MemoryPlan
from pjax.quality import Quality, WayQuality, measure_layer_errors, measure_quality, mode_ways
from pjax.report.record import decode_part, executor_part, quality_part, speed_part
from pjax.sampling import greedy
from pjax.settings import QualitySettings
from pjax.speed import measure_ffn, measure_speed
from pjax.stages import Stages
from pjax.workdir import Artefact, fingerprint, unpacking

SPEED_CAPACITY = 512
"""Of the KV cache while a split step is timed: the next bucket after the prompt and the timed steps."""


def quality_stage(
    stages: Stages,
    settings: QualitySettings,
    model: Decoder,
    rows: np.ndarray,
    predictors: Predictors | None,
    made_from: str,
) -> dict[str, Any]:
    """The report's `quality`.

    Args:
        stages: of the workdir.
        settings: what the guard allows.
        model: the decoder.
        rows: int32 [chunks, seq], what is scored.
        predictors: of mode "predicted"; None where only "dense" runs.
        made_from: fingerprint of the model and its predictors.
    """
    modes: tuple[Mode, ...] = MODES if predictors else ("dense",)

    def make(progress_fn: ProgressFn) -> Artefact:
        ways = mode_ways(model, modes, predictors)
        quality = measure_quality(model, rows, ways, progress_fn=progress_fn)
        record = {
            "modes": {mode: way._asdict() for mode, way in quality.modes.items()},
            "tokens": quality.tokens,
            "layer_error": measure_layer_errors(model, rows, ways) if predictors else {},
        }
        return Artefact({}, record)

    record = stages.run("quality", fingerprint(made_from, rows, WayQuality._fields), make).record
    with unpacking("quality.json"):
        ways = {mode: WayQuality(**way) for mode, way in record["modes"].items()}
        quality, layer_error = Quality(ways, record["tokens"]), record["layer_error"]
    return quality_part(quality, layer_error, settings)


def speed_stage(
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
    """The report's `executor`, `decode` and `speed`; on simulated hardware speed is that of the real CPU.

    Args:
        stages: of the workdir.
        model: the decoder.
        predictors: of mode "predicted"; None where only "dense" runs.
        stats: how often each neuron is active.
        placement: of the neurons.
        simulated: whether the hardware is.
        memory: what was planned.
        prompt: int [seq], to decode behind.
        made_from: fingerprint of the model and its predictors.
    """
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

    hot_mask = np.concatenate(placement.hot_mask) if placement else None
    devices, counted = list(map(str, jax.local_devices())), stages.made_from.get("profile")
    made_from = fingerprint(made_from, prompt, counted, hot_mask, simulated, devices)
    record = stages.run("speed", made_from, make).record
    with unpacking("speed.json"):
        return {key: record[key] for key in ("executor", "speed", "decode")}


def _check_allocation(split: TwoPrograms, memory: MemoryPlan, placement: Placement) -> None:
    """What was planned is what the device got, to the byte or less."""
    planned = memory.predictors + memory.attention + memory.ends + placement.device_bytes
    if split.device_bytes > planned:
        raise RuntimeError(
            f"the device holds {split.device_bytes} bytes of weights, not the {planned} that were planned; "
            "please report this"
        )
