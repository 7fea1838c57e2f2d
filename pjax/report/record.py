"""Puts what the stages found into one JSON object, `report.json`.

Its keys, null where a mode does not apply, with lists of one entry a layer:

    model       name, family, layers, neurons (list), parameters, bytes
    profile     source (measured, or a path), tokens, density_mean, density_per_layer, hot_share_80 (neurons
                that make 80 % of the activations), hot_share_80_per_layer; tokens and densities are null
                where the source does not say over how many tokens it counted
    predictor   source (trained, or a path), kind, dtype, means over all layers of recall, precision, density
                and contribution_recall (a neuron counts by how much it moves the output), bytes, per_layer
    hardware    name, source (measured, preset or simulated)
    placement   source (solved, or a path), status, objective, bound, hot_neurons (list), device_bytes,
                budget_bytes, solve_s; goal (impact or latency), gap, next_gib (what one more GiB would add to
                the objective); expected of a step's FFNs: step_s, all_cold_s, per_layer; memory (the plan)
    quality     perplexity of each mode; of predicted against dense: top1_agreement, kl_mean, guard (passed
                or failed), faults (why it failed) and worst_layers (by relative output error); tokens; modes:
                for each mode perplexity, error, rise, rise_error, kl_mean, top1_agreement, layer_error
    executor    kind, devices, simulated, neuron_load_share, syncs_per_layer; of a split step: step_s,
                device_s and host_s (its halves alone), timeline
    speed       tokens_per_s of each mode, prefill_tokens_per_s, first_token_s, prompt_tokens
    decode      of mode predicted, a token: predictor_s, ffn_s, rows_predicted, rows_computed,
                rows_active, bytes_per_token
    text        the prompt and what was generated
"""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from pjax.base import MODES, ActivationStats, HardwareSpec, Placement, Predictors
from pjax.executor import OneProgram, Overlap, TwoPrograms
from pjax.model import Decoder
from pjax.placement import Explanation
from pjax.plan import MemoryPlan
from pjax.profiler import hot_share
from pjax.quality import Quality, guard_faults, worst_layers
from pjax.settings import QualitySettings
from pjax.speed import FfnTimes, Speed, bytes_per_token


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def model_part(model: Decoder) -> dict[str, Any]:
    """The `model` key of the report."""
    leaves = jax.tree.leaves(nnx.state(model))
    return {
        "name": model.config.name,
        "family": model.config.family,
        "layers": model.config.layers,
        "neurons": list(model.config.neurons),
        "parameters": sum(a.size for a in leaves),
        "bytes": sum(a.nbytes for a in leaves),
    }


def profile_part(stats: ActivationStats, source: str) -> dict[str, Any]:
    """The `profile` key of the report; source: "measured" or a path."""
    density = list(stats.density_per_layer) if stats.num_tokens_known else None
    return {
        "source": source,
        "tokens": stats.num_tokens if stats.num_tokens_known else None,
        "density_mean": _mean(density) if density else None,
        "density_per_layer": density,
        "hot_share_80": hot_share(np.concatenate(stats.counts)),
        "hot_share_80_per_layer": [hot_share(counts) for counts in stats.counts],
    }


def predictor_part(predictors: Predictors, kind: str, source: str) -> dict[str, Any]:
    """The `predictor` key of the report; means are over all layers; source: "trained" or a path."""
    reports = predictors.reports
    return {
        "source": source,
        "kind": kind,
        "dtype": next((layer.dtype for layer in predictors.layers if layer), None),
        "recall_mean": _mean([r.recall for r in reports]),
        "precision_mean": _mean([r.precision for r in reports]),
        "density_mean": _mean([r.density for r in reports]),
        "contribution_recall_mean": _mean([r.contribution_recall for r in reports]),
        "bytes": sum(r.bytes for r in reports),
        "per_layer": [r._asdict() for r in reports],
    }


