"""Runs a model to observe it: which neurons are active, and on what input; trains predictors on that."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax.base import ActivationStats, FfnFn, LowRankPredictor, Predictors, ProgressFn
from pjax.model import Decoder, check_ids, prompt_positions
from pjax.model_config import Activation, ModelConfig
from pjax.ops.reference import dense_ffn
from pjax.predictor import (
    NUM_BINS,
    FitState,
    check_recall,
    check_widths,
    default_rank,
    fit_step,
    init_fit,
    init_predictor,
    make_optimizer,
    make_report,
    predict_mask,
    report_at,
    score_histogram,
    with_dtype,
)

TOKENS_PER_BATCH = 4096
"""Observed at once, or one sequence if that is longer: the inputs and masks of a 7B model's 32 layers are
then 3.6 GB, and XLA's products run at their full rate."""

HELD_OUT = 8
"""One of so many sequences is kept from training, to set the threshold and report recall on."""

STEP_TOKENS = 512
"""Tokens of one optimiser step; fewer are noisy for a neuron that is active for one token in a hundred."""

PASSES = 2
"""Steps that see each observed token: observing a token costs more than another step on it."""


class Observed(NamedTuple):
    """What one layer did.

    Attributes:
        x: float32 [tokens, model], the FFN input.
        active_mask: bool [tokens, neurons].
    """

    x: jax.Array
    active_mask: jax.Array


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


def _check_profiled(ids: np.ndarray, config: ModelConfig) -> np.ndarray:
    """As `check_ids`, also refusing a model without zeros to find."""
    if not config.is_sparse:
        raise ValueError(
            f"model: {config.name} has the activation {config.activation!r}, under which every neuron is "
            'active for every token; there is nothing to profile, use mode="dense"'
        )
    return check_ids(ids, config)


