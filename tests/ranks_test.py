"""Ranks chosen by cost on layers planted with known sparsity, skew and inner rank."""

import numpy as np
import pytest

from pjax.predictor import LayerCost, lowrank_bytes
from pjax.profiler import hot_share
from pjax.training import ranks
from pjax.training.ranks import RANK_RECALL, Sample, Trial, choose_rank, first_rank, step_order, try_rank

MODEL, NEURONS, RANKS, DTYPE = 64, 256, (32, 64, 128), "float32"
COST = LayerCost(NEURONS, opener_bytes=10_000.0, bytes_per_s=1.0, gather_bytes_per_s=0.95)


def planted(inner: int, density: float, skew: float, seed: int) -> Sample:
    """A layer whose openers have that inner rank, that share of them open, and biases of that deviation."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(NEURONS, inner)) @ rng.normal(size=(inner, MODEL))
    x = rng.normal(size=(5120, MODEL)).astype(np.float32)
    products = x @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T + skew * rng.normal(size=NEURONS)
    active = products > np.quantile(products, 1 - density)
    return Sample(x[:4096], active[:4096], x[4096:], active[4096:])


LAYERS = {
    "sparse and skewed": planted(64, 0.004, 3.0, seed=0),
    "sparse": planted(8, 0.004, 3.0, seed=1),
    "skewed": planted(64, 0.005, 3.0, seed=2),
    "even": planted(64, 0.15, 0.0, seed=3),
}


@pytest.fixture(scope="module")
def trials():
    """{name: {rank: trial}} of every layer and rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "STEP_TOKENS", 128)  # so that few tokens give enough steps
        yield {
            name: {rank: try_rank(sample, rank, DTYPE, COST, (0,)) for rank in RANKS}
            for name, sample in LAYERS.items()
        }


@pytest.fixture(scope="module")
def chosen(trials):
    """{name: best trial} as `choose_rank` finds them, asking for trials one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        names = {id(sample): name for name, sample in LAYERS.items()}
        patch.setattr(ranks, "try_rank", lambda sample, rank, *rest: trials[names[id(sample)]][rank])
        return {
            name: choose_rank(sample, RANKS, DTYPE, COST, (0,), hot_share(sample.active_mask.sum(0)))
            for name, sample in LAYERS.items()
        }


def test_sparser_and_more_skewed_layers_get_smaller_predictors(chosen):
    sizes = [trial.rank for trial in chosen.values()]
    assert sizes == sorted(sizes) and sizes[0] == RANKS[0] and sizes[-1] == RANKS[-1]


def test_the_best_is_the_cheapest(chosen, trials):
    for name, best in chosen.items():
        assert best.cost_s <= 1.011 * min(trial.cost_s for trial in trials[name].values())


def test_trials_add_up(trials):
    for name, sample in LAYERS.items():
        densities = []
        for rank, trial in trials[name].items():
            assert (trial.rank, trial.bytes) == (rank, lowrank_bytes(DTYPE, MODEL, NEURONS, rank))
            assert trial.cost_s == COST.of(trial.bytes, trial.density)
            densities.append(trial.density)
        assert RANK_RECALL * sample.held_out_mask.mean() <= min(densities) <= max(densities) < 1


def test_adapted_ranks_read_a_fifth_less_than_the_best_fixed_one(chosen, trials):
    """Bytes a token of predictors and of the rows that they mark, all at the same recall."""

    def read(trial) -> float:
        return trial.bytes + trial.density * NEURONS * COST.opener_bytes

    fixed = [sum(read(trials[name][rank]) for name in LAYERS) for rank in RANKS]
    assert sum(map(read, chosen.values())) <= 0.8 * min(fixed)


@pytest.mark.parametrize("hot_share, tried", [(0.1, [64, 32, 128]), (0.8, [64, 128, 32])])
def test_a_skewed_layer_shrinks_first_and_an_even_one_grows(hot_share, tried, monkeypatch):
    order = []

    def flat(sample, rank, *rest):  # the first is the cheapest
        order.append(rank)
        return Trial(rank, 0.3, 0, 1e9 if rank == 64 else 1.1e9)

    monkeypatch.setattr(ranks, "try_rank", flat)
    sample = planted(4, 0.04, 0.0, seed=4)
    cost = COST._replace(opener_bytes=12_000.0)
    assert choose_rank(sample, RANKS, DTYPE, cost, (0,), hot_share).rank == 64
    assert order == tried


def test_a_rank_whose_bytes_alone_cost_too_much_is_not_tried(monkeypatch):
    tried = []

    def perfect(sample, rank, *rest):
        tried.append(rank)
        return Trial(rank, 0.04, 0, COST.of(lowrank_bytes(DTYPE, MODEL, NEURONS, rank), 0.04))

    monkeypatch.setattr(ranks, "try_rank", perfect)
    assert choose_rank(planted(4, 0.04, 0.0, seed=4), RANKS, DTYPE, COST, (0,), 0.8).rank == 32
    assert 128 not in tried


def test_the_first_rank_follows_the_density():
    found = [first_rank(RANKS, DTYPE, MODEL, density, COST) for density in (0.0, 0.01, 0.04, 1.0)]
    assert found[0] == RANKS[0] and found == sorted(found) and found[-1] > found[0]
    assert lowrank_bytes(DTYPE, MODEL, NEURONS, found[-1]) <= NEURONS * COST.opener_bytes


@pytest.mark.parametrize("value", [False, True])
def test_a_layer_that_is_dead_or_always_on(value):
    x, mask = np.ones((1, MODEL)), np.full((1, NEURONS), value)
    best = choose_rank(Sample(x, mask, x, mask), RANKS, DTYPE, COST, (0,), 0.0)
    assert best.rank in RANKS and np.isfinite(best.cost_s)


def test_each_token_comes_once():
    order = step_order(np.random.default_rng(0), 103, 20)
    assert order.shape == (5, 20) and len(np.unique(order)) == 100
