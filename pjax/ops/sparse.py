"""The FFN operators: all neurons, or only those that a mask and their own gate leave open."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pjax.base import FfnCounts
from pjax.model_config import Activation
from pjax.ops import checks, ffi, reference
from pjax.ops.dispatch import Implementation, make_operator
from pjax.weights import AnyFfn

MAX_FUSED_TOKENS = 8
"""Tokens up to which the fused kernel computes a dense FFN: it reads rows once for so many, but takes one
token at a time with them. At 8 it is the faster in every type (1.03 to 1.4 times), at 12 the slower."""


def sparse_ffn(
    x: jax.Array,
    ffn: AnyFfn,
    active_mask: jax.Array | None,
    *,
    activation: str,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The FFN restricted to the neurons of the mask, reading only the rows of those that are open.

    `y = sum_i mask_i * f(x . gate_i + gate_bias_i) * (x . up_i + up_bias_i) * down_i`, or without a gate
    `sum_i mask_i * f(x . up_i + up_bias_i) * down_i`; `Activation` says what f is. Within the mask this is
    exact. The gate is read first (ungated: up); the other rows of a neuron only where that opens it.
    Differentiable in x and ffn.

    Args:
        x: [batch, model] or [model].
        ffn: the weights; the kernel reads them in place.
        active_mask: bool [batch, neurons] or [neurons]; None: every neuron may open.
        activation: "relu", "relu2", "drelu" or, with its threshold, "fatrelu:0.01".
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        float32, the shape of x.

    Raises:
        ValueError: shapes or types do not fit, or the activation leaves no neuron at zero.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    return sparse_ffn_counted(x, ffn, active_mask, activation=activation, implementation=implementation)[0]


def sparse_ffn_counted(
    x: jax.Array,
    ffn: AnyFfn,
    active_mask: jax.Array | None,
    *,
    activation: str,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, FfnCounts]:
    """`sparse_ffn`, and how many neurons each token predicted, computed and found active.

    Args, Raises: as `sparse_ffn`.

    Returns:
        float32, the shape of x; counts int32 [batch], or scalars for x [model].
    """
    checks.check_ffn(ffn)
    parsed = checks.check_activation(activation, ffn, sparse=True)
    checks.check_input(x, ffn.model, ranks=(1, 2))
    checks.check_mask(active_mask, x, ffn.neurons)
    rows = checks.as_rows(x)
    if active_mask is not None:
        per_token = jnp.broadcast_to(active_mask, (*x.shape[:-1], ffn.neurons))
        active_mask = per_token.reshape(rows.shape[0], ffn.neurons)
    y, counts = _sparse(parsed)((rows, active_mask), ffn, implementation)
    return y.reshape(x.shape), jax.tree.map(lambda count: count.reshape(x.shape[:-1]), counts)


def dense_ffn(
    x: jax.Array, ffn: AnyFfn, *, activation: str, implementation: Implementation | None = None
) -> jax.Array:
    """The FFN with every neuron: `f(x @ gate.T + gate_bias) * (x @ up.T + up_bias) @ down`; see `Activation`.

    Few tokens on a CPU use the kernel of `sparse_ffn` with skipping turned off, so that the two can be
    compared; many are matrix products with float32 sums. Differentiable.

    Args:
        x: [..., model].
        ffn: the weights.
        activation: as `Activation.parse` reads it.
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        float32, the shape of x.

    Raises:
        ValueError: shapes, types or the activation do not fit.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    checks.check_ffn(ffn)
    parsed = checks.check_activation(activation, ffn, sparse=False)
    checks.check_input(x, ffn.model, ranks=None)
    return _dense(parsed)(checks.as_rows(x), ffn, implementation).reshape(x.shape)


@functools.cache
def _sparse(activation: Activation) -> Callable:
    def kernel(tokens: tuple[jax.Array, jax.Array | None], ffn: AnyFfn) -> tuple[jax.Array, FfnCounts]:
        y, counts = ffi.sparse_ffn(tokens[0], ffn, tokens[1], activation, every_neuron=False)
        return y, FfnCounts(counts[0], counts[1], counts[2])

    return make_operator(
        kernel=kernel,
        formula=lambda tokens, ffn: reference.sparse_ffn(tokens[0], ffn, tokens[1], activation),
    )


@functools.cache
def _dense(activation: Activation) -> Callable:
    return make_operator(
        kernel=functools.partial(_dense_kernel, activation=activation),
        formula=lambda x, ffn: reference.dense_ffn(x, ffn, activation)[0],
    )


def _dense_kernel(x: jax.Array, ffn: AnyFfn, activation: Activation) -> jax.Array:
    if x.shape[0] <= MAX_FUSED_TOKENS:
        return ffi.sparse_ffn(x, ffn, None, activation, every_neuron=True)[0]
    gate_rows, up_rows, down_rows = ffi.ffn_rows(ffn)
    gates = [] if gate_rows is None else [(gate_rows, ffn.gate_bias)]
    *gate, up = ffi.matvecs(x, [*gates, (up_rows, ffn.up_bias)])
    values = reference.ffn_values(gate[0] if gate else None, up, activation)
    return ffi.combine_rows(values, down_rows)
