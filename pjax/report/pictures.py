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
    from matplotlib.ticker import Locator

LAYER_WIDTH = 0.14
"""Inches a layer: room for two bars, and for every other layer's number."""

FIGURE_WIDTH = 4.6
"""Inches, or more if that many layers need it: two beside each other on a screen, nearly one on a phone."""


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
        figures["activations_per_layer"] = draw_activations_per_layer(stats)
        figures["activations"] = draw_activations(stats)
    if report["predictor"]:
        per_layer = report["predictor"]["per_layer"]
        figures["recall"] = draw_recall(per_layer)
        figures["marked"] = draw_marked(per_layer)
        figures["bytes"] = draw_bytes(per_layer)
    errors = {mode: way["layer_error"] for mode, way in report["quality"]["modes"].items()}
    if errors.get("predicted"):
        figures["errors"] = draw_errors(errors["predicted"])
    if report["placement"]:
        figures["placement"] = draw_placement(report["placement"])
    return figures


def to_svg(figure: "Figure") -> str:
    """The figure as an SVG element without a background, the same one for the same figure.

    Its letters are drawn, so that every machine has them.
    """
    import matplotlib

    buffer = io.StringIO()
    # Without a salt the ids in it, and without `None` its date, would differ from run to run.
    with matplotlib.rc_context({"svg.hashsalt": "pjax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_density(density: Sequence[float]) -> "Figure":
    """How many neurons of each layer are active for a token.

    Args:
        density: share of active neurons, one entry a layer.
    """
    figure, (axes,) = _layers_figure(len(density), 1)
    mean = 100 * math.fsum(density) / len(density)
    axes.bar(np.arange(len(density)), [100 * value for value in density], label="each layer")
    axes.axhline(mean, color="black", linestyle="--", label=f"mean {mean:.1f} %")
    axes.set_ylabel("active neurons, %")
    _add_legend(axes)
    return figure


def draw_activations_per_layer(stats: ActivationStats) -> "Figure":
    """Which share of each layer's neurons makes which share of its activations.

    Args:
        stats: how often each neuron is active.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure, axes = _shares_figure()
    colors, last = colormaps["viridis"], max(1, len(stats.counts) - 1)
    shown = 0.75  # the palest colors would not be seen on white, nor, inverted, on black
    for layer, counts in enumerate(stats.counts):
        axes.plot(*_shares(counts), color=colors(shown * layer / last), linewidth=1)
    scale = ScalarMappable(Normalize(0, last / shown), colors)
    bar = figure.colorbar(scale, ax=axes, label="layer", ticks=_layer_ticks())
    bar.ax.set_ylim(0, last)
    return figure


def draw_activations(stats: ActivationStats) -> "Figure":
    """Which share of all neurons makes which share of all activations (PowerInfer's Fig. 4).

    Args:
        stats: how often each neuron is active.
    """
    figure, axes = _shares_figure()
    neurons, activations = _shares(np.concatenate(stats.counts))
    axes.plot(neurons, activations)
    at_80 = neurons[np.searchsorted(activations, 80.0)] if activations[-1] > 80 else 100.0
    axes.plot([0, at_80, at_80], [80, 80, 0], color="black", linestyle=":")
    # Beside the dotted line, on whichever side has more room, and below the curve in any case.
    side, gap = ("left", 2) if at_80 < 50 else ("right", -2)
    axes.annotate(
        f"{at_80:.0f} % of the neurons make\n80 % of the activations",
        (at_80 + gap, 10),
        horizontalalignment=side,
    )
    return figure


def draw_recall(per_layer: Sequence[Mapping[str, Any]]) -> "Figure":
    """What each layer's predictor finds, and how much of what it marks is active.

    Args:
        per_layer: the report's predictor.per_layer.
    """
    figure, (axes,) = _layers_figure(len(per_layer), 1)
    lines = (("recall", "recall", "o"), ("contribution_recall", "by contribution", "^"))
    for name, label, marker in (*lines, ("precision", "precision", "s")):
        axes.plot(100 * _values(per_layer, name), marker=marker, markersize=4, label=label)
    axes.set(ylabel="share, %", ylim=(0, 105))
    _add_legend(axes)
    return figure


def draw_marked(per_layer: Sequence[Mapping[str, Any]]) -> "Figure":
    """How many neurons each layer's predictor marks, and how many are active.

    Args:
        per_layer: as of `draw_recall`.
    """
    figure, (axes,) = _layers_figure(len(per_layer), 1)
    active = np.array([100 * entry["true_density"] for entry in per_layer])
    _add_pairs(axes, {"marked": 100 * _values(per_layer, "density"), "active": active})
    axes.set_ylabel("neurons, %")
    return figure


def draw_bytes(per_layer: Sequence[Mapping[str, Any]]) -> "Figure":
    """How large each layer's predictor is.

    Args:
        per_layer: as of `draw_recall`.
    """
    figure, (axes,) = _layers_figure(len(per_layer), 1)
    axes.bar(np.arange(len(per_layer)), _values(per_layer, "bytes") / 2**10)
    axes.set_ylabel("predictor, KiB")
    return figure


def draw_errors(errors: Sequence[float]) -> "Figure":
    """How far each layer's predicted FFN is from the dense one, on the same input.

    Args:
        errors: |y - dense| / |dense|, one a layer.
    """
    figure, (axes,) = _layers_figure(len(errors), 1)
    axes.bar(np.arange(len(errors)), [100 * value for value in errors])
    axes.set_ylabel("error of the output, %")
    return figure


def draw_placement(placement: Mapping[str, Any]) -> "Figure":
    """What each layer has on the device, and how long device and host are expected to take.

    Args:
        placement: the report's key.
    """
    layers = placement["per_layer"]
    figure, (shares, times) = _layers_figure(len(layers), 2)
    hot = 100 * _values(layers, "hot") / _values(layers, "neurons")
    _add_pairs(shares, {"neurons": hot, "activations": 100 * _values(layers, "share")})
    shares.set_ylabel("on the device, %")
    _add_pairs(times, {"device": 1e6 * _values(layers, "device_s"), "host": 1e6 * _values(layers, "host_s")})
    times.set_ylabel("expected time, us")
    return figure


def _layers_figure(num_layers: int, num_axes: int) -> tuple["Figure", list["Axes"]]:
    """Axes one above the other, with a place for each layer."""
    from matplotlib.figure import Figure

    size = (max(FIGURE_WIDTH, LAYER_WIDTH * num_layers), 0.5 + 2.4 * num_axes)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(num_axes, 1, sharex=True, squeeze=False)[:, 0])
    axes[-1].set(xlabel="layer", xlim=(-0.6, num_layers - 0.4))
    axes[-1].xaxis.set_major_locator(_layer_ticks())
    return figure, axes


def _shares_figure() -> tuple["Figure", "Axes"]:
    """Axes for curves of `_shares`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(FIGURE_WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="neurons, most active first, %", ylabel="activations, %", xlim=(0, 100), ylim=(0, 101))
    axes.grid(alpha=0.3)
    return figure, axes


def _add_pairs(axes: "Axes", bars: Mapping[str, np.ndarray]) -> None:
    """Two bars a layer, beside each other, by their names."""
    for offset, (label, values) in zip((-0.2, 0.2), bars.items(), strict=True):
        axes.bar(np.arange(len(values)) + offset, values, 0.4, label=label)
    _add_legend(axes)


def _add_legend(axes: "Axes") -> None:
    """Names what is drawn, above the axes, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, columnspacing=1.2)


def _layer_ticks() -> "Locator":
    """As many layers' numbers as have room beside each other."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator("auto", integer=True, min_n_ticks=1)


def _values(per_layer: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """float64 [layers]; NaN, which is not drawn, for a layer without a predictor."""
    return np.array([math.nan if entry.get("kind") == "none" else entry[name] for entry in per_layer])


def _shares(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(neurons, activations) in %: which share of all the most active neurons make, at up to 400 places."""
    running = np.concatenate([[0], np.cumsum(np.sort(counts)[::-1])])
    places = np.unique(np.linspace(0, len(counts), 401).astype(int))
    return 100 * places / max(1, len(counts)), 100 * running[places] / max(1, running[-1])
