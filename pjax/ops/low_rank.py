"""The low-rank predictor in one call: two products, and what they say of each neuron."""

import jax
import jax.numpy as jnp

from pjax.ops import checks, ffi, reference
from pjax.ops.dispatch import Implementation, make_operator
from pjax.weights import Matrix


def low_rank_mask(
    x: jax.Array,
    first: Matrix,
    second: Matrix,
    bias: jax.Array,
    threshold: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`relu(x @ first.T) @ second.T + bias > threshold`. No gradient flows to x.

    Of quantised matrices the same to the bit as two calls of `matvec` (PowerInfer, arXiv 2312.12456, section
    5.1, after Deja Vu).

    Args:
        x: [batch, in] or [in].
        first: [rank, in]; the kernel reads both matrices in place.
        second: [neurons, rank].
        bias: [neurons].
        threshold: scalar.
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        bool [batch, neurons] or [neurons].

    Raises:
        ValueError: shapes or types do not fit.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    rank, num_inputs = checks.check_matrix(first)
    neurons, width = checks.check_matrix(second)
    if width != rank:
        raise ValueError(f"second: expected rows of {rank} numbers, one a row of first, got {width}")
    checks.check_input(x, num_inputs, ranks=(1, 2))
    checks.expect_float("bias", bias)
    checks.expect_shape("bias", bias, (neurons,), f"[neurons] = [{neurons}]")
    checks.expect_float("threshold", threshold)
    checks.expect_shape("threshold", threshold, (), "[]")
    weights = (first, second, bias.astype(jnp.float32), threshold.astype(jnp.float32))
    mask = _low_rank_mask(jax.lax.stop_gradient(checks.as_rows(x)), weights, implementation)
    return mask.reshape(*x.shape[:-1], neurons)


def _kernel(x: jax.Array, weights: tuple[Matrix, Matrix, jax.Array, jax.Array]) -> jax.Array:
    first, second, bias, threshold = weights
    return ffi.low_rank_mask(x, ffi.matrix_rows(first), ffi.matrix_rows(second), bias, threshold)


_low_rank_mask = make_operator(
    kernel=_kernel,
    formula=lambda x, weights: reference.low_rank_mask(x, *weights),
)
