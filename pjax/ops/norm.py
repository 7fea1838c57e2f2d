"""RMSNorm and LayerNorm over the last axis."""

import functools
from collections.abc import Callable

import jax

from pjax.ops import checks, ffi, reference
from pjax.ops.dispatch import Implementation, make_operator

MAX_KERNEL_TOKENS = 16
"""The kernel runs on one thread, which for a few tokens is faster than starting XLA's five small programs."""


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    centered: bool,
    eps: float,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`c / sqrt(mean(c**2) + eps) * scale + bias`, c = x or, if centered, `x - mean(x)`. Differentiable.

    RMSNorm (arXiv 1910.07467) or, if centered, LayerNorm (arXiv 1607.06450).

    Args:
        x: float32 [..., model].
        scale: float32 [model] or None for ones.
        bias: float32 [model] or None for zeros.
        centered: whether the mean is subtracted first.
        eps: keeps the root away from zero.
        implementation: "reference", "cpu", or None: by platform and number of tokens.

    Returns:
        float32, the shape of x.

    Raises:
        ValueError: shapes or types do not fit.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    model = x.shape[-1]
    checks.check_input(x, model, ranks=None)
    for name, weight in (("scale", scale), ("bias", bias)):
        if weight is not None:
            checks.expect_float(name, weight)
            checks.expect_shape(name, weight, (model,), f"[model] = [{model}]")
    return _norm(centered, eps)(checks.as_rows(x), (scale, bias), implementation).reshape(x.shape)


@functools.cache
def _norm(centered: bool, eps: float) -> Callable:
    return make_operator(
        kernel=lambda x, weights: ffi.norm(x, *weights, centered=centered, eps=eps),
        formula=lambda x, weights: reference.norm(x, *weights, centered=centered, eps=eps),
        max_kernel_tokens=MAX_KERNEL_TOKENS,
    )
