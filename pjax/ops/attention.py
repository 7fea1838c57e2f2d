"""Attention of one new token per sequence over the KV cache: rotation, append and softmax in one pass."""

import functools

import jax
import jax.numpy as jnp

from pjax.ops import attention_reference as reference
from pjax.ops import checks, ffi
from pjax.ops.dispatch import Implementation, dispatch

CACHE_DTYPES = (jnp.float32, jnp.uint16)
"""Types of a KV cache; uint16 are the bits of bfloat16."""


@functools.partial(jax.jit, static_argnames=("attention_factor", "first_slot", "window", "implementation"))
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    positions: jax.Array,
    *,
    frequencies: jax.Array | None = None,
    attention_factor: float = 1.0,
    slopes: jax.Array | None = None,
    first_slot: int = 0,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates q and k, writes k and v into the caches, and attends from q to the rows up to its own.

    `y = softmax(q . k / sqrt(head_dim) - slope * distance / sqrt(head_dim)) @ v` in float32, whatever the
    type of the caches. In a program that donates the caches they are updated where they lie.

    Args:
        q: float32 [batch, heads, head_dim].
        k: float32 [batch, kv_heads, head_dim]; kv_heads divides heads.
        v: as k.
        k_cache: float32, or uint16 for the bits of bfloat16, [slots, kv_heads, capacity, head_dim]; row p
            holds position p.
        v_cache: as k_cache.
        positions: int32 [batch], of the new tokens; one behind the cache is written to its last row.
        frequencies: float32 [width / 2], the angle by which entries i and i + width / 2 of q and k turn from
            one position to the next; None turns none.
        attention_factor: multiplies the turned entries.
        slopes: float32 [heads], subtracted from a score per token of distance, before scaling; or None.
        first_slot: sequence i has slot `first_slot + i` of the caches, which may hold more than this batch,
            as all layers' rows: each array that a program gives back costs it 6 us a token.
        window: keys that a query sees, itself included; None for all.
        implementation: "reference", "cpu", or None: by the platform the program is lowered for.

    Returns:
        float32 [batch, heads * head_dim], k_cache, v_cache.

    Raises:
        ValueError: shapes or types do not fit.
        RuntimeError: implementation is "cpu" and the kernels cannot be used here.
    """
    _check(q, k, v, k_cache, v_cache, positions, frequencies, slopes, first_slot, window)
    rotation = None
    if frequencies is not None:
        # Here and not in the kernel: XLA computes it once for all layers, with the bits that prompts get.
        rotation = reference.rotation_at(positions[:, None], frequencies, attention_factor)
    return dispatch(
        implementation,
        functools.partial(ffi.decode_attention, first_slot=first_slot, window=window),
        functools.partial(reference.decode_attention, first_slot=first_slot, window=window),
        *(q, k, v, k_cache, v_cache, positions, rotation, slopes),
    )


def _check(
    q, k, v, k_cache, v_cache, positions, frequencies, slopes, first_slot: int, window: int | None
) -> None:
    if q.ndim != 3 or k_cache.ndim != 4:
        raise ValueError(
            "q, k_cache: expected shapes [batch, heads, head_dim] and [slots, kv_heads, capacity, head_dim], "
            f"got {list(q.shape)} and {list(k_cache.shape)}."
        )
    batch, heads, head_dim = q.shape
    slots, kv_heads, capacity = k_cache.shape[:3]
    if kv_heads == 0 or heads % kv_heads or capacity == 0 or head_dim == 0:
        raise ValueError(
            f"k_cache: expected kv_heads to divide heads = {heads}, and no axis of size 0, "
            f"got {list(k_cache.shape)}."
        )
    rows = f"[batch, kv_heads, head_dim] = [{batch}, {kv_heads}, {head_dim}]"
    cache_rows = f"[slots, kv_heads, capacity, head_dim] = [{slots}, {kv_heads}, {capacity}, {head_dim}]"
    for name, array in (("k", k), ("v", v)):
        checks.expect_shape(name, array, (batch, kv_heads, head_dim), rows)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.expect_shape(name, cache, (slots, kv_heads, capacity, head_dim), cache_rows)
        if cache.dtype not in CACHE_DTYPES or cache.dtype != k_cache.dtype:
            raise ValueError(f"{name}: expected both caches float32 or both uint16, got {cache.dtype}.")
    checks.expect_shape("positions", positions, (batch,), f"[batch] = [{batch}]")
    floats = {"q": q, "k": k, "v": v, "frequencies": frequencies, "slopes": slopes}
    for name, array in floats.items():
        if array is not None and array.dtype != jnp.float32:
            raise ValueError(f"{name}: expected float32, got {array.dtype}.")
    if positions.dtype != jnp.int32:
        raise ValueError(f"positions: expected int32, got {positions.dtype}.")
    if frequencies is not None and (frequencies.ndim != 1 or 2 * frequencies.size > head_dim):
        raise ValueError(
            f"frequencies: expected shape [width / 2] with width of at most head_dim = {head_dim}, "
            f"got {list(frequencies.shape)}."
        )
    if slopes is not None:
        checks.expect_shape("slopes", slopes, (heads,), f"[heads] = [{heads}]")
    if not 0 <= first_slot <= slots - batch:
        raise ValueError(
            f"first_slot: expected 0..{slots - batch} for a batch of {batch} in caches of {slots} slots, "
            f"got {first_slot}."
        )
    if window is not None and window < 1:
        raise ValueError(f"window: expected None or at least 1, got {window}.")
