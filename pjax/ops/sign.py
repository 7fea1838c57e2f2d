"""Scores from signs alone: how many signs of x agree with those of each row of a matrix."""

import jax
import jax.numpy as jnp

from pjax.ops import checks, ffi, reference
from pjax.ops.dispatch import Implementation, make_operator


def pack_signs(weight: jax.Array) -> jax.Array:
    """The signs of a matrix, a bit each.

    Args:
        weight: float [rows, width].

    Returns:
        uint32 [rows, ceil(width / 32)]: column c is bit c % 32 of word c // 32, set where the number is
        negative; bits behind the last column are zero.
    """
    checks.expect_float("weight", weight)
    return reference.pack_signs(weight)


def sign_scores(
    x: jax.Array,
    bits: jax.Array,
    slope: jax.Array,
    bias: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`slope * (agreeing - disagreeing signs of x and row) + bias`, for each row. No gradient flows to x.

    The number of agreeing signs is what is left of a product when all magnitudes are forgotten (SparseInfer,
    arXiv 2411.12692).

    Args:
        x: [batch, width] or [width].
        bits: uint32 [rows, ceil(width / 32)], see `pack_signs`; the kernel reads it in place.
        slope: float32 scalar.
        bias: float32 [rows].
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        float32 [batch, rows] or [rows].

    Raises:
        ValueError: shapes or types do not fit.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    checks.check_input(x, x.shape[-1] if x.ndim else 0, ranks=(1, 2))
    words = -(-x.shape[-1] // reference.SIGNS_PER_WORD)
    if bits.dtype != jnp.uint32 or bits.ndim != 2 or bits.shape[1] != words:
        raise ValueError(
            f"bits: expected uint32 [rows, {words}] for x of width {x.shape[-1]}, got {bits.dtype} "
            f"{list(bits.shape)}; was it packed by pack_signs?"
        )
    checks.expect_shape("slope", slope, (), "[]")
    checks.expect_float("bias", bias)
    checks.expect_shape("bias", bias, (bits.shape[0],), f"[rows] = [{bits.shape[0]}]")
    weights = (bits, slope.astype(jnp.float32), bias.astype(jnp.float32))
    y = _sign_scores(jax.lax.stop_gradient(checks.as_rows(x)), weights, implementation)
    return y.reshape(*x.shape[:-1], bits.shape[0])


_sign_scores = make_operator(
    kernel=lambda x, weights: ffi.sign_scores(x, *weights),
    formula=lambda x, weights: reference.sign_scores(x, *weights),
)
