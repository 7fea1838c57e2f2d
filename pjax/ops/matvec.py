"""The product of a matrix with one or many vectors, and the probe that measures memory bandwidth."""

import functools

import jax

from pjax.ops import checks, ffi, reference
from pjax.ops.dispatch import Implementation, dispatch, make_operator
from pjax.weights import Matrix


def matvec(
    x: jax.Array,
    weight: Matrix,
    bias: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`x @ weight.T + bias` in float32. Differentiable.

    Of a quantised weight a token's result is the same, to the bit, whatever else is in its batch.

    Args:
        x: [batch, in] or [in].
        weight: [out, in]; the kernel reads it in place.
        bias: [out] or None.
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        float32 [batch, out] or [out].

    Raises:
        ValueError: shapes or types do not fit.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    num_outputs, num_inputs = checks.check_matrix(weight)
    checks.check_input(x, num_inputs, ranks=(1, 2))
    if bias is not None:
        checks.expect_float("bias", bias)
        checks.expect_shape("bias", bias, (num_outputs,), f"[out] = [{num_outputs}]")
    y = _matvec(checks.as_rows(x), (weight, bias), implementation)
    return y.reshape(*x.shape[:-1], num_outputs)


@functools.partial(jax.jit, static_argnames="implementation")
def stream_sum(x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
    """Sum modulo 2**32 of an array's bytes as uint32 words, read once by all threads at full speed.

    Timing it gives the bandwidth of the memory: no operator can read weights faster.

    Args:
        x: any shape and type of 1, 2 or 4 bytes; the last word is padded with zero bytes.
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        uint32 scalar.
    """
    if x.dtype.itemsize not in (1, 2, 4):
        raise ValueError(f"x: expected a type of 1, 2 or 4 bytes, got {x.dtype}.")
    return dispatch(implementation, ffi.stream_sum, reference.stream_sum, x)


_matvec = make_operator(
    kernel=lambda x, weights: ffi.matvec(x, ffi.matrix_rows(weights[0]), weights[1]),
    formula=lambda x, weights: reference.matvec(x, *weights),
)
