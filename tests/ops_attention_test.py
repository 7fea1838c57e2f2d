"""Decode attention, as kernel and in jnp, against NumPy in float64; in place, and the same bits anywhere."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops

ROOT = Path(__file__).parents[1]
IMPLEMENTATIONS = ("reference", "cpu")
CASES = {
    "one head": {"heads": (1, 1, 16), "positions": (0,)},
    "grouped": {"heads": (8, 2, 64), "positions": (40, 7, 0), "width": 64},
    "one key head": {"heads": (7, 1, 80), "positions": (33, 40), "width": 32, "factor": 1.25},
    "window": {"heads": (4, 4, 32), "positions": (40, 3), "width": 32, "window": 5},
    "alibi": {"heads": (6, 3, 33), "positions": (40,), "slopes": True},
    "long": {"heads": (4, 1, 128), "positions": (1500, 700), "capacity": 1600, "width": 128},
}


def make(heads, positions, *, capacity=41, width=0, slopes=False, cache_dtype=np.uint16, **settings):
    """Arguments of `ops.decode_attention`, as NumPy arrays and keywords."""
    num_heads, kv_heads, head_dim = heads
    rng, batch = np.random.default_rng(capacity), len(positions)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def cache():
        rows = normal(batch, kv_heads, capacity, head_dim)
        return rows if cache_dtype == np.float32 else (rows.view(np.uint32) >> 16).astype(np.uint16)

    q, k, v = (normal(batch, count, head_dim) for count in (num_heads, kv_heads, kv_heads))
    keywords = {
        "frequencies": 100.0 ** -np.arange(0, 1, 2 / width, dtype=np.float32) if width else None,
        "attention_factor": settings.get("factor", 1.0),
        "slopes": 0.5 ** np.arange(1, num_heads + 1, dtype=np.float32) if slopes else None,
        "window": settings.get("window"),
    }
    return [q * 2, k, v, cache(), cache(), np.array(positions, np.int32)], keywords


def values(cache):
    """The numbers in a cache, float64."""
    bits = cache if cache.dtype == np.float32 else (cache.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64)


def numpy_attention(arrays, keywords):
    """y and the caches' values in float64, before the new rows are rounded."""
    q, k, v, k_cache, v_cache, positions = arrays
    frequencies, slopes, window = (keywords[name] for name in ("frequencies", "slopes", "window"))
    k_cache, v_cache = values(k_cache), values(v_cache)
    y = np.zeros((len(positions), q.shape[1], q.shape[2]))

    def turned(rows, position):
        if frequencies is None:
            return rows.astype(np.float64)
        # A rotation of a pair is a product of complex numbers.
        half = len(frequencies)
        angles = (np.float32(position) * frequencies).astype(np.float64)
        pairs = rows[:, :half] + 1j * rows[:, half : 2 * half]
        pairs = pairs * keywords["attention_factor"] * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag, rows[:, 2 * half :]], axis=1)

    for i, position in enumerate(positions):
        k_cache[i, :, position], v_cache[i, :, position] = turned(k[i], position), v[i]
        for head, query in enumerate(turned(q[i], position)):
            kv_head = head // (q.shape[1] // k.shape[1])
            first = 0 if window is None else max(0, position - window + 1)
            scores = k_cache[i, kv_head, first : position + 1] @ query
            if slopes is not None:
                scores -= slopes[head] * np.arange(position - first, -1, -1)
            weights = np.exp((scores - scores.max()) / np.sqrt(len(query)))
            y[i, head] = weights @ v_cache[i, kv_head, first : position + 1] / weights.sum()
    return y.reshape(len(positions), -1), k_cache, v_cache


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cache_dtype", (np.float32, np.uint16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("case", CASES)
def test_equals_numpy(case, cache_dtype, implementation):
    arrays, keywords = make(**CASES[case], cache_dtype=cache_dtype)
    expected = numpy_attention(arrays, keywords)
    y, *caches = ops.decode_attention(*arrays, **keywords, implementation=implementation)
    half_step = 0 if cache_dtype == np.float32 else 2.0**-8  # to nearest, 8 bits
    for got, before, want in zip(caches, arrays[3:5], expected[1:], strict=True):
        assert got.dtype == before.dtype
        np.testing.assert_allclose(values(np.asarray(got)), want, rtol=half_step, atol=1e-5)
        for i, position in enumerate(arrays[5]):
            np.testing.assert_array_equal(
                np.delete(got[i], position, axis=1), np.delete(before[i], position, axis=1)
            )
    # Against the rows that were stored, so that their rounding does not count.
    stored = [np.asarray(cache) for cache in caches]
    for cache, want in zip(stored, expected[1:], strict=True):
        want[:] = values(cache)
    y_stored = numpy_of_stored(arrays, keywords, *expected[1:])
    np.testing.assert_allclose(y, y_stored, rtol=2e-5, atol=2e-5)


def numpy_of_stored(arrays, keywords, k_rows, v_rows):
    """y where the new rows are already in the caches, given as values."""
    q, _, _, _, _, positions = arrays
    index = np.arange(len(positions)), slice(None), positions
    free = {**keywords, "frequencies": keywords["frequencies"]}
    turned_back = k_rows[index]
    if keywords["frequencies"] is not None:
        half = len(keywords["frequencies"])
        angles = (positions.astype(np.float32)[:, None] * keywords["frequencies"]).astype(np.float64)
        pairs = turned_back[..., :half] + 1j * turned_back[..., half : 2 * half]
        pairs = pairs / keywords["attention_factor"] * np.exp(-1j * angles)[:, None]
        turned_back = np.concatenate([pairs.real, pairs.imag, turned_back[..., 2 * half :]], axis=-1)
    caches = [rows.astype(np.float32) for rows in (k_rows, v_rows)]
    return numpy_attention([q, turned_back, v_rows[index], *caches, positions], free)[0]


