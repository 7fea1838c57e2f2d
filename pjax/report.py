"""Puts what the stages found into one JSON object, `report.json`, and one table.

Its keys, null where a mode does not apply, with lists of one entry a layer:

    model       name, family, layers, neurons (list), parameters, bytes
    profile     source (measured, or a path), tokens, density_mean, density_per_layer, hot_share_80 (neurons
                that make 80 % of the activations), hot_share_80_per_layer; tokens and densities are null
                where the source does not say over how many tokens it counted
    predictor   source (trained, or a path), kind, dtype, means over all layers of recall, precision and
                density, bytes, per_layer
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
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich import box
from rich.table import Table

from pjax.base import MODES, ActivationStats, HardwareSpec, Placement, Predictors
from pjax.executor import OneProgram, Overlap, TwoPrograms
from pjax.model import Decoder
from pjax.placement import Explanation
from pjax.plan import MemoryPlan, plan_rows
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
        "dtype": predictors.layers[0].dtype,
        "recall_mean": _mean([r.recall for r in reports]),
        "precision_mean": _mean([r.precision for r in reports]),
        "density_mean": _mean([r.density for r in reports]),
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


def guard_warning(part: dict[str, Any]) -> str | None:
    """What a reader must know if the quality guard failed.

    Args:
        part: the report's key `quality`.
    """
    if part["guard"] != "failed":
        return None
    errors = part["modes"]["predicted"]["layer_error"]
    worst = ", ".join(f"{layer} ({errors[layer]:.1%})" for layer in part["worst_layers"])
    return (
        f"QUALITY GUARD FAILED, mode predicted changes the answers: {'; '.join(part['faults'])}. "
        f"Worst layers by relative output error: {worst}. mode=None falls back to exact; more of "
        "profile.num_tokens or a higher predictor.recall may help."
    )


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


def decode_line(report: dict[str, Any]) -> str | None:
    """Where the time and the bytes of a token go in mode predicted; None for a model without predictors."""
    part = report["decode"]
    if part is None:
        return None
    rows = (f"{part[f'rows_{name}']:,.0f} {name}" for name in ("predicted", "computed", "active"))
    return (
        f"mode predicted, a token: predictors {1e3 * part['predictor_s']:.3f} ms, FFNs "
        f"{1e3 * part['ffn_s']:.3f} ms; of {sum(report['model']['neurons']):,} rows {', '.join(rows)}; "
        f"{part['bytes_per_token'] / 1e6:,.1f} MB read"
    )


def summary_table(report: dict[str, Any]) -> Table:
    """The report's main figures, a row each."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{report['model']['name']}, {report['model']['layers']} layers")
    for column in ("", *MODES):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, values: list[float | None], form: str) -> None:
        table.add_row(name, *("-" if value is None else form.format(value) for value in values))

    quality, speed, predictor = report["quality"], report["speed"], report["predictor"]
    profile, placement, executor = report["profile"], report["placement"], report["executor"]
    row("perplexity", [quality[f"perplexity_{mode}"] for mode in MODES], "{:.3f}")
    row("tokens/s", [speed[f"{mode}_tokens_per_s"] for mode in MODES], "{:,.0f}")
    if profile:
        row("neurons used", [1.0, profile["density_mean"], predictor["density_mean"]], "{:.1%}")
        row("recall", [None, None, predictor["recall_mean"]], "{:.1%}")
        hot, neurons = sum(placement["hot_neurons"]), sum(report["model"]["neurons"])
        simulated = ", simulated hardware" if report["hardware"]["source"] == "simulated" else ""
        table.caption = (
            f"placement {placement['status']}: {hot:,} of {neurons:,} neurons hot, "
            f"serving {executor['neuron_load_share']:.1%} of the activations "
            f"({report['hardware']['name']}{simulated}); guard {quality['guard']}"
        )
    return table


def plan_table(plan: MemoryPlan, hardware: HardwareSpec) -> Table:
    """What goes where, a row each."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{hardware.name} ({hardware.source})",
        caption=None if plan.budget else "no device memory: everything runs on the host",
    )
    for column in ("", "device", "host"):
        table.add_column(column, justify="left" if not column else "right")
    for name, *sizes in plan_rows(plan, hardware):
        if name == "together":
            table.add_section()
        table.add_row(name, *(f"{size / 2**20:,.1f} MiB" if size else "-" for size in sizes))
    return table


def layer_table(placement: dict[str, Any]) -> Table:
    """A placement layer by layer, from the report's key."""
    table = Table(box=box.SIMPLE_HEAD, title=f"placement by {placement['goal']}")
    for column in ("layer", "hot", "of", "activations", "device us", "host us", "no more because of"):
        table.add_column(column, justify="right")
    for index, layer in enumerate(placement["per_layer"]):
        times = (f"{1e6 * layer[key]:.1f}" for key in ("device_s", "host_s"))
        share, limit = f"{layer['share']:.1%}", layer["limit"] or "-"
        table.add_row(str(index), f"{layer['hot']:,}", f"{layer['neurons']:,}", share, *times, limit)
    step, cold = (f"{1e6 * placement[key]:,.1f} us" for key in ("step_s", "all_cold_s"))
    more = placement["next_gib"]
    gain = (
        f"{1e6 * more:,.1f} us less" if placement["goal"] == "latency" else f"{more:,.1f} more active neurons"
    )
    table.caption = (
        f"FFNs of a step: {step} expected, {cold} with all neurons on the host; one more GiB: {gain}"
    )
    return table


def draw_placement(placement: dict[str, Any], path: Path) -> bool:
    """Draws what each layer has and needs, from the report's key; False without matplotlib (`pjax[plots]`).

    Args:
        placement: the report's key.
        path: of the picture, .png or .svg.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    layers = placement["per_layer"]
    x = np.arange(len(layers))
    figure = Figure(figsize=(max(6.0, 0.2 * len(layers)), 6), layout="constrained")
    shares, times = figure.subplots(2, 1, sharex=True)
    shares.bar(x - 0.2, [100 * layer["hot"] / layer["neurons"] for layer in layers], 0.4, label="neurons")
    shares.bar(x + 0.2, [100 * layer["share"] for layer in layers], 0.4, label="activations")
    shares.set_ylabel("on the device, %")
    times.bar(x - 0.2, [1e6 * layer["device_s"] for layer in layers], 0.4, label="device")
    times.bar(x + 0.2, [1e6 * layer["host_s"] for layer in layers], 0.4, label="host")
    times.set_ylabel("expected time, us")
    times.set_xlabel("layer")
    for axes in (shares, times):
        axes.legend()
    figure.savefig(path)
    return True
