"""Thresholds and reports, against numpy over all thresholds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax.base import LowRankPredictor, Predictors, ScoreHistogram
from pjax.predictor import predict_scores
from pjax.thresholds import BIN_EDGES, CERTAIN, MAX_SCORE, NUM_BINS, report_at, set_recall, trade_off
from tests.planted import histogram_of, numpy_scores, random_predictor

EMPTY = ScoreHistogram(np.zeros((2, NUM_BINS), np.int64), np.zeros(NUM_BINS))


def identity_predictor(neurons: int) -> LowRankPredictor:
    """Its scores are its inputs, where these are not negative."""
    eye = jnp.eye(neurons)
    return LowRankPredictor(eye, eye, jnp.zeros(neurons), jnp.float32(0))


def random_case(seed: int, share: float, tokens: int = 60):
    """(predictor, x, mask): masks that follow the scores, with noise."""
    predictor, rng = random_predictor(seed), np.random.default_rng(seed + 100)
    x = jnp.asarray(rng.normal(size=(tokens, 6)), jnp.float32)
    noisy = numpy_scores(predictor, x) + rng.normal(size=(tokens, 9))
    return predictor, x, noisy > np.quantile(noisy, 1 - share)


def figures(scores, active, threshold) -> tuple[float, float, float]:
    """(recall, precision, density) by numpy."""
    marked = scores > threshold
    hits = (marked & active).sum()
    return hits / active.sum(), hits / max(1, marked.sum()), marked.mean()


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("recall", [0.0, 0.5, 0.95, 1.0])
def test_threshold_is_the_highest_that_reaches_the_recall(share, recall):
    predictor, x, active = random_case(3, share)
    scores = np.asarray(jax.jit(predict_scores)(predictor, x))
    report = report_at(predictor, histogram_of(predictor, x, active), recall)
    reached = [t for t in (-CERTAIN, *BIN_EDGES, CERTAIN) if figures(scores, active, t)[0] >= recall]
    assert report.threshold == max(reached)
    found = figures(scores, active, report.threshold)
    if recall:  # else nothing is marked, and no precision is defined
        np.testing.assert_allclose((report.recall, report.precision, report.density), found)
    assert report.true_density == active.mean()
    assert report.rank == 4
    assert report.bytes == 4 * (4 * 6 + 9 * 4 + 9)


def test_threshold_is_within_a_bin_of_the_exact_one():
    predictor, x, active = random_case(4, 0.3)
    scores = np.asarray(jax.jit(predict_scores)(predictor, x))
    report = report_at(predictor, histogram_of(predictor, x, active), 0.9)
    # Any threshold below this score, and none from it on, reaches the recall.
    wanted = np.sort(scores[active])[::-1][int(np.ceil(0.9 * active.sum())) - 1]
    assert wanted - 1.01 * (BIN_EDGES[1] - BIN_EDGES[0]) <= report.threshold < wanted


@pytest.mark.parametrize("total", [3, 10, 30, 49])
def test_recall_that_is_a_fraction_of_the_actives_needs_no_more(total):
    histogram = ScoreHistogram(np.zeros((2, NUM_BINS), np.int64), np.zeros(NUM_BINS))
    histogram.counts[1, 100 : 100 + total] = 1
    for wanted in range(1, total + 1):
        report = report_at(identity_predictor(3), histogram, wanted / total)
        assert report.recall == wanted / total


def test_histogram_counts_a_score_on_an_edge_as_not_above_it():
    scores = np.asarray([0.0, BIN_EDGES[1500], BIN_EDGES[1500] + 1e-4, MAX_SCORE, 2 * MAX_SCORE], np.float32)
    histogram = histogram_of(identity_predictor(5), scores[None, :], np.ones((1, 5), bool)).counts
    assert histogram.shape == (2, NUM_BINS)
    assert histogram[0].sum() == 0
    for i, edge in enumerate(BIN_EDGES):
        assert histogram[1, i + 1 :].sum() == (scores > edge).sum()


def test_histograms_add_up():
    predictor, x, active = random_case(5, 0.2)
    whole = histogram_of(predictor, x, active).counts
    parts = [histogram_of(predictor, x[i : i + 20], active[i : i + 20]).counts for i in (0, 20, 40)]
    np.testing.assert_array_equal(whole, np.sum(parts, axis=0))
    assert whole.sum(1).tolist() == [(~active).sum(), active.sum()]


def test_no_tokens_at_all():
    report = report_at(random_predictor(), EMPTY, 0.95)
    json.dumps(report._asdict(), allow_nan=False)
    assert (report.recall, report.density, report.true_density) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("recall", [-0.01, 1.01, float("nan")])
def test_recall_out_of_range(recall):
    with pytest.raises(ValueError, match=r"recall: expected a number in 0\.\.1, got"):
        report_at(random_predictor(), EMPTY, recall)


@pytest.mark.parametrize("recall", [0.5, 0.9])
def test_recall_by_contribution_is_that_of_numpy(recall):
    predictor, x, active = random_case(7, 0.3)
    contributions = np.where(active, np.random.default_rng(0).exponential(size=active.shape), 0)
    report = report_at(predictor, histogram_of(predictor, x, active, contributions), recall)
    marked = np.asarray(jax.jit(predict_scores)(predictor, x)) > report.threshold
    expected = contributions[marked].sum() / contributions.sum()
    assert report.contribution_recall == pytest.approx(expected, rel=1e-5)
    assert report.contribution_recall != pytest.approx(report.recall, rel=1e-3)


def test_another_recall_needs_only_the_histograms():
    predictor, x, active = random_case(8, 0.2)
    histogram = histogram_of(predictor, x, active)
    kept = Predictors((predictor, None), (), (histogram, histogram))
    densities = []
    for recall in (0.5, 0.9, 0.99):
        found = set_recall(kept, recall)
        report = found.reports[0]
        assert report == report_at(predictor, histogram, recall)
        assert float(found.layers[0].threshold) == np.float32(report.threshold)
        assert found.layers[0].first is predictor.first
        densities.append(report.density)
        assert found.layers[1] is None
        assert found.reports[1][:4] == (0, 1.0, active.mean(), 1.0)  # rank, recall, precision, density
        assert (found.reports[1].bytes, found.reports[1].kind) == (0, "none")
    assert densities == sorted(set(densities))
    line = trade_off(kept, 0.9)
    assert f"90.00%* -> {(densities[1] + 1) / 2:.1%}" in line and "99.00% ->" in line


def test_predictors_with_own_thresholds_have_no_other_recall():
    with pytest.raises(ValueError, match="predictors: expected histograms of their scores"):
        set_recall(Predictors((random_predictor(),), ()), 0.9)