def test_kernel_stores_the_bits_of_the_formula():
    for case in CASES.values():
        arrays, keywords = make(**case)
        results = [ops.decode_attention(*arrays, **keywords, implementation=name) for name in IMPLEMENTATIONS]
        for formula, kernel in zip(results[0][1:], results[1][1:], strict=True):
            np.testing.assert_array_equal(formula, kernel)


def test_caches_that_are_donated_stay_where_they_are():
    arrays, keywords = make(**CASES["grouped"])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(k_cache, v_cache, q, k, v, positions):
        return ops.decode_attention(q, k, v, k_cache, v_cache, positions, **keywords, implementation="cpu")

    q, k, v, *caches, positions = (jnp.array(array) for array in arrays)
    addresses = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(2):
        _, *caches = step(*caches, q, k, v, positions)
    assert [cache.unsafe_buffer_pointer() for cache in caches] == addresses


def test_caches_that_are_not_donated_are_left_alone():
    arrays, keywords = make(**CASES["grouped"])
    caches = [jnp.array(cache) for cache in arrays[3:5]]
    ops.decode_attention(*arrays[:3], *caches, arrays[5], **keywords, implementation="cpu")
    for cache, before in zip(caches, arrays[3:5], strict=True):
        np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_of_others_are_left_alone(implementation):
    """Caches with room for more sequences than the batch has, as those of all layers in one array."""
    arrays, keywords = make(**CASES["grouped"])
    alone = ops.decode_attention(*arrays, **keywords, implementation=implementation)
    *tokens, k_cache, v_cache, positions = arrays
    for first in (0, 2, 4):
        wide = [np.full((7, *cache.shape[1:]), 7, np.uint16) for cache in (k_cache, v_cache)]
        for cache, own in zip(wide, (k_cache, v_cache), strict=True):
            cache[first : first + 3] = own
        y, *caches = ops.decode_attention(
            *tokens, *wide, positions, first_slot=first, **keywords, implementation=implementation
        )
        np.testing.assert_array_equal(y, alone[0])
        for cache, before, own in zip(caches, wide, alone[1:], strict=True):
            before[first : first + 3] = own
            np.testing.assert_array_equal(cache, before)


def test_capacity_and_batch_change_no_bit():
    arrays, keywords = make(**CASES["long"])
    whole, *_ = ops.decode_attention(*arrays, **keywords, implementation="cpu")
    for i in range(2):
        one = [array[i : i + 1] for array in arrays]
        one[3:5] = [np.pad(cache, ((0, 0), (0, 0), (0, 448), (0, 0))) for cache in one[3:5]]
        alone, *_ = ops.decode_attention(*one, **keywords, implementation="cpu")
        np.testing.assert_array_equal(alone[0], whole[i])


def test_the_number_of_threads_changes_no_bit():
    code = """
from pjax import ops
from tests.ops_attention_test import CASES, make
arrays, keywords = make(**CASES["long"])
print(bytes(memoryview(ops.decode_attention(*arrays, **keywords, implementation="cpu")[0])).hex())
"""
    outputs = []
    for num_threads in ("1", "3"):
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "PJAX_NUM_THREADS": num_threads}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_position_behind_the_cache_goes_to_its_last_row(implementation):
    arrays, keywords = make((2, 1, 16), (45,))
    _, k_cache, _ = ops.decode_attention(*arrays, **keywords, implementation=implementation)
    np.testing.assert_array_equal(k_cache[:, :, :-1], arrays[3][:, :, :-1])
    np.testing.assert_allclose(values(np.asarray(k_cache))[:, :, -1], arrays[1], rtol=2.0**-8)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, lambda q: q[0], "q, k_cache: expected shapes"),
        (0, lambda q: q[:, :7], "k_cache: expected kv_heads to divide heads = 7"),
        (1, lambda k: k[:, :1], "k: expected shape"),
        (2, lambda v: v.astype(np.float16), "v: expected float32, got float16"),
        (3, lambda cache: cache.astype(np.int32), "k_cache: expected both caches float32 or both uint16"),
        (4, lambda cache: cache[:, :, 1:], "v_cache: expected shape"),
        (5, lambda positions: positions[:1], "positions: expected shape"),
        (5, lambda positions: positions.astype(np.int16), "positions: expected int32, got int16"),
    ],
)
def test_wrong_arrays_are_refused(number, change, message):
    arrays, keywords = make(**CASES["grouped"])
    arrays[number] = change(arrays[number])
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        ops.decode_attention(*arrays, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"frequencies": np.ones(33, np.float32)}, "frequencies: expected shape"),
        ({"slopes": np.ones(7, np.float32)}, "slopes: expected shape"),
        ({"window": 0}, "window: expected None or at least 1, got 0"),
        ({"first_slot": 1}, "first_slot: expected 0..0 for a batch of 3 in caches of 3 slots, got 1"),
        ({"first_slot": -1}, "first_slot: expected 0..0"),
    ],
)
def test_wrong_settings_are_refused(keywords, message):
    arrays, _ = make(**CASES["grouped"])
    with pytest.raises(ValueError, match=message):
        ops.decode_attention(*arrays, **keywords)
