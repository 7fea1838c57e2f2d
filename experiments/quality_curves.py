"""How much of a model is needed for its answers: perplexity by neurons kept, recall by neurons marked.

    python -m experiments.quality_curves [--quick] [--workdir=runs/quickstart] [--output=runs/quality_curves]

kept     In the form of Bamboo's table: of each token, each layer keeps the same share of its neurons, those
         that contribute the most to the output, |value| times the norm of the down row. That is an oracle,
         which computes everything first: no predictor of that density can be expected to do better.
recall   For each layer's predictor, which share of the active neurons it marks if it may mark so many. The
         dots are the thresholds of the workdir.
traded   The whole model in mode predicted, with every layer's threshold at the same recall.

Each is a .csv and, where matplotlib is installed (extra pjax[plots]), a .png. The thresholds of `traded` are
set on the first tokens of the very text that is scored, so that its recalls are the true ones.
"""

import csv
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx
from rich.console import Console

from pjax.base import FfnFn, Predictors
from pjax.llm import LLM
from pjax.model import Decoder, prompt_positions
from pjax.model_config import Activation
from pjax.ops import unpack_ffn
from pjax.ops.reference import dense_ffn
from pjax.pipeline import encode_text
from pjax.predictor import predict_scores
from pjax.quality import BATCH_TOKENS, FfnWay, Quality, chunks, measure_quality, mode_ways
from pjax.report.pictures import can_draw
from pjax.weights import PackedFfn

_QUICK = flags.DEFINE_bool("quick", False, "A few points on little text, to see that it runs.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "A workdir prepared by pjax.run.")
_TEXT = flags.DEFINE_string("text", "configs/demo/evaluation.txt", "What is scored, as quality.text.")
_NUM_TOKENS = flags.DEFINE_integer("num_tokens", 16384, "At most so many of it.", 1)
_OUTPUT = flags.DEFINE_string("output", "runs/quality_curves", "Folder for the tables and pictures.")

KEPT = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
RECALLS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
POINTS = 1001
"""Of a curve of recall: a point for every tenth of a percent of it."""


class Curve(NamedTuple):
    """What a layer's predictor can do, a point a threshold.

    Attributes:
        layer: its number.
        threshold, recall, density, precision: float64 [points].
        now: recall and density at the predictor's own threshold.
    """

    layer: int
    threshold: np.ndarray
    recall: np.ndarray
    density: np.ndarray
    precision: np.ndarray
    now: tuple[float, float]


def oracle_fn(share: jax.Array) -> FfnFn:
    """The `ffn_fn` that keeps a share of the neurons, those with the largest contributions to the output."""

    def ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, None]:
        del residual
        ffn = layer.ffn.weights
        ffn = unpack_ffn(ffn) if isinstance(ffn, PackedFfn) else ffn
        _, values = dense_ffn(x, ffn, Activation.parse(layer.ffn.activation))
        down = ffn.down.astype(jnp.float32)
        contributions = jnp.abs(values) * jnp.linalg.norm(down, axis=1)[None, None, :]
        kept = jnp.clip(jnp.round(share * ffn.neurons).astype(jnp.int32), 1, ffn.neurons)
        values = jnp.where(_largest(contributions, kept), values, jnp.zeros_like(values))
        return layer.ffn.add_down_bias(jnp.einsum("bsn,nm->bsm", values, down)), None

    return ffn_fn


