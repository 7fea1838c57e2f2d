"""Positions and attention against formulas in float64; a text in one piece, in steps, and padded."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax.attention import KvCache, alibi_slopes, attend_prompt, rotary_frequencies
from pjax.model import Attention
from pjax.model_config import Rope
from pjax.ops.attention_reference import attend, rotate, rotation_at
from tests.tiny_model import tiny_decoder

DEFAULT = Rope(1e4, 8)
LLAMA3 = Rope(5e5, 16, "llama3", factor=8.0, original_context=64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = Rope(
    1e4, 32, "yarn", factor=4.0, original_context=64, beta_fast=8.0, beta_slow=1.0, attention_factor=1.2
)
ROPES = [
    DEFAULT,
    Rope(1e4, 8, "linear", factor=4.0),
    Rope(1e4, 8, "dynamic", factor=4.0, original_context=64),
    LLAMA3,
    dataclasses.replace(LLAMA3, theta=1e4, factor=2.0, high_freq_factor=2.0),
    YARN,
    dataclasses.replace(YARN, truncate=False, beta_fast=32.0, factor=16.0),
    dataclasses.replace(YARN, original_context=4),  # nothing turns often enough: the range is cut off at 0
    Rope(1e4, 4, "divisors", divisors=(1.0, 3.5)),
]


def angle_per_position(rope, pair):
    """Of one pair of entries, from the definitions in the papers."""
    angle = 1.0 / rope.theta ** (2 * pair / rope.width)
    if rope.kind == "linear":
        return angle / rope.factor  # a position counts as the factor's part of one
    if rope.kind == "divisors":
        return angle / rope.divisors[pair]
    wavelength = 2 * math.pi / angle
    if rope.kind == "llama3":
        longest, shortest = (rope.original_context / x for x in (rope.low_freq_factor, rope.high_freq_factor))
        if wavelength < shortest:
            return angle
        if wavelength > longest:
            return angle / rope.factor
        kept = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        return (1 - kept) * angle / rope.factor + kept * angle
    if rope.kind == "yarn":
        first, last = pair_that_turns(rope, rope.beta_fast), pair_that_turns(rope, rope.beta_slow)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first = max(first, 0)
        slowed = 0.0 if pair <= first else 1.0 if pair >= last else (pair - first) / (last - first)
        return angle / rope.factor * slowed + angle * (1 - slowed)
    return angle


def pair_that_turns(rope, turns):
    """The (fractional) pair that turns so often within the original context, by bisection."""
    low, high = -100.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        turned = rope.original_context / (2 * math.pi * rope.theta ** (2 * middle / rope.width))
        low, high = (middle, high) if turned > turns else (low, middle)
    return low


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_rotary_positions_turn_pairs_of_entries(rope):
    half = rope.width // 2
    angles = np.array([angle_per_position(rope, pair) for pair in range(half)])
    np.testing.assert_allclose(rotary_frequencies(rope), angles, rtol=1e-6)
    x = np.random.default_rng(0).standard_normal((2, 5, 3, rope.width + 6))
    positions = np.array([[0, 1, 2, 3, 4], [17, 18, 19, 20, 21]])
    turn = rope.attention_factor * np.exp(1j * positions[:, :, None, None] * angles)
    pairs = (x[..., :half] + 1j * x[..., half : rope.width]) * turn
    expected = np.concatenate([pairs.real, pairs.imag, x[..., rope.width :]], -1)
    rotation = rotation_at(
        jnp.asarray(positions), jnp.asarray(rotary_frequencies(rope)), rope.attention_factor
    )
    got = rotate(jnp.asarray(x, jnp.float32), rotation)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_some_pairs_are_stretched_and_some_are_not():
    """The scalings above are compared where they do something."""
    for rope in (LLAMA3, YARN):
        plain = rotary_frequencies(Rope(rope.theta, rope.width))
        ratio = plain / rotary_frequencies(rope)
        assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(rope.factor)
        assert ((ratio > 1.01) & (ratio < rope.factor - 0.01)).any()


def test_alibi_slopes_are_those_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(1), [1 / 256])
    np.testing.assert_allclose(alibi_slopes(4), [1 / 4, 1 / 16, 1 / 64, 1 / 256])
    np.testing.assert_allclose(alibi_slopes(8), [0.5**i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
    np.testing.assert_allclose(alibi_slopes(3), [1 / 16, 1 / 256, 1 / 4])
    slopes = alibi_slopes(71)
    np.testing.assert_allclose(slopes[:64], [2 ** (-i / 8) for i in range(1, 65)], rtol=1e-6)
    np.testing.assert_allclose(slopes[64:], [2 ** (-i / 16) for i in range(1, 15, 2)], rtol=1e-6)


def numpy_attention(q, k, v, positions, window=None, slopes=None):
    """As `attend`, one query of one head at a time, in float64."""
    q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
    batch, seq, heads, head_dim = q.shape
    out = np.zeros((batch, seq, heads, head_dim))
    for b, s, h in np.ndindex(batch, seq, heads):
        kv_head, position = h * k.shape[1] // heads, int(positions[b, s])
        first = 0 if window is None else max(0, position - window + 1)
        seen = np.arange(first, position + 1)
        scores = k[b, kv_head, seen] @ q[b, s, h]
        if slopes is not None:
            scores = scores - slopes[h] * (position - seen)
        weights = np.exp((scores - scores.max()) / math.sqrt(head_dim))
        out[b, s, h] = weights @ v[b, kv_head, seen] / weights.sum()
    return out.reshape(batch, seq, heads * head_dim)


def random_heads(seq, heads, kv_heads, head_dim=8):
    rng = np.random.default_rng(seq)
    q = rng.standard_normal((2, seq, heads, head_dim))
    k, v = rng.standard_normal((2, 2, kv_heads, seq, head_dim))
    return [jnp.asarray(part, jnp.float32) for part in (q, k, v)]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("alibi", [False, True])
def test_attention_equals_numpy(heads, kv_heads, window, alibi):
    q, k, v = random_heads(11, heads, kv_heads)
    slopes = alibi_slopes(heads) if alibi else None
    positions = jnp.broadcast_to(jnp.arange(11)[None], (2, 11))
    expected = numpy_attention(q, k, v, positions, window, slopes)
    for fn in (attend, attend_prompt):
        got = fn(q, k, v, positions, window=window, slopes=slopes)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)
    # Queries of other positions, of which the cache's later rows are not seen, whatever they hold.
    positions = jnp.asarray([[4], [9]])
    expected = numpy_attention(q[:, :1], k, v, positions, window, slopes)
    k, v = (part.at[0, :, 5:].set(1e3).at[1, :, 10:].set(1e3) for part in (k, v))
    got = attend(q[:, :1], k, v, positions, window=window, slopes=slopes)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_a_window_crosses_blocks_of_queries():
    q, k, v = random_heads(150, 2, 1)
    positions = jnp.broadcast_to(jnp.arange(150)[None], (2, 150))
    got = attend_prompt(q, k, v, positions, window=70, slopes=alibi_slopes(2))
    expected = numpy_attention(q, k, v, positions, 70, alibi_slopes(2))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


KINDS = {
    "grouped, half rotary": dict(rope=Rope(1e4, 2), attention_bias=True),
    "window": dict(window=3),
    "alibi": dict(rope=None, alibi=True, heads=6, kv_heads=2),
    "one key": dict(kv_heads=1, rope=Rope(1e4, 4, "linear", factor=2.0)),
}


def attention(kind) -> Attention:
    return tiny_decoder(**KINDS[kind]).layers[0].attention


def numpy_module(module, x):
    """The whole layer for x [batch, seq, model]; rotary positions by complex numbers."""
    config = module.config
    batch, seq, _ = x.shape
    positions = np.broadcast_to(np.arange(seq), (batch, seq))

    def heads(linear):
        y = np.asarray(x, np.float64) @ np.asarray(linear.weight[...], np.float64).T
        y = y if linear.bias is None else y + np.asarray(linear.bias[...])
        return y.reshape(batch, seq, -1, config.head_dim)

    def turned(part):
        if config.rope is None:
            return part
        half = config.rope.width // 2
        angles = np.array([angle_per_position(config.rope, pair) for pair in range(half)])
        turn = np.exp(1j * positions[:, :, None, None] * angles)
        pairs = (part[..., :half] + 1j * part[..., half : 2 * half]) * turn
        return np.concatenate([pairs.real, pairs.imag, part[..., 2 * half :]], -1)

    q, k, v = turned(heads(module.q)), turned(heads(module.k)), heads(module.v)
    slopes = alibi_slopes(config.heads) if config.alibi else None
    y = numpy_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), positions, config.window, slopes)
    y = y @ np.asarray(module.o.weight[...], np.float64).T
    return y if module.o.bias is None else y + np.asarray(module.o.bias[...])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_over_a_padded_batch_equal_the_whole_text(kind, dtype):
    """Two prompts of 3 and 7 tokens in one batch, padded, then 4 more tokens each, through the cache."""
    module = attention(kind)
    config, lengths, steps = module.config, np.array([3, 7]), 4
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    texts = np.random.default_rng(0).standard_normal((2, 7 + steps, config.model)).astype(np.float32)
    whole = numpy_module(module, texts)
    graphdef, state = nnx.split(module)
    run = jax.jit(lambda state, *args: nnx.merge(graphdef, state)(*args))
    shape = (2, config.kv_heads, 16, config.head_dim)
    cache = KvCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    prompt = np.where(np.arange(7)[None, :, None] < lengths[:, None, None], texts[:, :7], 1e2)
    positions = jnp.broadcast_to(jnp.arange(7)[None], (2, 7))
    y, cache = run(state, jnp.asarray(prompt, jnp.float32), positions, cache)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(y[row, :length], whole[row, :length], rtol=0, atol=2e-5)
    for step in range(steps):
        at = lengths + step
        x = np.stack([texts[row, at[row]] for row in range(2)])[:, None]
        y, cache = run(state, jnp.asarray(x), jnp.asarray(at, jnp.int32)[:, None], cache)
        for row in range(2):
            np.testing.assert_allclose(y[row, 0], whole[row, at[row]], rtol=0, atol=tolerance)
