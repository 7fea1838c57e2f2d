"""What `experiments.quality_curves` measures: an oracle of contributions, and predictors at any threshold."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax.base import FfnFn, Predictors
from pjax.model import Decoder, prompt_positions
from pjax.model_config import Activation
from pjax.ops import unpack_ffn
from pjax.ops.reference import dense_ffn
from pjax.predictor import predict_scores
from pjax.quality import BATCH_TOKENS, FfnWay, Quality, measure_quality, mode_ways
from pjax.weights import PackedFfn

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
