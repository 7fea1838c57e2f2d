"""The matrix-vector product and the bandwidth probe."""

import jax

from pjax.ops import checks, reference
from pjax.ops.sparse import Implementation


def matvec(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`x @ weight.T + bias` in float32, for few vectors."""
    checks.expect_float("weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"weight: expected shape [out, in], got {list(weight.shape)}.")
    checks.check_input(x, weight.shape[1], ranks=(1, 2))
    if bias is not None:
        checks.expect_shape("bias", bias, weight.shape[:1], f"[out] = [{weight.shape[0]}]")
    return reference.matvec(x, weight, bias)


def stream_sum(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    """Sum modulo 2**32 of an array's uint32 words, read once by all threads."""
    return reference.stream_sum(x)
