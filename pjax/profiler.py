"""Runs a model to observe it: which neurons are active, on what input, and how well predictors find them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax.base import (
    ActivationStats,
    FfnFn,
    Predictor,
    PredictorReport,
    Predictors,
    ProgressFn,
    ScoreHistogram,
)
from pjax.model import Decoder, check_ids, prompt_positions
from pjax.model_config import Activation, ModelConfig
from pjax.ops import unpack_ffn
from pjax.ops.reference import dense_ffn
from pjax.predictor import predict_mask, predict_scores, predictor_input
from pjax.thresholds import NUM_BINS, make_report, score_histogram

TOKENS_PER_BATCH = 4096
"""Observed at once, or one sequence if that is longer: the inputs and masks of a 7B model's 32 layers are
then 3.6 GB, and XLA's products run at their full rate."""


class Observed(NamedTuple):
    """What one layer did.

    Attributes:
        x: float32 [tokens, model], the FFN input.
        active_mask: bool [tokens, neurons].
    """

    x: jax.Array
    active_mask: jax.Array


class HeldOut(NamedTuple):
    """What one layer did on held-out tokens.

    Attributes:
        y: the FFN's output, as the decoder wants it.
        x: [tokens, model], what its predictor reads.
        active_mask: bool [tokens, neurons].
        contributions: float32 [tokens, neurons], |value| times the norm of the down row.
    """

    y: jax.Array
    x: jax.Array
    active_mask: jax.Array
    contributions: jax.Array


def observed_ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, Observed]:
    """The dense FFN, which also hands back its input and which neurons were active."""
    del residual
    y, values = dense_ffn(x, layer.ffn.weights, Activation.parse(layer.ffn.activation))
    flat = Observed(x.reshape(-1, x.shape[-1]), (values != 0).reshape(-1, values.shape[-1]))
    return layer.ffn.add_down_bias(y), flat


@partial(jax.jit, static_argnames="graphdef")
def observe(graphdef, state, ids: jax.Array) -> list[Observed]:
    """What every layer does on ids [batch, seq]."""
    return nnx.merge(graphdef, state).run(ids, prompt_positions(ids), ffn_fn=observed_ffn_fn)[2]


@partial(jax.jit, static_argnames="graphdef")
def count_active(graphdef, state, ids: jax.Array) -> list[jax.Array]:
    """int32 [neurons] per layer: tokens of ids [batch, seq] for which each neuron is active."""
    return [layer.active_mask.sum(0, dtype=jnp.int32) for layer in observe(graphdef, state, ids)]


def check_profiled(ids: np.ndarray, config: ModelConfig) -> np.ndarray:
    """As `check_ids`, also refusing a model without zeros to find."""
    if not config.is_sparse:
        raise ValueError(
            f"model: {config.name} has the activation {config.activation!r}, under which every neuron is "
            'active for every token; there is nothing to profile, use mode="dense"'
        )
    return check_ids(ids, config)


