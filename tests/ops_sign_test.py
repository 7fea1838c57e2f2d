"""Scores from signs, as kernel and in jnp, against counting in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops

IMPLEMENTATIONS = ("reference", "cpu")


def make(rows: int, width: int, batch: int, seed: int = 0):
    rng = np.random.default_rng([seed, rows, width, batch])
    weight, x = rng.standard_normal((rows, width)), rng.standard_normal((batch, width))
    x[:, ::7] = -0.0
    return weight.astype(np.float32), x.astype(np.float32), rng.standard_normal(rows).astype(np.float32)


def numpy_scores(weight, x, slope, bias):
    signs, x_signs = (np.where(np.signbit(a), -1, 1) for a in (weight, x))
    return slope * (x_signs @ signs.T).astype(np.float64) + np.float64(bias)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", (1, 7, 31, 32, 33, 64, 480, 512, 545))
@pytest.mark.parametrize(("rows", "batch"), ((0, 1), (1, 1), (300, 3), (9, 0)))
def test_equals_counting(rows, width, batch, implementation):
    weight, x, bias = make(rows, width, batch)
    bits = ops.pack_signs(jnp.asarray(weight))
    assert bits.dtype == jnp.uint32 and bits.shape == (rows, -(-width // 32))
    y = ops.sign_scores(
        jnp.asarray(x), bits, jnp.float32(0.3), jnp.asarray(bias), implementation=implementation
    )
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, numpy_scores(weight, x, np.float32(0.3), bias), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_rows_on_all_threads_one_vector_and_vmap(implementation):
    weight, x, bias = make(3000, 1024, 2)
    bits = ops.pack_signs(jnp.asarray(weight, jnp.bfloat16))
    expected = numpy_scores(weight, x, 1.0, bias)

    def scores(x):
        return ops.sign_scores(x, bits, jnp.float32(1), jnp.asarray(bias), implementation=implementation)

    np.testing.assert_allclose(scores(jnp.asarray(x[0])), expected[0], rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(scores)(jnp.asarray(x)), expected, rtol=1e-6, atol=1e-5)
    assert not np.asarray(jax.grad(lambda x: scores(x).sum())(jnp.asarray(x[0]))).any()


def test_packing_puts_column_c_at_bit_c():
    weight = -np.eye(34, dtype=np.float32) + 0.5 * (1 - np.eye(34, dtype=np.float32))
    bits = np.asarray(ops.pack_signs(jnp.asarray(weight)))
    assert [(int(row[0]), int(row[1])) for row in bits] == [
        (1 << c, 0) if c < 32 else (0, 1 << (c - 32)) for c in range(34)
    ]


def test_bits_of_another_width_or_type_are_refused():
    x, bias, slope = jnp.ones((2, 33)), jnp.ones(4), jnp.float32(1)
    with pytest.raises(ValueError, match=r"bits: expected uint32 \[rows, 2\] for x of width 33, got uint32"):
        ops.sign_scores(x, jnp.ones((4, 1), jnp.uint32), slope, bias)
    with pytest.raises(ValueError, match="bits: expected uint32"):
        ops.sign_scores(x, jnp.ones((4, 2), jnp.int32), slope, bias)
    with pytest.raises(ValueError, match=r"bias: expected shape \[rows\] = \[4\], got \[5\]"):
        ops.sign_scores(x, jnp.ones((4, 2), jnp.uint32), slope, jnp.ones(5))
