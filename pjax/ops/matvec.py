"""The product of a matrix with one or many vectors, and the probe that measures memory bandwidth."""

import functools
from collections.abc import Sequence

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
    return matvecs(x, (weight,), (bias,), implementation=implementation)[0]


def matvecs(
    x: jax.Array,
    weights: Sequence[Matrix],
    biases: Sequence[jax.Array | None],
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """The products of one x with several matrices, each as `matvec` gives it, to the bit.

    In one call the threads and the streams from memory start once.

    Args:
        x: [batch, in] or [in].
        weights: [out, in] each, of any types.
        biases: one for each weight, [out] or None.
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        float32 [batch, out] or [out] for each weight.

    Raises:
        ValueError: shapes or types do not fit.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    if not weights:
        raise ValueError("weights: expected at least one, got none")
    if len(weights) != len(biases):
        raise ValueError(f"biases: expected {len(weights)}, one (or None) a weight, got {len(biases)}")
    for weight, bias in zip(weights, biases, strict=True):
        num_outputs, num_inputs = checks.check_matrix(weight)
        checks.check_input(x, num_inputs, ranks=(1, 2))
        if bias is not None:
            checks.expect_float("bias", bias)
            checks.expect_shape("bias", bias, (num_outputs,), f"[out] = [{num_outputs}]")
    ys = _matvecs(checks.as_rows(x), (tuple(weights), tuple(biases)), implementation)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)


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


def _kernel(x: jax.Array, weights: tuple[Sequence[Matrix], Sequence[jax.Array | None]]) -> list[jax.Array]:
    rows = map(ffi.matrix_rows, weights[0])
    return ffi.matvecs(x, list(zip(rows, weights[1], strict=True)))


_matvecs = make_operator(
    kernel=_kernel,
    formula=lambda x, weights: [reference.matvec(x, *each) for each in zip(*weights, strict=True)],
)
