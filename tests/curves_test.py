"""The curves of `experiments.quality_curves` against numpy: what an oracle keeps, what a threshold finds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curves import (
    _largest,
    kept_curve,
    oracle_fn,
    recall_curves,
    traded_curve,
)
from pjax.base import Predictors
from pjax.predictor import predict_mask, predict_scores
from pjax.profiler import measure_scores
from pjax.quality import chunks
from pjax.thresholds import set_recall
from tests.tiny_model import ffn_inputs, ffn_values, tiny_decoder, tiny_ids, tiny_predictors

ROWS = chunks(tiny_ids(1, 100)[0], 16, 1)


@pytest.fixture(scope="module")
def model():
    return tiny_decoder()


@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_largest_are_numpys(count):
    x = np.abs(np.random.default_rng(0).normal(size=(3, 4, 10))).astype(np.float32)
    x[0, 0, :8] = 0
    kept = np.asarray(jax.jit(_largest)(x, jnp.int32(count)))
    least = np.sort(x, axis=-1)[..., -count, None]
    np.testing.assert_array_equal(kept, x >= least)


def test_the_oracle_keeps_what_contributes_most(model):
    x = ffn_inputs(model, ROWS)[0]
    layer = model.layers[0]
    values, _ = ffn_values(layer, x)
    down = np.asarray(layer.ffn.down[...], np.float64)
    contributions = np.abs(values) * np.linalg.norm(down, axis=1)
    expected = (values * (contributions >= np.sort(contributions, axis=-1)[..., -6, None])) @ down
    found, _ = oracle_fn(jnp.float32(0.25))(layer, jnp.asarray(x, jnp.float32), jnp.zeros(x.shape))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_all_neurons_are_dense_and_fewer_are_further_from_it(model):
    table = kept_curve(model, ROWS, (0.05, 0.3, 1.0))
    assert [row["kept"] for row in table] == [0.05, 0.3, 1.0]
    assert table[0]["kl_mean"] > table[1]["kl_mean"] > 100 * abs(table[2]["kl_mean"])
    assert table[2]["rise"] == pytest.approx(0, abs=1e-5) and table[2]["top1_agreement"] == 1.0


@pytest.fixture(scope="module")
def predictors(model):
    layers = tiny_predictors(model, 1.0).layers
    return set_recall(Predictors(layers, (), measure_scores(model, layers, ROWS)), 0.9)


def test_recall_curves_are_what_the_masks_find(model, predictors):
    curves = recall_curves(predictors)
    assert [curve.layer for curve in curves] == [0, 1]
    for curve, layer, predictor, x in zip(
        curves, model.layers, predictors.layers, ffn_inputs(model, ROWS), strict=True
    ):
        active = ffn_values(layer, x)[0] != 0
        assert (curve.recall[0], curve.density[0], curve.recall[-1]) == (1, 1, 0)
        x = jnp.asarray(x, jnp.float32)
        mask = np.asarray(predict_mask(predictor, x, x))
        assert curve.now == pytest.approx((mask[active].mean(), mask.mean()), abs=1e-3)
        assert 0.9 - 1e-3 <= curve.now[0] < 0.92
        scores = np.asarray(predict_scores(predictor, x.reshape(-1, x.shape[-1]))).reshape(active.shape)
        for point in np.searchsorted(-curve.recall, [-0.99, -0.7, -0.3]):
            mask = scores > curve.threshold[point]
            found = mask[active].mean(), mask.mean(), active[mask].mean()
            expected = curve.recall[point], curve.density[point], curve.precision[point]
            assert found == pytest.approx(expected, abs=2e-3)


def test_a_layer_without_a_predictor_has_no_curve_and_recall_brings_the_model_closer(model, predictors):
    table = traded_curve(model, predictors, ROWS, (0.5, 0.99))
    assert table[0]["density"] < table[1]["density"] and table[0]["kl_mean"] > table[1]["kl_mean"]
    mixed = dataclasses.replace(predictors, layers=(None, predictors.layers[1]))
    assert [curve.layer for curve in recall_curves(mixed)] == [1]