def _largest(x: jax.Array, count: jax.Array) -> jax.Array:
    """Mask of the `count` largest of x [..., neurons], which has no negative number, and of their equals.

    Such floats are in the order of their bits, so that the least one kept is found bit by bit: a count may be
    traced, and it takes a fifth of the time of a sort.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)

    def narrow(step: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | (jnp.int32(1) << (30 - step))
        enough = (bits >= higher).sum(-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, higher, least)

    return bits >= jax.lax.fori_loop(0, 31, narrow, jnp.zeros((*x.shape[:-1], 1), jnp.int32))


def kept_curve(model: Decoder, rows: np.ndarray, shares: Sequence[float]) -> list[dict[str, Any]]:
    """The model's quality with a share of each layer's neurons, a row a share."""
    dense = mode_ways(model, ("dense",))
    return [
        {"kept": share} | _row(measure_quality(model, rows, dense | {"kept": FfnWay(oracle_fn, value)}))
        for share, value in ((share, jnp.float32(share)) for share in shares)
    ]


def _row(quality: Quality) -> dict[str, float]:
    return list(quality.modes.values())[-1]._asdict()


@partial(jax.jit, static_argnames="graphdef")
def _observe(graphdef, state, layers, ids: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Scores and true masks [tokens, neurons] of each layer with a predictor."""

    def ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, Any]:
        y, values = dense_ffn(x, layer.ffn.weights, Activation.parse(layer.ffn.activation))
        predictor, aux = layers[layer.index], None
        if predictor is not None:
            seen = residual if predictor.input == "residual" else x
            aux = predict_scores(predictor, seen.reshape(-1, seen.shape[-1])), values != 0
        return layer.ffn.add_down_bias(y), aux

    return nnx.merge(graphdef, state).run(ids, prompt_positions(ids), ffn_fn=ffn_fn)[2]


