"""Fitting against rules that it must recover."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops
from pjax.base import LowRankPredictor
from pjax.predictor import predict_scores, with_dtype
from pjax.thresholds import report_at
from pjax.training.fit import (
    LEARNING_RATE,
    SignSums,
    fit_signs,
    fit_tokens,
    init_fit,
    init_predictor,
    learning_rate,
    positive_weight,
    sum_signs,
)
from tests.planted import histogram_of, numpy_scores


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("recall", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("value", [False, True])
def test_layer_that_is_dead_or_always_on(tokens, recall, value):
    x = np.random.default_rng(6).normal(size=(tokens, 6)).astype(np.float32)
    active = jnp.full((tokens, 9), value)
    fit = init_fit(init_predictor(jax.random.key(0), 6, np.asarray(active.mean(0)), 4))
    fit, loss = fit_tokens(fit, x, active, np.zeros((2, tokens), int), decayed=0, weight=4, dtype="float32")
    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fit.predictor))
    report = report_at(fit.predictor, histogram_of(fit.predictor, x, active), recall)
    json.dumps(report._asdict(), allow_nan=False)
    assert np.isfinite(np.float32(report.threshold))
    assert report.true_density == float(value)
    assert report.recall >= recall
    if not value:  # nothing to find, so nothing is marked
        assert (report.recall, report.precision, report.density) == (1.0, 1.0, 0.0)
    elif recall == 1:
        assert (report.recall, report.precision, report.density) == (1.0, 1.0, 1.0)


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
    untrained = report_at(start, histogram_of(start, held_x, held_active), 0.95)
    fit, losses = init_fit(start), []
    order = np.arange(tokens).reshape(4, -1)
    for step in range(100):
        fit, loss = fit_tokens(fit, x, active, order, decayed=step / 100, weight=1, dtype="float32")
        losses.append(loss)
    trained = report_at(fit.predictor, histogram_of(fit.predictor, held_x, held_active), 0.95)
    assert trained.recall >= 0.95
    assert trained.precision > 0.8 > 0.5 > untrained.precision
    assert trained.density < 1.2 * trained.true_density
    assert losses[-1] < 0.4 * losses[0]
    assert float(fit.predictor.threshold) == 0  # training leaves it alone


def test_rounding_in_the_decay_helps_the_rounded_predictor():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2048, 32)).astype(np.float32)
    rule = rng.normal(size=(48, 2)).astype(np.float32) @ rng.normal(size=(2, 32)).astype(np.float32)
    active = x @ rule.T > 6
    losses = {}
    for dtype in ("float32", "q4_0"):
        fit = init_fit(init_predictor(jax.random.key(0), 32, active.mean(0), 32))
        order = np.arange(2048).reshape(32, -1)
        for decayed in (*[0] * 20, *np.linspace(0, 0.95, 20)):
            fit, _ = fit_tokens(fit, x, active, order, decayed=decayed, weight=1, dtype=dtype)
        scores = predict_scores(with_dtype(fit.predictor, "q4_0"), jnp.asarray(x))
        losses[dtype] = float(jnp.logaddexp(0, jnp.where(active, -scores, scores)).mean())
    assert losses["q4_0"] < 0.99 * losses["float32"]


def test_rare_neurons_weigh_more_and_the_rate_falls():
    assert [positive_weight(d) for d in (0.0, 0.0025, 0.01, 0.5)] == pytest.approx([4, 2, 1, 1])
    assert [learning_rate(d) for d in (0, 0.5, 1)] == pytest.approx(
        [LEARNING_RATE, LEARNING_RATE / 2, 0.02 * LEARNING_RATE]
    )


def sign_case(tokens: int = 4000):
    """Openers with biases of their own, so that agreement alone says little."""
    rng = np.random.default_rng(2)
    x, rows = rng.normal(size=(tokens, 96)).astype(np.float32), rng.normal(size=(40, 96)).astype(np.float32)
    active = x @ rows.T + rng.normal(size=40) * 15 > 10
    return x, active, ops.pack_signs(jnp.asarray(rows))


def test_signs_with_a_bias_find_more_than_agreement_alone():
    x, active, bits = sign_case()
    (x, held_x), (active, held_active) = np.split(x, 2), np.split(active, 2)
    parts = [sum_signs(bits, x[i : i + 500], active[i : i + 500]) for i in range(0, 2000, 500)]
    sums = SignSums(*(np.sum(field, axis=0) for field in zip(*parts, strict=True)))
    fitted = fit_signs(bits, sums, 2000)
    alone = dataclasses.replace(fitted, slope=jnp.float32(0.1), bias=jnp.zeros(40))
    density = [report_at(p, histogram_of(p, held_x, held_active), 0.95).density for p in (fitted, alone)]
    assert density[0] < 0.8 * density[1] < 1
    assert (fitted.rank, fitted.kind, fitted.nbytes) == (0, "sign", 40 * (3 + 1) * 4)
    # As probabilities the scores are about right: they are log-odds.
    scores = np.asarray(predict_scores(fitted, jnp.asarray(held_x)))
    assert jax.nn.sigmoid(scores).mean() == pytest.approx(held_active.mean(), abs=0.02)


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("tokens", [1, 50])
def test_signs_of_a_layer_that_is_dead_or_always_on(tokens, value):
    x, _, bits = sign_case(tokens)
    active = np.full((tokens, 40), value)
    fitted = fit_signs(bits, sum_signs(bits, x, active), tokens)
    assert all(np.isfinite(leaf).all() for leaf in (fitted.slope, fitted.bias))
    report = report_at(fitted, histogram_of(fitted, x, active), 0.95)
    assert report.recall >= 0.95 and report.true_density == float(value)
    json.dumps(report._asdict(), allow_nan=False)