def placement_part(
    placement: Placement, source: str, explained: Explanation, memory: MemoryPlan
) -> dict[str, Any]:
    """The `placement` key of the report; source: "solved" or a path."""
    return {
        "source": source,
        "status": placement.status,
        "objective": placement.objective,
        "bound": placement.bound,
        "hot_neurons": [int(mask.sum()) for mask in placement.hot_mask],
        "device_bytes": placement.device_bytes,
        "budget_bytes": placement.budget_bytes,
        "solve_s": placement.solve_s,
        "goal": placement.goal,
        "gap": placement.gap,
        "next_gib": placement.next_gib,
        "step_s": explained.step_s,
        "all_cold_s": explained.all_cold_s,
        "per_layer": [layer._asdict() for layer in explained.layers],
        "memory": memory._asdict(),
    }


def hardware_part(hardware: HardwareSpec) -> dict[str, Any]:
    """The `hardware` key of the report."""
    return {"name": hardware.name, "source": hardware.source}


def neuron_load_share(stats: ActivationStats, placement: Placement) -> float:
    """Share of all activations that fall on hot neurons, 0..1 (the paper's Fig. 12)."""
    hot = sum(int(c[m].sum()) for c, m in zip(stats.counts, placement.hot_mask, strict=True))
    return hot / max(1, sum(int(c.sum()) for c in stats.counts))


def quality_part(
    quality: Quality, layer_error: dict[str, list[float]], settings: QualitySettings
) -> dict[str, Any]:
    """The `quality` key of the report.

    Args:
        quality: of the modes.
        layer_error: for each mode but dense, one error a layer, see `measure_layer_errors`.
        settings: what the guard allows.
    """
    modes = {mode: way._asdict() for mode, way in quality.modes.items()}
    part: dict[str, Any] = {
        **{f"perplexity_{mode}": modes[mode]["perplexity"] if mode in modes else None for mode in MODES},
        **dict.fromkeys(("top1_agreement", "kl_mean", "guard", "faults", "worst_layers")),
        "tokens": quality.tokens,
        "modes": {mode: values | {"layer_error": layer_error.get(mode)} for mode, values in modes.items()},
    }
    if "predicted" in modes:
        allowed = {"max_perplexity_rise": settings.max_perplexity_rise, "max_kl": settings.max_kl}
        faults = guard_faults(quality, **allowed)
        part |= {name: modes["predicted"][name] for name in ("top1_agreement", "kl_mean")}
        part |= {"guard": "failed" if faults else "passed", "faults": faults}
        part["worst_layers"] = worst_layers(layer_error["predicted"])
    return part


def executor_part(
    executor: OneProgram | TwoPrograms,
    simulated: bool,
    stats: ActivationStats | None,
    placement: Placement | None,
    overlap: Overlap | None,
) -> dict[str, Any]:
    """The `executor` key of the report; overlap is None for one program."""
    return {
        "kind": executor.kind,
        "devices": [f"{device.platform}:{device.id}" for device in executor.devices],
        "simulated": simulated,
        "neuron_load_share": neuron_load_share(stats, placement) if stats and placement else None,
        "syncs_per_layer": executor.syncs_per_layer,
        "step_s": overlap.step_s if overlap else None,
        "device_s": overlap.device_s if overlap else None,
        "host_s": overlap.host_s if overlap else None,
        "timeline": [times._asdict() for times in overlap.timeline] if overlap else None,
    }


def speed_part(speed: Speed) -> dict[str, Any]:
    """The `speed` key of the report."""
    return {
        **{f"{mode}_tokens_per_s": speed.tokens_per_s.get(mode) for mode in MODES},
        "prefill_tokens_per_s": speed.prefill_tokens_per_s,
        "first_token_s": speed.first_token_s,
        "prompt_tokens": speed.prompt_tokens,
    }


def decode_part(model: Decoder, speed: Speed, times: FfnTimes, predictors: Predictors) -> dict[str, Any]:
    """The `decode` key of the report."""
    rows = speed.rows["predicted"]
    return {
        **times._asdict(),
        **dict(zip(("rows_predicted", "rows_computed", "rows_active"), rows, strict=True)),
        "bytes_per_token": bytes_per_token(model, rows, predictors, speed.prompt_tokens),
    }