def recall_curves(model: Decoder, predictors: Predictors, rows: np.ndarray) -> list[Curve]:
    """What each predictor can do, on the first `BATCH_TOKENS` tokens."""
    graphdef, state = nnx.split(model)
    layers = jax.device_put(predictors.layers)
    found = _observe(graphdef, state, layers, rows[: max(1, BATCH_TOKENS // rows.shape[1])])
    curves = []
    for index, (predictor, part) in enumerate(zip(predictors.layers, found, strict=True)):
        if predictor is None or part is None:
            continue
        scores, active = (np.asarray(array).reshape(-1) for array in part)
        opened = np.sort(scores[active])
        if not opened.size:
            continue
        everything = np.sort(scores)
        # Each is the score of an active neuron, which is still marked.
        thresholds = np.unique(opened[np.linspace(0, opened.size - 1, POINTS).astype(int)])
        hits, marked = (len(a) - np.searchsorted(a, thresholds) for a in (opened, everything))
        own = float(np.asarray(predictor.threshold))
        now = [float((a > own).mean()) for a in (opened, everything)]
        below = np.nextafter(thresholds, np.float32(-np.inf))
        curve = (below, hits / opened.size, marked / everything.size, hits / np.maximum(marked, 1))
        curves.append(Curve(index, *curve, now=(now[0], now[1])))
    return curves


def with_recall(predictors: Predictors, curves: Sequence[Curve], recall: float) -> Predictors:
    """The predictors with the highest thresholds that reach a recall on what the curves were made from."""
    layers = list(predictors.layers)
    for curve in curves:
        threshold = jnp.float32(curve.threshold[curve.recall >= recall].max())
        layers[curve.layer] = dataclasses.replace(layers[curve.layer], threshold=threshold)  # type: ignore[type-var]
    return Predictors(tuple(layers), ())


def traded_curve(
    model: Decoder,
    predictors: Predictors,
    curves: Sequence[Curve],
    rows: np.ndarray,
    recalls: Sequence[float],
) -> list[dict[str, Any]]:
    """The model's quality with all thresholds at the same recall, a row a recall."""
    table = []
    for recall in recalls:
        ways = mode_ways(model, ("dense", "predicted"), with_recall(predictors, curves, recall))
        density = np.mean([curve.density[curve.recall >= recall].min() for curve in curves])
        table.append({"recall": recall, "density": float(density)} | _row(measure_quality(model, rows, ways)))
    return table


def draw_kept(table: Sequence[dict[str, Any]]):
    """Perplexity and divergence by the share of neurons kept."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(6, 6), layout="constrained")
    perplexity, divergence = figure.subplots(2, 1, sharex=True)
    x, dense = [100 * row["kept"] for row in table], table[-1]["perplexity"]
    perplexity.plot(x, [row["perplexity"] for row in table], marker="o")
    perplexity.axhline(dense, color="black", linestyle=":", label=f"dense, {dense:.3f}")
    perplexity.set(ylabel="perplexity", yscale="log", xscale="log")
    for which in ("major", "minor"):  # 24, not 2.4 x 10^1
        getattr(perplexity.yaxis, f"set_{which}_formatter")(LogFormatter(minor_thresholds=(2, 0.5)))
    perplexity.legend()
    divergence.plot(x[:-1], [row["kl_mean"] for row in table[:-1]], marker="o")
    divergence.set(ylabel="KL divergence from dense, nats", yscale="log")
    divergence.xaxis.set_major_formatter("{x:g}")
    divergence.set_xlabel("neurons kept of each layer, those with the largest contributions, %")
    return figure


def draw_recall(curves: Sequence[Curve]):
    """Recall by the share of neurons marked, a line a layer."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, curve in enumerate(curves):
        color = colormaps["viridis"](place / max(1, len(curves) - 1))
        axes.plot(100 * curve.density, 100 * curve.recall, color=color, label=f"layer {curve.layer}")
        axes.plot(100 * curve.now[1], 100 * curve.now[0], color=color, marker="o")
    axes.set(xlabel="neurons marked, %", ylabel="active neurons found (recall), %", xscale="log")
    axes.set_xlim(0.1, 110)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small", ncols=1 + len(curves) // 12)
    axes.grid(alpha=0.3)
    return figure


def draw_traded(table: Sequence[dict[str, Any]]):
    """What a higher recall costs in neurons, and what it gives."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    densities, rises = figure.subplots(2, 1, sharex=True)
    x = [100 * row["recall"] for row in table]
    densities.plot(x, [100 * row["density"] for row in table], marker="o")
    densities.set_ylabel("neurons marked, mean over layers, %")
    rise, error = ([100 * row[name] for row in table] for name in ("rise", "rise_error"))
    rises.errorbar(x, rise, yerr=error, marker="o")
    rises.axhline(0, color="black", linestyle=":")
    rises.set(xlabel="recall of every layer, %", ylabel="perplexity above dense, %")
    return figure


def main(argv: list[str]) -> None:
    """Measures the three curves."""
    del argv
    logging.set_verbosity(logging.WARNING)
    console, folder = Console(), Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(_WORKDIR.value)
    model, predictors = llm.model, llm.predictors
    if predictors is None:
        raise app.UsageError(f"--workdir: {_WORKDIR.value} has no predictors: run pjax.run on it first")
    quick = _QUICK.value
    ids = encode_text(llm.tokenizer, _TEXT.value, 2048 if quick else _NUM_TOKENS.value)
    rows = chunks(ids, model.config.context, model.config.bos_id)
    kept = kept_curve(model, rows, KEPT[2::5] if quick else KEPT)
    curves = recall_curves(model, predictors, rows)
    traded = traded_curve(model, predictors, curves, rows, RECALLS[::5] if quick else RECALLS)
    points = [
        dict(zip(("layer", *Curve._fields[1:5]), (c.layer, *values), strict=True))
        for c in curves
        for values in zip(*(array.tolist() for array in c[1:5]), strict=True)
    ]
    drawn = {"kept": partial(draw_kept, kept), "recall": partial(draw_recall, curves)}
    drawn["traded"] = partial(draw_traded, traded)
    for name, table in (("kept", kept), ("recall", points), ("traded", traded)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        if can_draw():
            drawn[name]().savefig(folder / f"{name}.png", dpi=100)
    for name, table in (("kept", kept), ("recall", traded)):
        for row in table:
            console.print(
                f"{name} {row[name]:7.2%}: perplexity {row['perplexity']:9.3f} +- {row['error']:.3f}, "
                f"{row['rise']:+9.3%} +- {row['rise_error']:.3%}, KL {row['kl_mean']:.5f} nats, same best "
                f"token {row['top1_agreement']:.2%}"
                + (f", marked {row['density']:.2%}" if "density" in row else ""),
                highlight=False,
                soft_wrap=True,
            )
    console.print(f"in {folder}", highlight=False)


if __name__ == "__main__":
    app.run(main)
