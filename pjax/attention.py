"""What attention needs beside its operator: the cache, rotary frequencies, ALiBi slopes, and prompts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pjax.model_config import Rope
from pjax.ops.attention_reference import attend

NUM_PROMPT_BLOCKS = 8
"""A prompt's queries attend in so many blocks, each to the keys up to its own end: nearly half of the
scores are never computed, and a block's scores stay in the cache (2.4x faster at 256 tokens)."""


class KvCache(NamedTuple):
    """Keys and values; a row at position p is valid once token p has been processed.

    Attributes:
        k: [slots, kv_heads, kv_seq, head_dim]; a slot is one sequence in one layer.
        v: as k.
    """

    k: jax.Array
    v: jax.Array


def cache_dtype(embed_dtype: str) -> jnp.dtype:
    """Of a KV cache: float32 beside a float32 embedding, else bfloat16, kept as its bits in uint16.

    XLA's CPU backend updates a bfloat16 array by converting all of it to float32 and back, which for one new
    row of 1024 takes 120 us instead of 10.

    Args:
        embed_dtype: weight type of the embedding.
    """
    return jnp.dtype(jnp.float32 if embed_dtype == "float32" else jnp.uint16)


def rotary_frequencies(rope: Rope) -> np.ndarray:
    """float32 [width / 2]: the angle by which each pair of entries turns from one position to the next.

    "linear" divides them by the factor (Chen et al., arXiv 2306.15595); "llama3" only the slow ones, with a
    smooth transition (Llama 3.1); "yarn" by how often they turn within the original context (arXiv
    2309.00071). "dynamic" leaves them alone up to the original context, which is all that pjax allows.
    """
    pairs = np.arange(rope.width // 2)
    frequencies = rope.theta ** (-pairs / len(pairs))
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_context * frequencies / (2 * np.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        frequencies = frequencies * _mix(np.clip(kept, 0, 1), rope.factor)
    elif rope.kind == "yarn":
        low, high = (_pair_that_turns(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.width - 1)
        slow = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)  # the paper's code avoids 0 so, too
        frequencies = frequencies * _mix(1 - slow, rope.factor)
    elif rope.kind == "divisors":
        frequencies = frequencies / np.asarray(rope.divisors)
    return frequencies.astype(np.float32)


def _mix(kept: np.ndarray, factor: float) -> np.ndarray:
    """What multiplies frequencies of which the share `kept` stays and the rest is divided by `factor`."""
    return kept + (1 - kept) / factor


def _pair_that_turns(rope: Rope, turns: float) -> float:
    """Number of the pair that turns so often within the original context."""
    return rope.width * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def alibi_slopes(heads: int) -> np.ndarray:
    """float32 [heads]: by how much each head's scores fall per token of distance (arXiv 2108.12409).

    A geometric sequence that ends at 1/256; where `heads` is no power of two, that of the next lower one,
    and then every second slope of the next higher one.
    """
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([slopes, between]).astype(np.float32)


def attend_prompt(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """`pjax.ops.attention_reference.attend` where query and key i both have position i: same arguments."""
    seq = q.shape[1]
    block = max(64, -(-seq // NUM_PROMPT_BLOCKS))
    blocks = [
        attend(
            q[:, i : i + block],
            k[:, :, : i + block],
            v[:, :, : i + block],
            positions[:, i : i + block],
            window=window,
            slopes=slopes,
        )
        for i in range(0, seq, block)
    ]
    return jnp.concatenate(blocks, axis=1)