def batches(ids: np.ndarray) -> Iterator[np.ndarray]:
    """A text [batch, seq] in pieces of at most `TOKENS_PER_BATCH` tokens, or of one sequence."""
    rows = max(1, TOKENS_PER_BATCH // ids.shape[1])
    for start in range(0, len(ids), rows):
        yield ids[start : start + rows]


def no_progress(done: int, total: int) -> None:
    """A `ProgressFn` that tells nobody."""
    del done, total


def collect_stats(
    model: Decoder, ids: np.ndarray, *, progress_fn: ProgressFn = no_progress
) -> ActivationStats:
    """Counts how often each neuron is active.

    Args:
        model: the decoder.
        ids: int32 [batch, seq]; every token is counted.
        progress_fn: called with the tokens done and in all.

    Raises:
        ValueError: if the ids do not fit the model, or its activation leaves no neuron at zero.
    """
    ids = check_profiled(ids, model.config)
    graphdef, state = nnx.split(model)
    counts = [np.zeros(neurons, np.int64) for neurons in model.config.neurons]
    done = 0
    for batch in batches(ids):
        for total, part in zip(counts, count_active(graphdef, state, batch), strict=True):
            total += np.asarray(part)
        done += batch.size
        progress_fn(done, ids.size)
    return ActivationStats(tuple(counts), ids.size)


def hot_share(counts: np.ndarray, share: float = 0.8) -> float:
    """The smallest share of neurons that makes `share` of all activations (the paper's Fig. 4).

    Args:
        counts: int [neurons], of one layer or of all layers together; 0 if none was ever active.
        share: of the activations, more than 0 and at most 1.
    """
    total = counts.sum()
    running = np.cumsum(np.sort(counts)[::-1]) / max(total, 1)
    return float((np.searchsorted(running, share) + 1) / len(counts)) if total else 0.0


def observe_held_out(layer, x: jax.Array, residual: jax.Array, predictor: Predictor | None) -> HeldOut:
    """What a layer does, beside what its predictor reads; x and residual [batch, seq, model]."""
    ffn = layer.ffn.weights
    y, values = dense_ffn(x, ffn, Activation.parse(layer.ffn.activation))
    flat = values.reshape(-1, values.shape[-1])
    norms = jnp.linalg.norm(unpack_ffn(ffn).down.astype(jnp.float32), axis=1)
    seen = x if predictor is None else predictor_input(predictor, x, residual)
    return HeldOut(
        layer.ffn.add_down_bias(y), seen.reshape(-1, x.shape[-1]), flat != 0, jnp.abs(flat) * norms[None, :]
    )


@partial(jax.jit, static_argnames="graphdef")
def _histograms(graphdef, state, layers: Sequence[Predictor | None], ids: jax.Array) -> list:
    def ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        predictor = layers[layer.index]
        seen = observe_held_out(layer, x, residual, predictor)
        scores = jnp.zeros(seen.active_mask.shape)
        if predictor is not None:
            scores = predict_scores(predictor, seen.x)
        return seen.y, score_histogram(scores, seen.active_mask, seen.contributions)

    return nnx.merge(graphdef, state).run(ids, prompt_positions(ids), ffn_fn=ffn_fn)[2]


def measure_scores(
    model: Decoder,
    layers: Sequence[Predictor | None],
    ids: np.ndarray,
    *,
    progress_fn: ProgressFn = no_progress,
) -> tuple[ScoreHistogram, ...]:
    """How the scores of each layer's neurons are spread; of a layer without a predictor all are 0.

    Args:
        model: the decoder.
        layers: one predictor a layer, or None.
        ids: int32 [batch, seq], none of which they were trained on.
        progress_fn: called with the sequences done and in all.
    """
    graphdef, state = nnx.split(model)
    layers = jax.device_put(tuple(layers))
    counts = np.zeros((len(layers), 2, NUM_BINS), np.int64)
    contributions = np.zeros((len(layers), NUM_BINS))
    done = 0
    for batch in batches(ids):
        for i, (count, contribution) in enumerate(_histograms(graphdef, state, layers, batch)):
            counts[i] += np.asarray(count)
            contributions[i] += np.asarray(contribution)
        done += len(batch)
        progress_fn(done, len(ids))
    return tuple(ScoreHistogram(*pair) for pair in zip(counts, contributions, strict=True))


def measure_predictors(
    model: Decoder,
    layers: tuple[Predictor, ...],
    ids: np.ndarray,
    *,
    progress_fn: ProgressFn = no_progress,
) -> Predictors:
    """Reports how well predictors do that were not trained here, at the thresholds they have.

    Args:
        model: the decoder.
        layers: one predictor a layer.
        ids: int32 [batch, seq], none of which they were trained on.
        progress_fn: called with the sequences done and in all.

    Raises:
        ValueError: if the ids do not fit the model, or its activation leaves no neuron at zero.
    """
    ids = check_profiled(ids, model.config)
    graphdef, state = nnx.split(model)
    layers = jax.device_put(layers)
    sums = np.zeros((len(layers), 2, 3))
    done = 0
    for batch in batches(ids):
        for total, (counts, contributions) in zip(
            sums, _sum_marked(graphdef, state, layers, batch), strict=True
        ):
            total[:, :2] += np.asarray(counts, np.int64).sum(-1)
            total[:, 2] += np.asarray(contributions)
        done += len(batch)
        progress_fn(done, len(ids))
    reports: list[PredictorReport] = [
        make_report(layer, float(layer.threshold), marked, total)
        for layer, (marked, total) in zip(layers, sums, strict=True)
    ]
    return Predictors(layers, tuple(reports))


@partial(jax.jit, static_argnames="graphdef")
def _sum_marked(graphdef, state, layers: tuple[Predictor, ...], ids: jax.Array) -> list:
    """For each layer, of the marked and of all neurons, see `_marked_ffn_fn`."""
    return nnx.merge(graphdef, state).run(ids, prompt_positions(ids), ffn_fn=_marked_ffn_fn(layers))[2]


def _marked_ffn_fn(layers: tuple[Predictor, ...]) -> FfnFn:
    """Hands back int32 [2, 2, neurons], times of inactive and active; float32 [2], contributions."""

    def ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        predictor = layers[layer.index]
        seen = observe_held_out(layer, x, residual, predictor)
        active = seen.active_mask
        marked = predict_mask(predictor, x, residual).reshape(active.shape)
        masks = ((marked & ~active, marked & active), (~active, active))
        counts = jnp.stack([jnp.stack([mask.sum(0, dtype=jnp.int32) for mask in pair]) for pair in masks])
        sums = (seen.contributions.sum(where=marked), seen.contributions.sum())
        return seen.y, (counts, jnp.stack(sums))

    return ffn_fn