def _batches(ids: np.ndarray) -> Iterator[np.ndarray]:
    rows = max(1, TOKENS_PER_BATCH // ids.shape[1])
    for start in range(0, len(ids), rows):
        yield ids[start : start + rows]


def _no_progress(done: int, total: int) -> None:
    del done, total


def collect_stats(
    model: Decoder, ids: np.ndarray, *, progress_fn: ProgressFn = _no_progress
) -> ActivationStats:
    """Counts how often each neuron is active.

    Args:
        model: the decoder.
        ids: int32 [batch, seq]; every token is counted.
        progress_fn: called with the tokens done and in all.

    Raises:
        ValueError: if the ids do not fit the model, or its activation leaves no neuron at zero.
    """
    ids = _check_profiled(ids, model.config)
    graphdef, state = nnx.split(model)
    counts = [np.zeros(neurons, np.int64) for neurons in model.config.neurons]
    done = 0
    for batch in _batches(ids):
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


def train_predictors(
    model: Decoder,
    ids: np.ndarray,
    *,
    recall: float = 0.95,
    rank: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    progress_fn: ProgressFn = _no_progress,
) -> Predictors:
    """Trains one predictor a layer on what the model does, and sets their thresholds.

    The text is observed in random order, a batch at a time, and each batch is forgotten after
    `PASSES` steps a token: memory does not grow with the text.

    Args:
        model: the decoder.
        ids: int32 [batch, seq], at least two sequences; one in eight is held out.
        recall: wanted share of active neurons marked on held-out tokens, 0..1.
        rank: width of the predictors, at least 1; None takes `default_rank`.
        dtype: weight type of the predictors that come out, see `predictor.with_dtype`; they are trained in
            float32, and thresholds and reports are those of the type.
        seed: of the initial weights and the order.
        progress_fn: called with the sequences done and in all.

    Raises:
        ValueError: if the ids do not fit the model, its activation leaves no neuron at zero, recall or rank
            is out of range, or the widths do not fit dtype.
    """
    ids = _check_profiled(ids, model.config)
    if len(ids) < 2:
        raise ValueError(f"ids: expected at least two sequences, one of them to hold out, got {len(ids)}")
    check_recall(recall)
    if rank is not None and rank < 1:
        raise ValueError(f"rank: expected at least 1, or None to choose one, got {rank}")
    held_out, training = ids[::HELD_OUT], np.delete(ids, np.s_[::HELD_OUT], axis=0)
    training = np.random.default_rng(seed).permutation(training)
    check_widths(dtype, model.config.model, rank)
    fitted = _fit(model, training, rank, seed, lambda done: progress_fn(done, len(ids)))
    predictors = [with_dtype(predictor, dtype) for predictor in fitted]
    graphdef, state = nnx.split(model)
    histograms = [np.zeros((2, NUM_BINS), np.int64)] * model.config.layers
    done = len(training)
    for batch in _batches(held_out):
        observed = observe(graphdef, state, batch)
        for i, (predictor, layer) in enumerate(zip(predictors, observed, strict=True)):
            histograms[i] = histograms[i] + np.asarray(score_histogram(predictor, layer.x, layer.active_mask))
        done += len(batch)
        progress_fn(done, len(ids))
    reports = tuple(report_at(p, h, recall) for p, h in zip(predictors, histograms, strict=True))
    layers = tuple(
        dataclasses.replace(predictor, threshold=jnp.float32(report.threshold))
        for predictor, report in zip(predictors, reports, strict=True)
    )
    return Predictors(layers, reports)


def measure_predictors(
    model: Decoder,
    layers: tuple[LowRankPredictor, ...],
    ids: np.ndarray,
    *,
    progress_fn: ProgressFn = _no_progress,
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
    ids = _check_profiled(ids, model.config)
    graphdef, state = nnx.split(model)
    layers = jax.device_put(layers)
    counts = np.zeros((len(layers), 2, 2), np.int64)
    done = 0
    for batch in _batches(ids):
        for total, part in zip(counts, _count_marked(graphdef, state, layers, batch), strict=True):
            total += np.asarray(part, np.int64).sum(-1)
        done += len(batch)
        progress_fn(done, len(ids))
    reports = tuple(
        make_report(layer, float(layer.threshold), marked, total)
        for layer, (marked, total) in zip(layers, counts, strict=True)
    )
    return Predictors(layers, reports)


@partial(jax.jit, static_argnames="graphdef")
def _count_marked(graphdef, state, layers: tuple[LowRankPredictor, ...], ids: jax.Array) -> list[jax.Array]:
    """For each layer int32 [2, 2, neurons]: (marked, all) of its (inactive, active) neurons."""
    return nnx.merge(graphdef, state).run(ids, prompt_positions(ids), ffn_fn=_marked_ffn_fn(layers))[2]


def _marked_ffn_fn(layers: tuple[LowRankPredictor, ...]) -> FfnFn:
    def ffn_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, observed = observed_ffn_fn(layer, x, residual)
        active = observed.active_mask
        marked = predict_mask(layers[layer.index], x, residual).reshape(active.shape)
        masks = ((marked & ~active, marked & active), (~active, active))
        return y, jnp.stack([jnp.stack([mask.sum(0, dtype=jnp.int32) for mask in pair]) for pair in masks])

    return ffn_fn


def _fit(
    model: Decoder, ids: np.ndarray, rank: int | None, seed: int, done_fn: Callable[[int], None]
) -> list[LowRankPredictor]:
    """One pass over the sequences, in their order, training all layers side by side."""
    graphdef, state = nnx.split(model)
    num_steps = sum(PASSES * (batch.size // min(STEP_TOKENS, batch.size)) for batch in _batches(ids))
    optimizer = make_optimizer(num_steps)
    key, rng = jax.random.key(seed), np.random.default_rng(seed)
    fits: list[FitState] = []
    done = 0
    for batch in _batches(ids):
        layers = observe(graphdef, state, batch)
        for i, layer in enumerate(layers):
            if done == 0:
                frequency = np.asarray(layer.active_mask.mean(0))
                width = rank or default_rank(model.config.model, model.config.neurons[i])
                start = init_predictor(jax.random.fold_in(key, i), model.config.model, frequency, width)
                fits.append(init_fit(start, optimizer))
            size = min(STEP_TOKENS, batch.size)
            for _ in range(PASSES):
                order = rng.permutation(batch.size)[: batch.size // size * size].reshape(-1, size)
                for rows in order:
                    fits[i], _ = fit_step(
                        fits[i], layer.x[rows], layer.active_mask[rows], optimizer=optimizer
                    )
        done += len(batch)
        done_fn(done)
    return [fit.predictor for fit in fits]
