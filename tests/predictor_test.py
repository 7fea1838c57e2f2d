"""Scores, masks, weight types, ranks and costs of predictors of every kind, against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops
from pjax.base import LowRankPredictor, SignPredictor
from pjax.predictor import (
    LayerCost,
    check_widths,
    fitting_dtype,
    lowrank_bytes,
    most_bytes,
    predict_mask,
    predict_scores,
    rank_choices,
    sign_bytes,
    take_neurons,
    with_dtype,
)
from tests.planted import numpy_scores, random_predictor


def sign_predictor(model: int = 6, neurons: int = 9) -> tuple[SignPredictor, np.ndarray]:
    rng = np.random.default_rng(3)
    rows, bias = rng.normal(size=(neurons, model)), rng.normal(size=neurons).astype(np.float32)
    bits = ops.pack_signs(jnp.asarray(rows, jnp.float32))
    return SignPredictor(bits, jnp.float32(0.5), jnp.asarray(bias), jnp.float32(0.25)), rows


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


def test_signs_score_by_agreement():
    predictor, rows = sign_predictor()
    x = np.random.default_rng(4).normal(size=(7, 6)).astype(np.float32)
    expected = 0.5 * np.sign(x) @ np.sign(rows).T + np.asarray(predictor.bias)
    np.testing.assert_allclose(jax.jit(predict_scores)(predictor, x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(predict_mask(predictor, x, 0 * x), expected > 0.25)


@pytest.mark.parametrize("predictor", [random_predictor(), sign_predictor()[0]], ids=["lowrank", "sign"])
def test_neurons_can_be_taken(predictor):
    x, ids = jnp.asarray(np.random.default_rng(5).normal(size=(4, 6)), jnp.float32), jnp.asarray([8, 0, 3])
    part = take_neurons(predictor, ids)
    np.testing.assert_allclose(
        predict_scores(part, x), predict_scores(predictor, x)[:, ids], rtol=1e-5, atol=1e-5
    )
    assert part.nbytes < predictor.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0", "q4_0"])
def test_bytes_are_those_of_the_arrays(dtype):
    predictor = with_dtype(
        LowRankPredictor(jnp.ones((64, 96)), jnp.ones((50, 64)), jnp.ones(50), jnp.float32(0)), dtype
    )
    assert predictor.nbytes == lowrank_bytes(dtype, 96, 50, 64)
    assert sign_predictor(33, 9)[0].nbytes == sign_bytes(33, 9)


def test_ranks_grow_in_steps_of_a_third_to_a_half_up_to_a_sixteenth_of_the_layer():
    ranks = rank_choices("q4_0", 4096, 11008, 3 * 4096 * 2)
    assert ranks[:11] == (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
    assert all(rank % 32 == 0 for rank in ranks)
    limit = 11008 * 3 * 4096 * 2 / 16
    assert most_bytes("lowrank", "q4_0", 4096, 11008, 3 * 4096 * 2) - 4 <= limit
    assert lowrank_bytes("q4_0", 4096, 11008, ranks[-1] * 3 // 2) > limit
    assert rank_choices("float32", 8, 8, 10) == (32,)  # one there must be
    assert most_bytes("none", "q4_0", 8, 8, 10) == 0


def test_a_layer_costs_its_bytes_over_the_bandwidth():
    cost = LayerCost(neurons=1000, opener_bytes=512, bytes_per_s=2.0, gather_bytes_per_s=1.0)
    assert cost.without == 1000 * 512 / 2
    assert cost.of(4000, 0.1) == pytest.approx(4000 / 2 + 100 * 512)


def test_a_type_without_whole_blocks_gives_way():
    assert fitting_dtype("q4_0", 64) == "q4_0"
    assert fitting_dtype("q4_0", 48) == "bfloat16"
    assert fitting_dtype("float16", 48) == "float16"
