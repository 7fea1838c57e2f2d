"""Fit and apply a predictor: two small matrices that guess a layer's active neurons from its input.

The method is PowerInfer's (arXiv 2312.12456, section 5.1) after Deja Vu: a low-rank network a layer,
trained on what the layer really did. This module knows no model: it is fed inputs and masks.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pjax import ops
from pjax.base import LowRankPredictor, PredictorReport
from pjax.weights import BLOCK, DTYPES, QUANTISED_DTYPES, Matrix, PackedMatrix

LEARNING_RATE = 3e-3
"""Peak of the cosine schedule; 1e-3 is 0.01 of precision behind after the quickstart, 1e-2 is noisy."""

MAX_SCORE = 16.0
"""Scores beyond +-16 (odds of 1e7) are as good as certain, so the histogram of scores ends there."""

NUM_BINS = 2048
"""Of that histogram: a bin is 1/64 wide, so the threshold is within 1.6 % in odds of the exact one."""

BIN_EDGES = np.linspace(-MAX_SCORE, MAX_SCORE, NUM_BINS - 1, dtype=np.float32)
"""Upper edges of all bins but the last; the first and last bins are open."""

CERTAIN = 1e9
"""A threshold below or above every score; finite, so that JSON can carry it."""


def predict_scores(predictor: LowRankPredictor, x: jax.Array) -> jax.Array:
    """`relu(x @ first.T) @ second.T + bias`: the log-odds that a neuron is active.

    Args:
        predictor: of one layer.
        x: [batch, model], the input that the predictor was trained on.

    Returns:
        float32 [batch, neurons].
    """
    hidden = jax.nn.relu(ops.matvec(x, predictor.first))
    return ops.matvec(hidden, predictor.second) + predictor.bias[None, :]


def predict_mask(predictor: LowRankPredictor, x: jax.Array, residual: jax.Array) -> jax.Array:
    """The neurons that may be active.

    Args:
        predictor: of one layer; its `input` says which of the two it reads.
        x: [..., model], the normed FFN input.
        residual: [..., model], what x was made from.

    Returns:
        bool [..., neurons].
    """
    seen = residual if predictor.input == "residual" else x
    mask = predict_scores(predictor, seen.reshape(-1, seen.shape[-1])) > predictor.threshold
    return mask.reshape(*x.shape[:-1], -1)


class FitState(NamedTuple):
    """A predictor in training: its weights and the optimiser's state."""

    predictor: Any  # LowRankPredictor: optax's types know arrays, dicts and lists only
    optimizer: optax.OptState


