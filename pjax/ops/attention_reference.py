"""Attention over a KV cache in plain jnp: what the kernel is compared with, and what prompts and GPUs run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST
"""Float32 means float32: a GPU would otherwise round the operands to TF32, 1e-3 relative."""


class Rotation(NamedTuple):
    """By how much each token's pairs of entries turn.

    Attributes:
        cos: float32 [batch, seq, width / 2]; the head's first `width` entries turn.
        sin: as cos.
    """

    cos: jax.Array
    sin: jax.Array


def rotation_at(positions: jax.Array, frequencies: jax.Array, factor: float) -> Rotation:
    """The rotation of tokens at int32 positions [batch, seq], `factor` times as long."""
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotary position embedding, halves as in Hugging Face's LLaMA (arXiv 2104.09864).

    Args:
        x: [batch, seq, heads, head_dim].
        rotation: of the tokens.
    """
    cos, sin = (part[:, :, None, :] for part in rotation)
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def append(cache: jax.Array, rows: jax.Array, positions: jax.Array, first_slot: int) -> jax.Array:
    """Writes each sequence's rows [batch, kv_heads, seq, head_dim] into its slot at its first position."""
    if cache.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    # One update a sequence, unrolled: a batched scatter is not done in place by XLA's CPU backend.
    for i in range(rows.shape[0]):
        cache = lax.dynamic_update_slice(cache, rows[i : i + 1], (first_slot + i, 0, positions[i, 0], 0))
    return cache


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """Causal grouped-query attention; a query sees the keys at positions up to its own.

    Args:
        q: float32 [batch, seq, heads, head_dim].
        k: [batch, kv_heads, kv_seq, head_dim]; row p holds position p.
        v: as k.
        positions: int32 [batch, seq], of the queries.
        window: keys that a query sees, itself included; None for all.
        slopes: float32 [heads], subtracted from a score, before scaling, per token of distance; or None.

    Returns:
        float32 [batch, seq, heads * head_dim].
    """
    batch, seq, heads, head_dim = q.shape
    kv_heads, kv_seq = k.shape[1], k.shape[2]
    group = heads // kv_heads
    # [batch, kv_heads, group * seq, head_dim]: both products are then plain batched matrix products.
    q = (q * head_dim**-0.5).reshape(batch, seq, kv_heads, group, head_dim)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * seq, head_dim)
    scores = jnp.einsum("bkxd,bktd->bkxt", q, _to_float32(k), precision=HIGHEST)
    scores = scores.reshape(batch, kv_heads, group, seq, kv_seq)
    distance = positions[:, None, None, :, None] - jnp.arange(kv_seq)[None, None, None, None, :]
    if slopes is not None:
        slope = (slopes * head_dim**-0.5).reshape(1, kv_heads, group, 1, 1)
        scores = scores - slope * distance.astype(jnp.float32)
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    scores = jnp.where(visible, scores, -jnp.inf)
    # Softmax, divided by its sum only after the weighted sum, where the arrays are smaller.
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    y = jnp.einsum(
        "bkxt,bktd->bkxd",
        weights.reshape(batch, kv_heads, group * seq, kv_seq),
        _to_float32(v),
        precision=HIGHEST,
    )
    y = y.reshape(batch, kv_heads, group, seq, head_dim) / weights.sum(-1, keepdims=True)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, seq, heads * head_dim)


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    positions: jax.Array,
    rotation: Rotation | None,
    slopes: jax.Array | None,
    *,
    first_slot: int,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pjax.ops.decode_attention`; rotation of [batch, 1]."""
    q, k, v, positions = q[:, None], k[:, None], v[:, None], positions[:, None]
    if rotation is not None:
        q, k = (rotate(part, rotation) for part in (q, k))
    k_cache = append(k_cache, k.swapaxes(1, 2), positions, first_slot)
    v_cache = append(v_cache, v.swapaxes(1, 2), positions, first_slot)
    slots = slice(first_slot, first_slot + q.shape[0])
    y = attend(q, k_cache[slots], v_cache[slots], positions, window=window, slopes=slopes)
    return y[:, 0], k_cache, v_cache


def _to_float32(rows: jax.Array) -> jax.Array:
    """Rows of a cache, or fresh ones, as float32."""
    if rows.dtype == jnp.uint16:
        return lax.bitcast_convert_type(rows.astype(jnp.uint32) << 16, jnp.float32)
    return rows.astype(jnp.float32)
