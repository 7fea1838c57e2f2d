"""The low-rank predictor in one call, against two products and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops
from pjax.weights import PackedMatrix

KINDS = ["float32", "bfloat16", "float16", "q8_0", "q4_0"]


def matrix(rng: np.random.Generator, rows: int, width: int, dtype: str):
    values = jnp.asarray(rng.standard_normal((rows, width), np.float32))
    return ops.pack_matrix(values, dtype) if dtype.startswith("q") else values.astype(dtype)


def floats(weight) -> np.ndarray:
    plain = ops.unpack_matrix(weight) if isinstance(weight, PackedMatrix) else weight
    return np.asarray(plain, np.float64)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("batch", "model", "rank", "neurons"), [(1, 64, 32, 70), (3, 96, 160, 33)])
def test_the_mask_is_that_of_two_products(dtype, batch, model, rank, neurons):
    rng = np.random.default_rng(0)
    first, second = matrix(rng, rank, model, dtype), matrix(rng, neurons, rank, dtype)
    x = jnp.asarray(rng.standard_normal((batch, model), np.float32))
    bias, threshold = jnp.asarray(rng.standard_normal(neurons, np.float32)), jnp.float32(0.7)
    mask = ops.low_rank_mask(x, first, second, bias, threshold)
    scores = ops.matvec(jax.nn.relu(ops.matvec(x, first)), second, bias)
    np.testing.assert_array_equal(mask, np.asarray(scores) > 0.7)
    exact = np.maximum(x @ floats(first).T, 0) @ floats(second).T + np.asarray(bias)
    # x and the hidden units are rounded to 8 bits of their blocks' largest: half a 127th, and some luck.
    clear = np.abs(exact - 0.7) > 0.05 * np.abs(exact).max()
    assert clear.mean() > 0.7 and 0 < np.asarray(mask).mean() < 1
    np.testing.assert_array_equal(np.asarray(mask)[clear], exact[clear] > 0.7)
    formula = ops.low_rank_mask(x, first, second, bias, threshold, implementation="reference")
    np.testing.assert_array_equal(np.asarray(formula)[clear], exact[clear] > 0.7)


@pytest.mark.parametrize("rank", [32, 64, 96, 128, 160, 192, 256, 288, 384, 512, 544])
def test_rows_of_any_rank_have_the_same_bits_wherever_they_lie(rank):
    """Short rows share a register, so that a row's place decides which lanes it has."""
    rng = np.random.default_rng(1)
    second = matrix(rng, 53, rank, "q4_0")
    hidden = jnp.asarray(rng.standard_normal((3, rank), np.float32))
    whole = np.asarray(ops.matvec(hidden, second))
    for start in (1, 2, 7, 50):
        np.testing.assert_array_equal(ops.matvec(hidden[1], second[jnp.arange(start, 53)]), whole[1, start:])


def test_no_neuron_is_marked_by_scores_that_are_not_numbers():
    first, second = jnp.ones((4, 8)), jnp.ones((5, 4))
    mask = ops.low_rank_mask(jnp.full((1, 8), jnp.nan), first, second, jnp.zeros(5), jnp.float32(-jnp.inf))
    assert not mask.any()


@pytest.mark.parametrize("dtype", ["float32", "q4_0"])
def test_no_tokens_have_no_masks(dtype):
    weights = matrix(np.random.default_rng(0), 32, 64, dtype), matrix(np.random.default_rng(1), 70, 32, dtype)
    assert ops.low_rank_mask(jnp.zeros((0, 64)), *weights, jnp.zeros(70), jnp.float32(0)).shape == (0, 70)


def test_what_does_not_fit_is_named():
    x, first, second = jnp.ones((2, 8)), jnp.ones((4, 8)), jnp.ones((5, 4))
    bias, threshold = jnp.zeros(5), jnp.float32(0)
    with pytest.raises(ValueError, match=r"second: expected rows of 4 numbers, one a row of first, got 3"):
        ops.low_rank_mask(x, first, jnp.ones((5, 3)), bias, threshold)
    with pytest.raises(ValueError, match="bias"):
        ops.low_rank_mask(x, first, second, jnp.zeros(4), threshold)
    with pytest.raises(ValueError, match="threshold"):
        ops.low_rank_mask(x, first, second, bias, jnp.zeros(1))
    with pytest.raises(ValueError, match="x"):
        ops.low_rank_mask(jnp.ones((2, 7)), first, second, bias, threshold)
    with pytest.raises(ValueError, match="threshold: expected a float array, got float"):
        ops.low_rank_mask(x, first, second, bias, 0.5)


def test_types_that_the_kernels_do_not_read_run_as_the_formula_whichever_they_are():
    x, first, bias = jnp.ones((1, 8)), jnp.ones((4, 8)), jnp.zeros(5)
    second = jnp.ones((5, 4), jnp.float8_e4m3fn)
    assert ops.low_rank_mask(x, first, second, bias, jnp.float32(0)).all()
    with pytest.raises(ValueError, match="does not read weights of float8_e4m3fn"):
        ops.low_rank_mask(x, first, second, bias, jnp.float32(0), implementation="cpu")
