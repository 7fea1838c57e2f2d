"""Fits predictors to inputs and masks: gradient steps for the low-rank kind, counting for the one of signs.

This module knows no model: it is fed what a layer read and which of its neurons were active.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pjax import ops
from pjax.base import LowRankPredictor, SignPredictor
from pjax.predictor import predict_scores
from pjax.weights import QUANTISED_DTYPES

LEARNING_RATE = 3e-3
"""At first; 1e-3 is 0.01 of precision behind after the quickstart, 1e-2 is noisy."""

LAST_RATE = 0.02
"""Of the learning rate at the end of the decay."""

ROUNDED_PART = 0.4
"""Of the decay in which the weights are rounded as their type will: on the demo model q4_0 then marks 6 %
fewer neurons than when it is rounded at the end, and rounding for longer gains nothing."""

RARE = 0.01
"""Density below which active neurons weigh more in the loss, by the root of how much rarer they are. Not
above it: there a weight of 4 marks 5 % more neurons at the same recall (the demo model)."""

MAX_WEIGHT = 4.0
"""Of an active neuron."""

PRIOR_TOKENS = 20.0
"""A neuron's shift of score is taken for the layer's mean until it was active for about so many tokens."""


class FitState(NamedTuple):
    """A predictor in training: its weights and the optimiser's state."""

    predictor: Any  # LowRankPredictor: optax's types know arrays, dicts and lists only
    optimizer: optax.OptState


_OPTIMIZER = optax.scale_by_adam()


def _log_odds(frequency: np.ndarray) -> np.ndarray:
    """Clipped to odds of e-4, so that never-seen neurons start certain enough, and finite."""
    odds = np.clip(frequency, 1e-4, 1 - 1e-4)
    return np.log(odds / (1 - odds)).astype(np.float32)


def init_predictor(key: jax.Array, model: int, frequency: np.ndarray, rank: int) -> LowRankPredictor:
    """An untrained predictor whose bias already says how often each neuron is active.

    Args:
        key: of the random weights.
        model: width of the input.
        frequency: [neurons], activation frequency in 0..1.
        rank: width of the hidden layer.
    """
    first_key, second_key = jax.random.split(key)
    return LowRankPredictor(
        first=jax.random.normal(first_key, (rank, model)) * model**-0.5,
        second=jax.random.normal(second_key, (frequency.shape[0], rank)) * 0.1 * rank**-0.5,
        bias=jnp.asarray(_log_odds(frequency)),
        threshold=jnp.float32(0),
    )


def init_fit(predictor: LowRankPredictor) -> FitState:
    """The state before the first step."""
    state = FitState(predictor, ())
    return state._replace(optimizer=_OPTIMIZER.init(state.predictor))


def positive_weight(density: float) -> float:
    """What an active neuron weighs in the loss of a layer of that density, see `RARE`."""
    return float(np.clip((RARE / max(density, 1e-9)) ** 0.5, 1.0, MAX_WEIGHT))


def learning_rate(decayed: float) -> float:
    """The rate after a part of the decay, 0..1: constant before it, linear in it."""
    return LEARNING_RATE * max(LAST_RATE, 1 - decayed)


def _rounded(matrix: jax.Array, dtype: str) -> jax.Array:
    """The matrix as the type would hold it, with the gradient of the identity."""
    kept = ops.unpack_matrix(ops.pack_matrix(matrix, dtype))
    return matrix + jax.lax.stop_gradient(kept - matrix)


def loss(predictor: LowRankPredictor, x: jax.Array, active_mask: jax.Array, weight: jax.Array) -> jax.Array:
    """Mean binary cross-entropy of the scores.

    Args:
        predictor: of float weights.
        x: [batch, model].
        active_mask: bool [batch, neurons].
        weight: float32 scalar, of the active neurons; the others weigh 1.
    """
    scores = predict_scores(predictor, x)
    entropy = optax.sigmoid_binary_cross_entropy(scores, active_mask.astype(jnp.float32))
    return jnp.where(active_mask, weight * entropy, entropy).mean()


