"""Puts what the stages found into one JSON object and one table."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich import box
from rich.table import Table

from pjax.base import ActivationStats, HardwareSpec, Placement, Predictors
from pjax.model import Decoder
from pjax.profiler import hot_share


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


def profile_part(stats: ActivationStats) -> dict[str, Any]:
    """The `profile` key of the report."""
    return {
        "tokens": stats.num_tokens,
        "density_mean": _mean(list(stats.density_per_layer)),
        "density_per_layer": list(stats.density_per_layer),
        "hot_share_80": hot_share(np.concatenate(stats.counts)),
        "hot_share_80_per_layer": [hot_share(counts) for counts in stats.counts],
    }


def predictor_part(predictors: Predictors, kind: str, dtype: str) -> dict[str, Any]:
    """The `predictor` key of the report; means are over all layers."""
    reports = predictors.reports
    return {
        "kind": kind,
        "dtype": dtype,
        "recall_mean": _mean([r.recall for r in reports]),
        "precision_mean": _mean([r.precision for r in reports]),
        "density_mean": _mean([r.density for r in reports]),
        "bytes": sum(r.bytes for r in reports),
        "per_layer": [r._asdict() for r in reports],
    }


def placement_part(placement: Placement) -> dict[str, Any]:
    """The `placement` key of the report."""
    return {
        "status": placement.status,
        "objective": placement.objective,
        "bound": placement.bound,
        "hot_neurons": [int(mask.sum()) for mask in placement.hot_mask],
        "device_bytes": placement.device_bytes,
        "budget_bytes": placement.budget_bytes,
        "solve_s": placement.solve_s,
    }


def hardware_part(hardware: HardwareSpec) -> dict[str, Any]:
    """The `hardware` key of the report."""
    return {"name": hardware.name, "source": hardware.source}


def neuron_load_share(stats: ActivationStats, placement: Placement) -> float:
    """Share of all activations that fall on hot neurons, 0..1 (the paper's Fig. 12)."""
    hot = sum(int(c[m].sum()) for c, m in zip(stats.counts, placement.hot_mask, strict=True))
    return hot / max(1, sum(int(c.sum()) for c in stats.counts))


def summary_table(report: dict[str, Any]) -> Table:
    """The report's main figures, a row each."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{report['model']['name']}, {report['model']['layers']} layers")
    for column in ("", "dense", "exact", "predicted"):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, values: list[float | None], form: str) -> None:
        table.add_row(name, *("-" if value is None else form.format(value) for value in values))

    quality, speed, predictor = report["quality"], report["speed"], report["predictor"]
    profile, placement, executor = report["profile"], report["placement"], report["executor"]
    modes = ("dense", "exact", "predicted")
    row("perplexity", [quality[f"perplexity_{mode}"] for mode in modes], "{:.3f}")
    row("tokens/s", [speed[f"{mode}_tokens_per_s"] for mode in modes], "{:,.0f}")
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
