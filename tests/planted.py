"""Predictors and layers in memory whose right answers are known."""

import jax.numpy as jnp
import numpy as np

from pjax.base import LowRankPredictor, ScoreHistogram
from pjax.predictor import predict_scores
from pjax.thresholds import score_histogram


def random_predictor(seed: int = 0, model: int = 6, neurons: int = 9, rank: int = 4) -> LowRankPredictor:
    rng = np.random.default_rng(seed)

    def array(*shape: int):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return LowRankPredictor(array(rank, model), array(neurons, rank), array(neurons), jnp.float32(0.25))


def numpy_scores(predictor: LowRankPredictor, x) -> np.ndarray:
    first, second, bias = (
        np.asarray(a, np.float64) for a in (predictor.first, predictor.second, predictor.bias)
    )
    return np.maximum(np.asarray(x, np.float64) @ first.T, 0) @ second.T + bias[None, :]


def histogram_of(predictor, x, active, contributions=None) -> ScoreHistogram:
    """As `score_histogram`, in one record; each active neuron contributes 1."""
    weights = jnp.asarray(active if contributions is None else contributions)
    counts, sums = score_histogram(predict_scores(predictor, jnp.asarray(x)), jnp.asarray(active), weights)
    return ScoreHistogram(np.asarray(counts), np.asarray(sums))
