"""Makes an operator of a kernel and its formula: which one runs, and how it maps and differentiates."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pjax.ops import ffi

Implementation = Literal["reference", "cpu"]
"""None in its place means: by the platform that a program is lowered for."""

OperatorFn = Callable[[Any, Any], Any]
"""`fn(tokens, weights) -> result`: every leaf of tokens and result has the batch as its first axis."""


def make_operator(
    kernel: OperatorFn, formula: OperatorFn, *, max_kernel_tokens: int | None = None
) -> Callable[[Any, Any, Implementation | None], Any]:
    """`operator(tokens, weights, implementation)`: jitted, with the gradient of `formula`.

    Under vmap over the tokens the batch grows and the weights stay where they are.

    Args:
        kernel: the CPU implementation.
        formula: the same in jnp; what runs elsewhere, and what is differentiated.
        max_kernel_tokens: tokens up to which None chooses the kernel where there is one; None: any number.
    """

    @functools.cache
    def build(implementation: Implementation | None) -> OperatorFn:
        def choose(tokens: Any, weights: Any) -> Any:
            num_tokens = jax.tree.leaves(tokens)[0].shape[0]
            few = max_kernel_tokens is None or num_tokens <= max_kernel_tokens
            dtypes = [leaf.dtype for leaf in jax.tree.leaves(weights) if leaf.ndim == 2] or [jnp.float32]
            dtype = next((dtype for dtype in dtypes if dtype not in ffi.WEIGHT_DTYPES), dtypes[0])
            return dispatch(implementation, kernel, formula, tokens, weights, dtype=dtype, prefer_kernel=few)

        run = _fold_vmap(choose)
        operator = jax.custom_vjp(run)
        operator.defvjp(
            lambda tokens, weights: (run(tokens, weights), (tokens, weights)),
            lambda saved, cotangents: jax.vjp(formula, *saved)[1](cotangents),
        )
        return jax.jit(operator)

    def run_operator(tokens: Any, weights: Any, implementation: Implementation | None) -> Any:
        if implementation != "reference":
            ffi.unusable_reason()  # raises on senseless settings here, before JAX's frames are in the way
        return build(implementation)(tokens, weights)

    return run_operator


def dispatch(
    implementation: Implementation | None,
    kernel: Callable[..., Any],
    formula: Callable[..., Any],
    *args: Any,
    dtype: Any = jnp.float32,
    prefer_kernel: bool = True,
) -> Any:
    """Calls `kernel` or `formula` with `args`.

    Args:
        implementation: "reference", "cpu", or None: the kernel where lowered for a CPU, else the formula.
        kernel: the CPU implementation.
        formula: the plain one.
        *args: pytrees of arrays.
        dtype: type of the weights; None runs the formula for those that the kernels do not read.
        prefer_kernel: whether None may choose the kernel at all.

    Raises:
        RuntimeError: "cpu" was asked for, and the kernels cannot be used here.
        ValueError: no such implementation, or "cpu" was asked for weights that it does not read.
    """
    check_implementation(implementation)
    readable = dtype in ffi.WEIGHT_DTYPES
    if implementation == "reference":
        return formula(*args)
    if implementation == "cpu":
        if reason := ffi.unusable_reason():
            raise RuntimeError(f'implementation: "cpu" was asked for, but {reason}.')
        if not readable:
            got = jnp.dtype(dtype)
            raise ValueError(f'implementation: "cpu" does not read weights of {got}; use None.')
        return kernel(*args)
    if not (readable and prefer_kernel and _kernels_usable()):
        return formula(*args)
    return lax.platform_dependent(*args, cpu=kernel, default=formula)


def check_implementation(implementation: Any) -> None:
    """Raises ValueError unless there is such an implementation."""
    if implementation == "cuda":
        raise ValueError("implementation: there are no CUDA kernels yet; use None, which runs on a GPU too.")
    if implementation not in (None, "reference", "cpu"):
        raise ValueError(f'implementation: expected None, "reference" or "cpu", got {implementation!r}.')


def _fold_vmap(fn: OperatorFn) -> OperatorFn:
    """Merges a mapped axis of the tokens into their batch.

    Plain batching would give each example its own copy of the weights. Where the weights themselves are
    mapped over, the examples are done one after the other.
    """
    folded = jax.custom_batching.custom_vmap(fn)

    @folded.def_vmap
    def rule(axis_size: int, in_batched: Any, tokens: Any, weights: Any) -> tuple[Any, Any]:
        tokens_batched, weights_batched = in_batched
        if any(jax.tree.leaves(weights_batched)):
            result = _map_batched(folded, (tokens, weights), in_batched)
        else:

            def stack(leaf: jax.Array, batched: bool) -> jax.Array:
                return leaf if batched else jnp.broadcast_to(leaf[None], (axis_size, *leaf.shape))

            stacked = jax.tree.map(stack, tokens, tokens_batched)
            batch = jax.tree.leaves(stacked)[0].shape[1]
            merged = jax.tree.map(lambda leaf: leaf.reshape(axis_size * batch, *leaf.shape[2:]), stacked)
            result = folded(merged, weights)
            result = jax.tree.map(lambda leaf: leaf.reshape(axis_size, batch, *leaf.shape[1:]), result)
        return result, jax.tree.map(lambda _: True, result)

    return folded


def _map_batched(fn: Callable[..., Any], args: Any, batched: Any) -> Any:
    leaves, structure = jax.tree.flatten(args)
    flags = jax.tree.leaves(batched)

    def one(mapped: list[jax.Array]) -> Any:
        remaining = iter(mapped)
        merged = [next(remaining) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        return fn(*jax.tree.unflatten(structure, merged))

    return lax.map(one, [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag])


def _kernels_usable() -> bool:
    reason = ffi.unusable_reason()
    if reason is not None:
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"pjax runs its slow reference operators: {reason}.", RuntimeWarning, stacklevel=2)
