"""Fitting, thresholds and reports of predictors, against numpy over all thresholds."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax.base import LowRankPredictor
from pjax.predictor import (
    BIN_EDGES,
    CERTAIN,
    MAX_SCORE,
    NUM_BINS,
    check_widths,
    default_rank,
    fit_step,
    init_fit,
    init_predictor,
    make_optimizer,
    predict_mask,
    predict_scores,
    report_at,
    score_histogram,
    with_dtype,
)


def random_predictor(seed: int = 0, model: int = 6, neurons: int = 9, rank: int = 4) -> LowRankPredictor:
    rng = np.random.default_rng(seed)

    def array(*shape: int):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return LowRankPredictor(array(rank, model), array(neurons, rank), array(neurons), jnp.float32(0.25))


def identity_predictor(neurons: int) -> LowRankPredictor:
    """Its scores are its inputs, where these are not negative."""
    eye = jnp.eye(neurons)
    return LowRankPredictor(eye, eye, jnp.zeros(neurons), jnp.float32(0))


def numpy_scores(predictor: LowRankPredictor, x) -> np.ndarray:
    first, second, bias = (
        np.asarray(a, np.float64) for a in (predictor.first, predictor.second, predictor.bias)
    )
    return np.maximum(np.asarray(x, np.float64) @ first.T, 0) @ second.T + bias[None, :]


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


@pytest.mark.parametrize("tokens", [1, 40])
def test_scores_are_the_formula(tokens):
    predictor = random_predictor()
    x = np.random.default_rng(1).normal(size=(tokens, 6)).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(predict_scores)(predictor, x), numpy_scores(predictor, x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(), (7,), (2, 20)])
def test_mask_reads_the_input_that_the_predictor_names(shape):
    predictor, rng = random_predictor(), np.random.default_rng(2)
    x, residual = (jnp.asarray(rng.normal(size=(*shape, 6)), jnp.float32) for _ in range(2))
    for which, seen in (("normed", x), ("residual", residual)):
        mask = jax.jit(predict_mask)(dataclasses.replace(predictor, input=which), x, residual)
        expected = numpy_scores(predictor, np.asarray(seen).reshape(-1, 6)) > 0.25
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, expected.reshape(*shape, 9))


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("recall", [0.0, 0.5, 0.95, 1.0])
def test_threshold_is_the_highest_that_reaches_the_recall(share, recall):
    predictor, x, active = random_case(3, share)
    scores = np.asarray(jax.jit(predict_scores)(predictor, x))
    report = report_at(predictor, np.asarray(score_histogram(predictor, x, jnp.asarray(active))), recall)
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
    report = report_at(predictor, np.asarray(score_histogram(predictor, x, jnp.asarray(active))), 0.9)
    # Any threshold below this score, and none from it on, reaches the recall.
    wanted = np.sort(scores[active])[::-1][int(np.ceil(0.9 * active.sum())) - 1]
    assert wanted - 1.01 * (BIN_EDGES[1] - BIN_EDGES[0]) <= report.threshold < wanted


@pytest.mark.parametrize("total", [3, 10, 30, 49])
def test_recall_that_is_a_fraction_of_the_actives_needs_no_more(total):
    histogram = np.zeros((2, NUM_BINS), np.int64)
    histogram[1, 100 : 100 + total] = 1
    for wanted in range(1, total + 1):
        report = report_at(identity_predictor(3), histogram, wanted / total)
        assert report.recall == wanted / total


def test_histogram_counts_a_score_on_an_edge_as_not_above_it():
    scores = np.asarray([0.0, BIN_EDGES[1500], BIN_EDGES[1500] + 1e-4, MAX_SCORE, 2 * MAX_SCORE], np.float32)
    histogram = np.asarray(
        score_histogram(identity_predictor(5), jnp.asarray(scores[None, :]), jnp.ones((1, 5), bool))
    )
    assert histogram.shape == (2, NUM_BINS)
    assert histogram[0].sum() == 0
    for i, edge in enumerate(BIN_EDGES):
        assert histogram[1, i + 1 :].sum() == (scores > edge).sum()


def test_histograms_add_up():
    predictor, x, active = random_case(5, 0.2)
    whole = score_histogram(predictor, x, jnp.asarray(active))
    parts = [score_histogram(predictor, x[i : i + 20], jnp.asarray(active[i : i + 20])) for i in (0, 20, 40)]
    np.testing.assert_array_equal(whole, np.sum(parts, axis=0))
    assert np.asarray(whole).sum(1).tolist() == [(~active).sum(), active.sum()]


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("recall", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("value", [False, True])
def test_layer_that_is_dead_or_always_on(tokens, recall, value):
    predictor, x, _ = random_case(6, 0.5, tokens)
    active = jnp.full((tokens, 9), value)
    start = init_predictor(jax.random.key(0), 6, np.asarray(active.mean(0)), 4)
    optimizer = make_optimizer(2)
    fit = init_fit(start, optimizer)
    for _ in range(2):
        fit, loss = fit_step(fit, x, active, optimizer=optimizer)
        assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fit.predictor))
    report = report_at(fit.predictor, np.asarray(score_histogram(fit.predictor, x, active)), recall)
    json.dumps(report._asdict(), allow_nan=False)
    assert np.isfinite(np.float32(report.threshold))
    assert report.true_density == float(value)
    assert report.recall >= recall
    if not value:  # nothing to find, so nothing is marked
        assert (report.recall, report.precision, report.density) == (1.0, 1.0, 0.0)
    elif recall == 1:
        assert (report.recall, report.precision, report.density) == (1.0, 1.0, 1.0)


def test_no_tokens_at_all():
    report = report_at(random_predictor(), np.zeros((2, NUM_BINS), np.int64), 0.95)
    json.dumps(report._asdict(), allow_nan=False)
    assert (report.recall, report.density, report.true_density) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("recall", [-0.01, 1.01, float("nan")])
def test_recall_out_of_range(recall):
    with pytest.raises(ValueError, match=r"recall: expected a number in 0\.\.1, got"):
        report_at(random_predictor(), np.ones((2, NUM_BINS), np.int64), recall)


@pytest.mark.parametrize(
    ("model", "neurons", "rank"), [(4096, 11008, 576), (16, 40, 32), (1, 1, 32), (512, 512, 64)]
)
def test_default_rank(model, neurons, rank):
    assert default_rank(model, neurons) == rank
    assert rank % 32 == 0
    share = rank * (model + neurons) / (3 * model * neurons)
    assert share >= 1 / 16
    assert rank == 32 or (rank - 32) * (model + neurons) / (3 * model * neurons) < 1 / 16


def test_untrained_predictor_knows_the_frequencies():
    frequency = np.array([0.0, 0.01, 0.5, 0.9, 1.0])
    predictor = init_predictor(jax.random.key(0), 6, frequency, 4)
    np.testing.assert_allclose(jax.nn.sigmoid(predictor.bias), np.clip(frequency, 1e-4, 1 - 1e-4), rtol=1e-3)
    assert (predictor.first.shape, predictor.second.shape) == ((4, 6), (5, 4))


def test_fit_recovers_a_low_rank_rule():
    rng = np.random.default_rng(0)
    model, neurons, tokens = 12, 24, 1024
    rule = LowRankPredictor(
        *(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, model), (neurons, 3))),
        jnp.full(neurons, -2.0),
        jnp.float32(0),
    )
    x = rng.normal(size=(2 * tokens, model)).astype(np.float32)
    active = numpy_scores(rule, x) > 0
    (x, held_x), (active, held_active) = np.split(x, 2), np.split(active, 2)
    start = init_predictor(jax.random.key(1), model, active.mean(0), 16)
    untrained = report_at(start, np.asarray(score_histogram(start, held_x, held_active)), 0.95)
    optimizer = make_optimizer(400)
    fit, losses = init_fit(start, optimizer), []
    batches = list(zip(np.split(x, 4), np.split(active, 4), strict=True))
    for step in range(400):
        fit, loss = fit_step(fit, *batches[step % 4], optimizer=optimizer)
        losses.append(loss)
    trained = report_at(fit.predictor, np.asarray(score_histogram(fit.predictor, held_x, held_active)), 0.95)
    assert trained.recall >= 0.95
    assert trained.precision > 0.8 > 0.5 > untrained.precision
    assert trained.density < 1.2 * trained.true_density
    assert losses[-1] < 0.4 * losses[0]
    assert float(fit.predictor.threshold) == 0  # training leaves it alone


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.02), ("q8_0", 0.02), ("q4_0", 0.3)])
def test_weight_types(dtype, error):
    """Scores stay, up to the type's rounding; rows are those of the type."""
    rng = np.random.default_rng(0)

    def array(*shape: int):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    floats = LowRankPredictor(array(32, 64) / 8, array(50, 32) / 6, array(50), jnp.float32(0.5), "residual")
    small = with_dtype(floats, dtype)
    assert (small.dtype, floats.dtype) == (dtype, "float32")
    assert (small.first.shape, small.second.shape, small.input) == ((32, 64), (50, 32), "residual")
    assert small.first.nbytes + small.second.nbytes < 0.6 * (floats.first.nbytes + floats.second.nbytes)
    x = array(3, 64)
    expected = np.asarray(predict_scores(floats, x))
    assert np.abs(np.asarray(predict_scores(small, x)) - expected).max() < error * np.abs(expected).max()
    ids = jnp.asarray([3, 1])
    picked = dataclasses.replace(small, second=small.second[ids], bias=small.bias[ids])
    np.testing.assert_array_equal(predict_scores(picked, x), predict_scores(small, x)[:, ids])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("q4_0", 48, None), "q4_0 needs a model width and a rank that are multiples of 32, got 48 and None"),
        (("q8_0", 64, 40), "q8_0 needs a model width and a rank that are multiples of 32, got 64 and 40"),
        (("int8", 64, 32), "dtype: expected one of float32, bfloat16, float16, q8_0, q4_0, got 'int8'"),
    ],
)
def test_widths_that_a_type_cannot_have(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_widths(*arguments)
