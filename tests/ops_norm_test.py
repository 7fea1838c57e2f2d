"""The norms, as kernel and in jnp, against NumPy in float64; their gradient against differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops

IMPLEMENTATIONS = ("reference", "cpu")


def numpy_norm(x, scale, bias, centered, eps):
    x = np.asarray(x, np.float64)
    if centered:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return y * (1 if scale is None else np.float64(scale)) + (0 if bias is None else np.float64(bias))


def make(shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    weights = (rng.standard_normal(shape[-1]).astype(np.float32) for _ in range(2))
    return (5 * rng.standard_normal(shape) + 2).astype(np.float32), *weights


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("centered", (False, True))
@pytest.mark.parametrize("shape", ((1,), (7,), (2, 16), (3, 33), (2, 5, 64), (1, 2048), (40, 100), (0, 4)))
def test_equals_float64(shape, centered, implementation):
    x, scale, bias = make(shape)
    for weights in ((None, None), (scale, None), (None, bias), (scale, bias)):
        y = ops.norm(
            jnp.asarray(x),
            *(None if weight is None else jnp.asarray(weight) for weight in weights),
            centered=centered,
            eps=1e-5,
            implementation=implementation,
        )
        expected = numpy_norm(x, *weights, centered, 1e-5)
        assert y.dtype == jnp.float32 and y.shape == shape
        # x - mean cancels: its error is that of x, which the division by its deviation enlarges.
        largest = np.abs(expected).max(initial=0) + np.abs(x).max(initial=0) / 2
        assert np.abs(y - expected).max(initial=0) <= 1e-6 * (1 + shape[-1] / 64) * (1 + largest)


@pytest.mark.parametrize("centered", (False, True))
def test_gradient_and_vmap_are_those_of_the_formula(centered):
    x, scale, bias = (jnp.asarray(part) for part in make((3, 2, 16)))

    def loss(x, scale, bias, implementation):
        y = ops.norm(x, scale, bias, centered=centered, eps=1e-6, implementation=implementation)
        return (y**3).sum()

    kernel, formula = (
        jax.grad(loss, argnums=(0, 1, 2))(x, scale, bias, implementation)
        for implementation in ("cpu", "reference")
    )
    for ours, expected in zip(kernel, formula, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    mapped = jax.vmap(lambda x: ops.norm(x, scale, bias, centered=centered, eps=1e-6))(x)
    np.testing.assert_allclose(mapped, numpy_norm(x, scale, bias, centered, 1e-6), rtol=2e-5, atol=2e-5)


def test_a_row_of_zeros_or_nan_stays_in_its_row():
    x = jnp.asarray([[0.0] * 20, [np.nan] + [1.0] * 19, [3.0] * 20])
    y = np.asarray(ops.norm(x, None, None, centered=False, eps=1e-6, implementation="cpu"))
    assert not y[0].any() and np.isnan(y[1]).all()
    np.testing.assert_allclose(y[2], 1, rtol=1e-6)


def test_weights_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"scale: expected shape \[model\] = \[4\], got \[5\]"):
        ops.norm(jnp.ones((2, 4)), jnp.ones(5), None, centered=False, eps=1e-6)
    with pytest.raises(ValueError, match="bias: expected a floating type"):
        ops.norm(jnp.ones((2, 4)), None, jnp.ones(4, jnp.int32), centered=True, eps=1e-6)
