"""Finds the rank at which a layer's predictor costs the least time.

PowerInfer sizes predictors by a layer's sparsity and skewness (arXiv 2312.12456, section 5.1) and says no
more. Here: the sparser a layer, the smaller the rank to start from; the more of its activations fall on few
neurons, the more the frequencies alone know, so a skewed layer is shrunk first and an even one grown; then
the measured cost decides. Recall is the same for all ranks, set by the threshold; what a small predictor
lacks it marks too much, and what it marks is read.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pjax.base import ScoreHistogram
from pjax.predictor import LayerCost, lowrank_bytes, predict_scores, with_dtype
from pjax.thresholds import report_at, score_histogram
from pjax.training.fit import fit_tokens, init_fit, init_predictor, positive_weight

RANK_RECALL = 0.95
"""At which ranks are compared, whatever recall is asked for later: the paper's."""

SKEWED = 0.4
"""A layer is skewed if 80 % of its activations fall on fewer of its neurons than this share."""

STEP_TOKENS = 512
"""Tokens of one optimiser step; fewer are noisy for a neuron that is active for one token in a hundred."""

TRIAL_PASSES = 4
"""Over the sample for each rank that is tried: with 16,384 tokens a third of the demo model's training."""

TRIAL_RATES = 20
"""Learning rates of a trial, one after the other."""

TIE = 0.01
"""Differences of cost that are noise; the smaller rank is taken."""


class Sample(NamedTuple):
    """What one layer did, on tokens to fit and on others to measure.

    Attributes:
        x: float [tokens, model].
        active_mask: bool [tokens, neurons].
        held_out_x, held_out_mask: the same of the others.
    """

    x: np.ndarray
    active_mask: np.ndarray
    held_out_x: np.ndarray
    held_out_mask: np.ndarray


class Trial(NamedTuple):
    """A rank that was tried.

    Attributes:
        rank: of the predictor.
        density: share of neurons that it marks at `RANK_RECALL`, 0..1.
        bytes: of its weights.
        cost_s: see `LayerCost`.
    """

    rank: int
    density: float
    bytes: int
    cost_s: float


def first_rank(ranks: Sequence[int], dtype: str, model: int, density: float, cost: LayerCost) -> int:
    """The largest rank whose predictor is no larger than the openers of the active neurons, or the smallest.

    A predictor that costs more than the rows it has to find seldom pays.
    """
    active_bytes = density * cost.neurons * cost.opener_bytes
    fitting = [rank for rank in ranks if lowrank_bytes(dtype, model, cost.neurons, rank) <= active_bytes]
    return max(fitting, default=ranks[0])


def try_rank(sample: Sample, rank: int, dtype: str, cost: LayerCost, seed: Sequence[int]) -> Trial:
    """Fits a predictor of that rank to the sample, in the type it will have, and measures it.

    Args:
        sample: of the layer.
        rank: to try.
        dtype: weight type.
        cost: of the layer.
        seed: of weights and order; the same for all ranks, so that luck is shared.
    """
    x, active = jnp.asarray(sample.x, jnp.float32), jnp.asarray(sample.active_mask)
    frequency = sample.active_mask.mean(0)
    key = jax.random.key(int(np.random.default_rng(seed).integers(2**31)))
    fit = init_fit(init_predictor(key, x.shape[1], frequency, rank))
    weight, rng = positive_weight(float(frequency.mean())), np.random.default_rng(seed)
    size = min(STEP_TOKENS, len(x))
    steps = np.concatenate([step_order(rng, len(x), size) for _ in range(TRIAL_PASSES)])
    pieces = np.array_split(steps, min(TRIAL_RATES, len(steps)))
    for i, piece in enumerate(pieces):
        decayed = max(0.0, 2 * i / len(pieces) - 1)  # the second half, as in the whole training
        fit, _ = fit_tokens(fit, x, active, piece, decayed=decayed, weight=weight, dtype=dtype)
    predictor = with_dtype(fit.predictor, dtype)
    held_out = jnp.asarray(sample.held_out_mask)
    scores = predict_scores(predictor, jnp.asarray(sample.held_out_x, jnp.float32))
    counts, contributions = score_histogram(scores, held_out, held_out)
    histogram = ScoreHistogram(np.asarray(counts, np.int64), np.asarray(contributions, np.float64))
    density = report_at(predictor, histogram, RANK_RECALL).density
    return Trial(rank, density, predictor.nbytes, cost.of(predictor.nbytes, density))


def step_order(rng: np.random.Generator, tokens: int, size: int) -> np.ndarray:
    """All tokens in random order, int [steps, size]; what fills no step is left out."""
    return rng.permutation(tokens)[: tokens // size * size].reshape(-1, size)


def choose_rank(
    sample: Sample,
    ranks: Sequence[int],
    dtype: str,
    cost: LayerCost,
    seed: Sequence[int],
    hot_share: float,
    trial_fn: Callable[[Trial], None] = lambda trial: None,
) -> Trial:
    """Grows or shrinks a layer's rank until that costs time.

    Args:
        sample: of the layer.
        ranks: to choose from, ascending.
        dtype: weight type of the predictor.
        cost: of the layer.
        seed: see `try_rank`.
        hot_share: of the layer, see `profiler.hot_share`.
        trial_fn: told of each trial.

    Returns:
        The cheapest trial.
    """
    trials: dict[int, Trial] = {}

    def at(rank: int) -> Trial:
        if rank not in trials:
            trials[rank] = try_rank(sample, rank, dtype, cost, seed)
            trial_fn(trials[rank])
        return trials[rank]

    def hopeless(rank: int, best: Trial) -> bool:
        size = lowrank_bytes(dtype, sample.x.shape[1], cost.neurons, rank)
        return cost.of(size, float(sample.held_out_mask.mean()) * RANK_RECALL) >= best.cost_s

    density = float(sample.active_mask.mean())
    start = ranks.index(first_rank(ranks, dtype, sample.x.shape[1], density, cost))
    best = at(ranks[start])
    for step in (-1, 1) if hot_share < SKEWED else (1, -1):
        index = ranks.index(best.rank) + step
        while 0 <= index < len(ranks) and not hopeless(ranks[index], best):
            trial = at(ranks[index])
            if trial.cost_s * (1 + TIE * step) >= best.cost_s:
                break
            best, index = trial, index + step
    return best
