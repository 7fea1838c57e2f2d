"""Ranks chosen by cost on layers planted with known sparsity, skew and inner rank."""

import numpy as np
import pytest

from pjax.predictor import LayerCost, lowrank_bytes, rank_choices
from pjax.profiler import hot_share
from pjax.ranks import RANK_RECALL, Sample, choose_rank, first_rank, step_order, try_rank

MODEL, NEURONS = 128, 512
COST = LayerCost(NEURONS, opener_bytes=4 * MODEL, bytes_per_s=1.0, gather_bytes_per_s=0.9)
RANKS = rank_choices("q4_0", MODEL, NEURONS, 4 * 3 * MODEL)


def planted(inner: int, density: float, skew: float, seed: int = 0) -> Sample:
    """A layer whose openers have that inner rank, that share of them open, and biases of that deviation."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(NEURONS, inner)) @ rng.normal(size=(inner, MODEL)) / inner**0.5
    x = rng.normal(size=(5120, MODEL))
    products = x @ rows.T / MODEL**0.5 + skew * rng.normal(size=NEURONS)
    active = products > np.quantile(products, 1 - density)
    return Sample(x[:4096], active[:4096], x[4096:], active[4096:])


LAYERS = {
    "simple": planted(2, 0.03, 0.0),
    "skewed": planted(16, 0.06, 2.0),
    "even": planted(16, 0.25, 0.0),
}


@pytest.fixture(scope="module")
def chosen():
    """{name: (best trial, {rank: trial} of all that were tried)} for each layer."""
    found = {}
    for name, sample in LAYERS.items():
        trials = {}
        skew = hot_share(sample.active_mask.sum(0))
        best = choose_rank(
            sample, RANKS, "q4_0", COST, (0,), skew, lambda trial, to=trials: to.update({trial.rank: trial})
        )
        found[name] = (best, trials)
    return found


def test_sparser_and_more_skewed_layers_get_smaller_predictors(chosen):
    ranks = [chosen[name][0].rank for name in LAYERS]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]
    assert {trial.rank for _, trials in chosen.values() for trial in trials.values()} <= set(RANKS)


def test_the_best_is_cheaper_than_its_neighbours(chosen):
    for name, (best, trials) in chosen.items():
        index = RANKS.index(best.rank)
        for rank in RANKS[max(0, index - 1) : index + 2]:
            trial = trials.get(rank) or try_rank(LAYERS[name], rank, "q4_0", COST, (0,))
            assert best.cost_s <= 1.01 * trial.cost_s


def test_trials_add_up(chosen):
    for best, trials in chosen.values():
        for trial in trials.values():
            assert trial.bytes == lowrank_bytes("q4_0", MODEL, NEURONS, trial.rank)
            assert trial.cost_s == COST.of(trial.bytes, trial.density)
            assert trial.cost_s * 1.01 >= best.cost_s


def test_adapted_ranks_read_a_fifth_less_than_the_best_fixed_one(chosen):
    """Bytes a token of predictors and of the rows that they mark, all at the same recall."""

    def read(trial) -> float:
        return trial.bytes + trial.density * NEURONS * COST.opener_bytes

    fixed = {
        rank: sum(read(try_rank(sample, rank, "q4_0", COST, (0,))) for sample in LAYERS.values())
        for rank in RANKS
    }
    adapted = sum(read(best) for best, _ in chosen.values())
    print(fixed, adapted, {n: (b.rank, b.density) for n, (b, _) in chosen.items()}, RANK_RECALL)
    assert adapted <= 0.8 * min(fixed.values())


def test_the_first_rank_follows_the_density():
    found = [first_rank(RANKS, "q4_0", MODEL, density, COST) for density in (0.0, 0.05, 0.2, 1.0)]
    assert found[0] == RANKS[0] and found == sorted(found) and found[-1] > found[0]
    assert lowrank_bytes("q4_0", MODEL, NEURONS, found[-1]) <= NEURONS * COST.opener_bytes


@pytest.mark.parametrize("value", [False, True])
def test_a_layer_that_is_dead_or_always_on(value):
    x, mask = np.ones((1, MODEL)), np.full((1, NEURONS), value)
    best = choose_rank(Sample(x, mask, x, mask), RANKS, "q4_0", COST, (0,), 0.0)
    assert best.rank in RANKS and np.isfinite(best.cost_s)


def test_each_token_comes_once():
    order = step_order(np.random.default_rng(0), 103, 20)
    assert order.shape == (5, 20) and len(np.unique(order)) == 100
