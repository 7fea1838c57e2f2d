"""Pictures of a report; they need matplotlib, the extra `plots`.

matplotlib is imported where a figure is made: whoever draws nothing needs none.
"""

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pjax.base import ActivationStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAYER_WIDTH = 0.2
"""Inches a layer: room for two bars and a label of two digits."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_all(report: Mapping[str, Any], stats: ActivationStats | None) -> dict[str, "Figure"]:
    """All pictures that a report has the figures for, by name.

    Args:
        report: the report.
        stats: how often each neuron is active; None for a model whose activation is not sparse.
    """
    figures = {}
    if report["profile"] and report["profile"]["density_per_layer"]:
        figures["density"] = draw_density(report["profile"]["density_per_layer"])
    if stats is not None:
        figures["activations"] = draw_activations(stats)
    if report["predictor"]:
        figures["predictors"] = draw_predictors(report["predictor"]["per_layer"])
    errors = {mode: way["layer_error"] for mode, way in report["quality"]["modes"].items()}
    if errors.get("predicted"):
        figures["errors"] = draw_errors(errors["predicted"])
    if report["placement"]:
        figures["placement"] = draw_placement(report["placement"])
    return figures


def to_svg(figure: "Figure") -> str:
    """The figure as an SVG element; the same one for the same figure, in letters that every machine has."""
    import matplotlib

    buffer = io.StringIO()
    # Without a salt the ids in it, and without `None` its date, would differ from run to run.
    with matplotlib.rc_context({"svg.hashsalt": "pjax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_density(density: Sequence[float]) -> "Figure":
    """How many neurons of each layer are active for a token.

    Args:
        density: share of active neurons, one entry a layer.
    """
    figure, (axes,) = _layers_figure(len(density), 1)
    mean = 100 * math.fsum(density) / len(density)
    axes.bar(np.arange(len(density)), [100 * value for value in density])
    axes.axhline(mean, color="black", linestyle="--", label=f"mean {mean:.1f} %")
    axes.set_ylabel("active neurons, %")
    axes.legend()
    return figure


def draw_activations(stats: ActivationStats) -> "Figure":
    """Which share of the neurons makes which share of the activations (PowerInfer's Fig. 4).

    Args:
        stats: how often each neuron is active.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    each, whole = figure.subplots(1, 2, sharex=True, sharey=True)
    colors, last = colormaps["viridis"], max(1, len(stats.counts) - 1)
    for layer, counts in enumerate(stats.counts):
        each.plot(*_shares(counts), color=colors(layer / last), linewidth=1)
    scale = ScalarMappable(Normalize(0, last), colors)
    figure.colorbar(scale, ax=each, label="layer", ticks=_layer_ticks(len(stats.counts)))
    neurons, activations = _shares(np.concatenate(stats.counts))
    whole.plot(neurons, activations)
    at_80 = neurons[np.searchsorted(activations, 80.0)] if activations[-1] > 80 else 100.0
    whole.plot([0, at_80, at_80], [80, 80, 0], color="black", linestyle=":")
    whole.annotate(f"{at_80:.0f} % of the neurons make\n80 % of the activations", (at_80 + 2, 40))
    for axes, title in ((each, "each layer"), (whole, "all layers together")):
        axes.set(title=title, xlabel="neurons, most active first, %", ylabel="activations, %")
        axes.set(xlim=(0, 100), ylim=(0, 101))
        axes.grid(alpha=0.3)
    return figure


def draw_predictors(per_layer: Sequence[Mapping[str, Any] | None]) -> "Figure":
    """How well each layer's predictor does, and what it costs.

    Args:
        per_layer: the report's predictor.per_layer; None for a layer without a predictor.
    """
    figure, (shares, densities, sizes) = _layers_figure(len(per_layer), 3)
    x = np.arange(len(per_layer))
    for name, marker in (("recall", "o"), ("precision", "s")):
        shares.plot(x, 100 * _values(per_layer, name), marker=marker, label=name)
    shares.set(ylabel="share, %", ylim=(0, 105))
    densities.bar(x - 0.2, 100 * _values(per_layer, "density"), 0.4, label="marked")
    densities.bar(x + 0.2, 100 * _values(per_layer, "true_density"), 0.4, label="active")
    densities.set_ylabel("neurons, %")
    sizes.bar(x, _values(per_layer, "bytes") / 2**10)
    sizes.set_ylabel("predictor, KiB")
    for axes in (shares, densities):
        axes.legend()
    return figure


def draw_errors(errors: Sequence[float]) -> "Figure":
    """How far each layer's predicted FFN is from the dense one, on the same input.

    Args:
        errors: |y - dense| / |dense|, one a layer.
    """
    figure, (axes,) = _layers_figure(len(errors), 1)
    axes.bar(np.arange(len(errors)), [100 * value for value in errors])
    axes.set_ylabel("relative error of the output, %")
    return figure


def draw_placement(placement: Mapping[str, Any]) -> "Figure":
    """What each layer has on the device, and how long device and host are expected to take.

    Args:
        placement: the report's key.
    """
    layers = placement["per_layer"]
    figure, (shares, times) = _layers_figure(len(layers), 2)
    x = np.arange(len(layers))
    shares.bar(x - 0.2, [100 * layer["hot"] / layer["neurons"] for layer in layers], 0.4, label="neurons")
    shares.bar(x + 0.2, [100 * layer["share"] for layer in layers], 0.4, label="activations")
    shares.set_ylabel("on the device, %")
    times.bar(x - 0.2, [1e6 * layer["device_s"] for layer in layers], 0.4, label="device")
    times.bar(x + 0.2, [1e6 * layer["host_s"] for layer in layers], 0.4, label="host")
    times.set_ylabel("expected time, us")
    for axes in (shares, times):
        axes.legend()
    return figure


def _layers_figure(num_layers: int, num_axes: int) -> tuple["Figure", list["Axes"]]:
    """Axes one above the other, with a place for each layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, LAYER_WIDTH * num_layers), 1.2 + 2.2 * num_axes), layout="constrained")
    axes = list(figure.subplots(num_axes, 1, sharex=True, squeeze=False)[:, 0])
    axes[-1].set(xlabel="layer", xticks=_layer_ticks(num_layers))
    return figure, axes


def _layer_ticks(num_layers: int) -> list[int]:
    """At most 41 layers' numbers, which still have room beside each other."""
    return list(range(0, num_layers, 1 + num_layers // 41))


def _values(per_layer: Sequence[Mapping[str, Any] | None], name: str) -> np.ndarray:
    """float64 [layers]; NaN, which is not drawn, for a layer that has none."""
    return np.array([math.nan if entry is None else float(entry[name]) for entry in per_layer])


def _shares(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(neurons, activations) in %: which share of all the most active neurons make, at up to 400 places."""
    running = np.concatenate([[0], np.cumsum(np.sort(counts)[::-1])])
    places = np.unique(np.linspace(0, len(counts), 401).astype(int))
    return 100 * places / max(1, len(counts)), 100 * running[places] / max(1, running[-1])
