"""What `experiments.quality_curves` measures: an oracle of contributions, and predictors at any threshold."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pjax.base import FfnFn, Predictors
from pjax.model import Decoder
from pjax.model_config import Activation
from pjax.ops import unpack_ffn
from pjax.ops.reference import dense_ffn
from pjax.quality import FfnWay, Quality, measure_quality, mode_ways
from pjax.thresholds import marked_above, set_recall
from pjax.weights import PackedFfn


class Curve(NamedTuple):
    """What a layer's predictor can do on held-out tokens, a point a threshold.

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


def recall_curves(predictors: Predictors) -> list[Curve]:
    """What each predictor can do, from its histogram; layers without one, or never active, have no curve."""
    curves = []
    parts = zip(predictors.layers, predictors.histograms, predictors.reports, strict=True)
    for index, (predictor, histogram, report) in enumerate(parts):
        thresholds, (inactive, active, _) = marked_above(histogram)
        if predictor is None or not active[0]:
            continue
        marked = inactive + active
        curve = (thresholds, active / active[0], marked / marked[0], active / np.maximum(marked, 1))
        curves.append(Curve(index, *curve, now=(report.recall, report.density)))
    return curves


def traded_curve(
    model: Decoder, predictors: Predictors, rows: np.ndarray, recalls: Sequence[float]
) -> list[dict[str, Any]]:
    """The model's quality with all thresholds at the same recall on held-out tokens, a row a recall."""
    table = []
    for recall in recalls:
        chosen = set_recall(predictors, recall)
        ways = mode_ways(model, ("dense", "predicted"), chosen)
        density = float(np.mean([report.density for report in chosen.reports]))
        table.append({"recall": recall, "density": density} | _row(measure_quality(model, rows, ways)))
    return table