def default_rank(model: int, neurons: int) -> int:
    """A rank that costs 1/16 of a gated FFN's numbers, as PowerInfer's released predictors do.

    `rank * (model + neurons) = 3 * model * neurons / 16`, rounded up to a multiple of 32, the block of the
    quantised types.
    """
    rank = 3 * model * neurons / (16 * (model + neurons))
    return max(32, int(-(-rank // 32)) * 32)


def with_dtype(predictor: LowRankPredictor, dtype: str) -> LowRankPredictor:
    """The predictor with its matrices in another weight type; bias and threshold stay float32.

    Args:
        predictor: of float weights.
        dtype: "float32", "bfloat16", "float16", "q8_0" or "q4_0".

    Raises:
        ValueError: a quantised type, and widths that are not multiples of 32.
    """

    def convert(matrix: Matrix) -> Matrix:
        if isinstance(matrix, PackedMatrix):
            raise ValueError(f"predictor: expected float weights, got {matrix.format}")
        return ops.pack_matrix(matrix, dtype) if dtype in QUANTISED_DTYPES else matrix.astype(dtype)

    return dataclasses.replace(predictor, first=convert(predictor.first), second=convert(predictor.second))


def init_predictor(key: jax.Array, model: int, frequency: np.ndarray, rank: int) -> LowRankPredictor:
    """An untrained predictor whose bias already says how often each neuron is active.

    Args:
        key: of the random weights.
        model: width of the input.
        frequency: [neurons], activation frequency in 0..1.
        rank: width of the hidden layer.
    """
    # Clipped to odds of e-4 so that never-seen neurons start certain enough, and finite.
    odds = np.clip(frequency, 1e-4, 1 - 1e-4)
    first_key, second_key = jax.random.split(key)
    return LowRankPredictor(
        first=jax.random.normal(first_key, (rank, model)) * model**-0.5,
        second=jax.random.normal(second_key, (frequency.shape[0], rank)) * 0.1 * rank**-0.5,
        bias=jnp.asarray(np.log(odds / (1 - odds)), jnp.float32),
        threshold=jnp.float32(0),
    )


@functools.cache  # the same object for the same steps, so that `fit_step` is compiled once
def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Adam with a cosine schedule over `num_steps`."""
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, max(num_steps, 1), alpha=0.02)
    return optax.adam(schedule)


def init_fit(predictor: LowRankPredictor, optimizer: optax.GradientTransformation) -> FitState:
    """The state before the first step."""
    state = FitState(predictor, ())
    return state._replace(optimizer=optimizer.init(state.predictor))


def loss(predictor: LowRankPredictor, x: jax.Array, active_mask: jax.Array) -> jax.Array:
    """Mean binary cross-entropy of the scores; x [batch, model], active_mask bool [batch, neurons]."""
    scores = predict_scores(predictor, x)
    return optax.sigmoid_binary_cross_entropy(scores, active_mask.astype(jnp.float32)).mean()


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=0)
def fit_step(
    state: FitState, x: jax.Array, active_mask: jax.Array, *, optimizer: optax.GradientTransformation
) -> tuple[FitState, jax.Array]:
    """One step on x [batch, model] and active_mask bool [batch, neurons]; returns the loss too."""
    value, grads = jax.value_and_grad(loss)(state.predictor, x, active_mask)
    updates, optimizer_state = optimizer.update(grads, state.optimizer)
    return FitState(optax.apply_updates(state.predictor, updates), optimizer_state), value


@jax.jit
def score_histogram(predictor: LowRankPredictor, x: jax.Array, active_mask: jax.Array) -> jax.Array:
    """How the scores of inactive and active neurons are spread.

    Args:
        predictor: of one layer.
        x: [batch, model].
        active_mask: bool [batch, neurons].

    Returns:
        int32 [2, NUM_BINS]: counts of inactive, then of active neurons with a score in each bin.
    """
    bins = jnp.searchsorted(jnp.asarray(BIN_EDGES), predict_scores(predictor, x), side="left")
    index = active_mask.astype(jnp.int32) * NUM_BINS + bins
    return jnp.bincount(index.reshape(-1), length=2 * NUM_BINS).reshape(2, NUM_BINS)


def check_widths(dtype: str, model: int, rank: int | None) -> None:
    """Raises ValueError unless predictors of these widths can have the type."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if dtype in QUANTISED_DTYPES and (model % BLOCK or (rank or BLOCK) % BLOCK):
        raise ValueError(
            f"dtype: {dtype} needs a model width and a rank that are multiples of {BLOCK}, got {model} and "
            f"{rank}; use bfloat16"
        )


def check_recall(recall: float) -> None:
    """Raises ValueError unless recall is a number in 0..1."""
    if not 0 <= recall <= 1:
        raise ValueError(f"recall: expected a number in 0..1, got {recall!r}")


def report_at(predictor: LowRankPredictor, histogram: np.ndarray, recall: float) -> PredictorReport:
    """The highest threshold that still reaches a recall, and what it gives.

    Args:
        predictor: of one layer.
        histogram: int [2, NUM_BINS], the sum of `score_histogram` over held-out tokens.
        recall: wanted share of active neurons marked, 0..1. A layer with none has recall 1.

    Raises:
        ValueError: if recall is outside 0..1.
    """
    check_recall(recall)
    # marked[:, i] counts the scores above threshold i, the lower edge of bin i; none above the last.
    marked = np.concatenate([np.cumsum(histogram[:, ::-1], axis=1)[:, ::-1], np.zeros((2, 1))], axis=1)
    thresholds = np.concatenate([[-CERTAIN], BIN_EDGES, [CERTAIN]])
    total = histogram.sum(axis=1)
    recalls = marked[1] / total[1] if total[1] else np.ones(len(thresholds))
    best = int(np.flatnonzero(recalls >= recall)[-1])
    return make_report(predictor, float(thresholds[best]), marked[:, best], total)


def make_report(
    predictor: LowRankPredictor, threshold: float, marked: np.ndarray, total: np.ndarray
) -> PredictorReport:
    """What a predictor gives at a threshold.

    Args:
        predictor: of one layer.
        threshold: score above which it marks a neuron.
        marked: [2], how often it marked an inactive, and an active neuron.
        total: [2], how often neurons were inactive and active.
    """
    inactive, active = (int(n) for n in marked)
    neurons, total_active = int(total.sum()), int(total[1])
    return PredictorReport(
        rank=predictor.first.shape[0],
        recall=active / total_active if total_active else 1.0,
        precision=active / (active + inactive) if active + inactive else 1.0,
        density=(active + inactive) / neurons if neurons else 0.0,
        true_density=total_active / neurons if neurons else 0.0,
        threshold=threshold,
        bytes=sum(a.nbytes for a in (predictor.first, predictor.second, predictor.bias)),
    )