@functools.partial(jax.jit, static_argnames="rounded_to", donate_argnums=0)
def fit_step(
    state: FitState,
    x: jax.Array,
    active_mask: jax.Array,
    rows: jax.Array,
    rate: jax.Array,
    weight: jax.Array,
    *,
    rounded_to: str | None,
) -> tuple[FitState, jax.Array]:
    """One step.

    Args:
        state: before it.
        x: [tokens, model].
        active_mask: bool [tokens, neurons].
        rows: int [batch], the tokens of this step.
        rate: float32 scalar, see `learning_rate`.
        weight: as of `loss`.
        rounded_to: a quantised type, in which the weights are used, or None.

    Returns:
        The state after it, and the loss before it.
    """

    def rounded_loss(predictor: LowRankPredictor) -> jax.Array:
        if rounded_to in QUANTISED_DTYPES:
            matrices: list[Any] = [predictor.first, predictor.second]
            first, second = (_rounded(matrix, rounded_to) for matrix in matrices)
            predictor = dataclasses.replace(predictor, first=first, second=second)
        return loss(predictor, x[rows], active_mask[rows], weight)

    value, grads = jax.value_and_grad(rounded_loss)(state.predictor)
    updates, optimizer = _OPTIMIZER.update(grads, state.optimizer)
    predictor = jax.tree.map(lambda p, u: p - rate * u, state.predictor, updates)
    return FitState(predictor, optimizer), value


def fit_tokens(
    state: FitState,
    x: jax.Array,
    active_mask: jax.Array,
    order: np.ndarray,
    *,
    decayed: float,
    weight: float,
    dtype: str,
) -> tuple[FitState, float]:
    """Some steps at one learning rate.

    Args:
        state: before them.
        x: [tokens, model].
        active_mask: bool [tokens, neurons].
        order: int [steps, batch], the tokens of each step.
        decayed: part of the decay that is over, 0..1.
        weight: as of `loss`.
        dtype: type that the weights will have; see `ROUNDED_PART`.

    Returns:
        The state after them, and their mean loss.
    """
    rounded_to = dtype if dtype in QUANTISED_DTYPES and decayed >= 1 - ROUNDED_PART else None
    scalars = jnp.float32(learning_rate(decayed)), jnp.float32(weight)
    values = []
    for rows in order:
        state, value = fit_step(state, x, active_mask, rows, *scalars, rounded_to=rounded_to)
        values.append(value)
    return state, float(np.mean(np.asarray(values)))


class SignSums(NamedTuple):
    """Sums over tokens, float [neurons] each, of the agreement of a neuron's signs with x's.

    Attributes:
        active: tokens for which the neuron was active.
        score: sum of the agreement.
        active_score: the same over those tokens.
        square: sum of its square.
    """

    active: Any
    score: Any
    active_score: Any
    square: Any


@jax.jit
def sum_signs(bits: jax.Array, x: jax.Array, active_mask: jax.Array) -> SignSums:
    """The sums over x [tokens, model], active_mask bool [tokens, neurons]; bits as of `SignPredictor`."""
    scores = ops.sign_scores(x, bits, jnp.float32(1), jnp.zeros(bits.shape[0]))
    active = active_mask.astype(jnp.float32)
    return SignSums(active.sum(0), scores.sum(0), (scores * active).sum(0), jnp.square(scores).sum(0))


def fit_signs(bits: jax.Array, sums: SignSums, num_tokens: int) -> SignPredictor:
    """Turns agreement into log-odds: a linear discriminant for each neuron, of one slope for the layer.

    Agreement is taken for normal, with a mean that being active shifts by as much in all neurons, or nearly:
    `log-odds = slope * (agreement - middle of the two means) + log-odds of the neuron's frequency`. On the
    demo model this marks 13 to 40 % fewer neurons than agreement alone, and a slope of each neuron's own
    gains nothing.

    Args:
        bits: as of `SignPredictor`.
        sums: over all tokens.
        num_tokens: at least 1.
    """
    active, score, active_score, square = (np.asarray(a, np.float64) for a in sums)
    inactive = num_tokens - active
    both = (active > 0) & (inactive > 0)
    mean_active = active_score / np.maximum(active, 1)
    mean_inactive = (score - active_score) / np.maximum(inactive, 1)
    seen = np.where(both, active, 0)
    shift = float((seen * (mean_active - mean_inactive)).sum() / max(seen.sum(), 1))
    own = (seen * (mean_active - mean_inactive) + PRIOR_TOKENS * shift) / (seen + PRIOR_TOKENS)
    mean_inactive = np.where(inactive > 0, mean_inactive, mean_active - own)
    frequency = active / num_tokens
    spread = square / num_tokens - (score / num_tokens) ** 2 - frequency * (1 - frequency) * own**2
    slope = shift / max(float(spread.mean()), 1.0)
    bias = _log_odds(frequency) - slope * (mean_inactive + own / 2)
    return SignPredictor(bits, jnp.float32(slope), jnp.asarray(bias, jnp.float32), jnp.float32(0))
