"""Quantised weights: against the gguf package, the layout read byte by byte, and in every operator."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

import pjax
from pjax import ops
from pjax.executor import OneProgram, TwoPrograms
from pjax.ops import packed
from pjax.weights import Ffn, row_bytes
from tests.tiny_model import tiny_decoder, tiny_ids

FORMATS = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
WIDTHS = (32, 480, 512, 544, 1600)
"""One block, just below, at and above a group of sixteen, and several groups with a rest."""


def random_rows(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random weights with a row of zeros and a block of zeros."""
    weight = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    weight[0], weight[-1, :32] = 0, 0
    return weight


def random_ffn(format: str, neurons: int, width: int, gated: bool) -> tuple[Ffn, pjax.PackedFfn]:
    """A packed FFN, and the floats it stands for."""
    parts = [jnp.asarray(random_rows(neurons, width, seed)) for seed in range(3)]
    packed_ffn = pjax.pack_ffn(Ffn(parts[0] if gated else None, *parts[1:]), format)
    return pjax.unpack_ffn(packed_ffn), packed_ffn


def read_weight(row: np.ndarray, format: str, width: int, index: int) -> float:
    """One number of a packed row, found by the documented layout."""
    block, inside = divmod(index, 32)
    group, lane = divmod(block, 16)
    lanes = min(16, width // 32 - 16 * group)
    block_bytes = 32 if format == "q8_0" else 16
    start = group * 16 * block_bytes
    scale_at = width // 32 * block_bytes + 2 * block
    scale = float(row[scale_at : scale_at + 2].view(np.float16)[0])
    if format == "q8_0":
        vector, byte = divmod(inside, 4)
        return float(row[start + vector * 4 * lanes + 4 * lane + byte].view(np.int8)) * scale
    vector, rest = divmod(inside, 8)
    code = int(row[start + vector * 4 * lanes + 4 * lane + rest % 4])
    return ((code & 15 if rest < 4 else code >> 4) - 8) * scale


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", WIDTHS)
def test_same_codes_and_scales_as_gguf(format, width):
    weight = random_rows(5, width)
    matrix = ops.pack_matrix(jnp.asarray(weight), format)
    assert matrix.rows.shape == (5, row_bytes(format, width))
    stored = gguf.quants.quantize(weight, FORMATS[format])
    np.testing.assert_array_equal(ops.unpack_matrix(matrix), gguf.quants.dequantize(stored, FORMATS[format]))
    codes, scales = packed.unpack_codes(matrix.rows, format, width)
    blocks = stored.reshape(5, width // 32, -1)
    np.testing.assert_array_equal(np.asarray(scales), blocks[..., :2].copy().view(np.float16)[..., 0])
    np.testing.assert_array_equal(packed.pack_codes(codes, scales, format=format), matrix.rows)


@pytest.mark.parametrize("format", FORMATS)
def test_layout_is_as_documented(format):
    width = 544
    matrix = ops.pack_matrix(jnp.asarray(random_rows(2, width)), format)
    row, values = np.asarray(matrix.rows[1]), np.asarray(ops.unpack_matrix(matrix)[1])
    assert [read_weight(row, format, width, i) for i in range(width)] == values.tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32), st.sampled_from(list(FORMATS)))
def test_error_is_within_half_a_step(values, format):
    """q4_0 has a step more on one side, so the largest value of the other sign may lose a whole one."""
    weight = np.asarray([values], np.float32)
    found = np.asarray(ops.unpack_matrix(ops.pack_matrix(jnp.asarray(weight), format)))
    step = np.abs(weight).max() / (127 if format == "q8_0" else 8)
    bound = step * (0.5 if format == "q8_0" else 1.0) + np.abs(weight).max() * 2**-10  # the scale is float16
    assert np.abs(found - weight).max() <= bound + 1e-4


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("gated", "activation"), [(True, "drelu"), (True, "fatrelu:0.3"), (False, "relu2")])
def test_kernel_is_the_formula(format, gated, activation):
    """The same rounding of x, the same counts; sums in another order."""
    width, neurons = 544, 37
    _, ffn = random_ffn(format, neurons, width, gated)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, width)), jnp.float32)
    mask = jnp.asarray(rng.random((3, neurons)) < 0.5)
    for active_mask in (None, mask):
        arguments = {"activation": activation}
        y, counts = ops.sparse_ffn_counted(x, ffn, active_mask, implementation="cpu", **arguments)
        expected, expected_counts = ops.sparse_ffn_counted(
            x, ffn, active_mask, implementation="reference", **arguments
        )
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        for count, expected_count in zip(counts, expected_counts, strict=True):
            np.testing.assert_array_equal(count, expected_count)
    np.testing.assert_allclose(
        ops.dense_ffn(x, ffn, activation=activation, implementation="cpu"),
        ops.sparse_ffn(x, ffn, None, activation=activation, implementation="reference"),
        rtol=1e-4,
        atol=1e-4 * np.abs(expected).max(),
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", WIDTHS)
def test_matvec_is_the_formula(format, width):
    """Against NumPy in float64, on x rounded by hand."""
    matrix = ops.pack_matrix(jnp.asarray(random_rows(9, width)), format)
    x = np.random.default_rng(2).normal(size=(2, width)).astype(np.float32)
    blocks = x.reshape(2, -1, 32).astype(np.float64)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded = (np.rint(blocks / scale) * scale).reshape(2, width)
    expected = rounded @ np.asarray(ops.unpack_matrix(matrix), np.float64).T
    for implementation in ("cpu", "reference"):
        found = ops.matvec(jnp.asarray(x), matrix, implementation=implementation)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_products_of_one_x_are_the_products_alone(batch):
    """Of matrices of all types, in one call, with and without biases; also their gradient, and under vmap."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(batch, 96)), jnp.float32)
    rows = [jnp.asarray(random_rows(number, 96)) for number in (7, 40, 3, 11)]
    weights = [
        rows[0],
        ops.pack_matrix(rows[1], "q4_0"),
        ops.pack_matrix(rows[2], "q4_0"),
        jnp.zeros((0, 96)),
    ]
    weights += [ops.pack_matrix(rows[3], "q8_0"), rows[1].astype(jnp.bfloat16)]
    biases = [None, jnp.asarray(rng.normal(size=40), jnp.float32), None, None, None, jnp.arange(40.0)]
    pairs = list(zip(weights, biases, strict=True))
    together = ops.matvecs(x, weights, biases)
    for y, (weight, bias) in zip(together, pairs, strict=True):
        np.testing.assert_array_equal(y, ops.matvec(x, weight, bias))
    mapped = jax.vmap(lambda row: ops.matvecs(row, weights, biases))(x)
    one_row = ops.matvecs(x[0], weights, biases)
    for y, mapped_y, one in zip(together, mapped, one_row, strict=True):
        np.testing.assert_array_equal(y, mapped_y)
        np.testing.assert_allclose(y[0], one, rtol=1e-5, atol=1e-5)
    got = jax.grad(lambda x: sum((y**2).sum() for y in ops.matvecs(x, weights, biases)))(x)
    want = sum(jax.grad(lambda x, pair=pair: (ops.matvec(x, *pair) ** 2).sum())(x) for pair in pairs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("format", FORMATS)
def test_many_tokens_are_the_formula(format):
    """A prompt's FFN, and a product in which each token has the bits that it has alone."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(21, 544)), jnp.float32)
    for gated, activation in ((True, "silu"), (True, "drelu"), (False, "relu2")):
        _, ffn = random_ffn(format, 300, 544, gated)
        found, expected = (
            ops.dense_ffn(x, ffn, activation=activation, implementation=implementation)
            for implementation in ("cpu", "reference")
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    matrix = ops.pack_matrix(jnp.asarray(random_rows(33, 544)), format)
    together = ops.matvec(x, matrix, implementation="cpu")
    alone = [ops.matvec(row, matrix, implementation="cpu") for row in x]
    np.testing.assert_array_equal(together, alone)


def test_gradient_is_that_of_the_numbers_behind():
    """The rounding of x lets the gradient through as it comes."""
    floats, ffn = random_ffn("q8_0", 24, 64, True)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 64)), jnp.float32)
    rounded = packed.round_input(x)

    def loss(x, ffn):
        return ops.sparse_ffn(x, ffn, None, activation="relu").sum()

    np.testing.assert_allclose(jax.grad(loss)(x, ffn), jax.grad(loss)(rounded, floats), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_model(format):
    """What a float model with the same numbers computes, up to the rounding of x; the given one stays."""
    model = tiny_decoder(model=64, head_dim=16, heads=4)
    before = jax.tree.leaves(nnx.state(model))
    small = pjax.quantize(model, format)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))
    assert small.layers[0].ffn.weights.format == format
    assert not [p for p, v in nnx.to_flat_state(nnx.state(small, nnx.Param)) if len(v.shape) == 2]
    floats = nnx.merge(*nnx.split(small))
    for _, module in nnx.iter_modules(floats):
        if getattr(module, "format", None) and hasattr(module, "matrix"):
            module.set_weight(ops.unpack_matrix(module.matrix))
        elif getattr(module, "format", None):
            module.set_weights(pjax.unpack_ffn(module.weights))
    ids = tiny_ids(2, 9)
    expected = np.asarray(floats(ids))
    assert np.abs(np.asarray(small(ids)) - expected).max() < 0.05 * np.abs(expected).max()


def test_split_and_merge_packed():
    _, ffn = random_ffn("q4_0", 24, 64, True)
    mask = np.arange(24) % 3 == 0
    split = pjax.split_ffn(ffn, mask)
    np.testing.assert_array_equal(split.hot.rows, np.asarray(ffn.rows)[mask])
    np.testing.assert_array_equal(pjax.merge_ffn(split).rows, ffn.rows)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", [32, 512, 544])
def test_no_neurons(format, width):
    """A layer all of whose neurons are elsewhere adds nothing, whichever way it is computed."""
    _, ffn = random_ffn(format, 4, width, True)
    split, x = pjax.split_ffn(ffn, np.zeros(4, bool)), jnp.ones((2, width))
    for implementation in ("cpu", "reference"):
        for run in (ops.dense_ffn, lambda *args, **options: ops.sparse_ffn(*args, None, **options)):
            assert not np.asarray(run(x, split.hot, activation="relu", implementation=implementation)).any()
    empty = pjax.pack_ffn(pjax.unpack_ffn(split.hot), format)
    assert empty.rows.shape == split.hot.rows.shape == (0, ffn.rows.shape[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_split_model(format, mode):
    """Over two devices as on one, with layers that are all hot and all cold."""
    model = pjax.quantize(tiny_decoder(model=64, head_dim=16, heads=4), format)
    cold, hot = (np.full(n, value) for n, value in zip(model.config.neurons, (False, True), strict=True))
    lengths, options = np.array([6], np.int32), dict(capacity=16, sample_fn=keep_logits, sampler=None)
    device, host = jax.devices()[:2]
    found = []
    for executor in (
        OneProgram(model, mode=mode),
        TwoPrograms(model, (cold, hot), mode=mode, device=device, host=host),
    ):
        state = executor.prefill(tiny_ids(1, 6), lengths, **options)
        found.append(np.asarray(executor.step(state, sample_fn=keep_logits).sampler))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=0.02 * np.abs(found[0]).max())


def keep_logits(logits, state):
    return jnp.argmax(logits, -1).astype(jnp.int32), logits


def test_refusals():
    with pytest.raises(ValueError, match=r"format: expected one of .*, got 'q5_0'"):
        ops.pack_matrix(jnp.ones((2, 32)), "q5_0")
    with pytest.raises(
        ValueError, match="weight: expected a width that is a multiple of 32 for q4_0, got 33"
    ):
        ops.pack_matrix(jnp.ones((2, 33)), "q4_0")
    _, ffn = random_ffn("q8_0", 4, 32, True)
    short = dataclasses.replace(ffn, rows=ffn.rows[:, :-1])
    with pytest.raises(ValueError, match=r"ffn.rows: expected uint8 \[neurons, 102\]"):
        ops.sparse_ffn(jnp.ones(32), short, None, activation="relu")
    with pytest.raises(ValueError, match="dtype: expected one of q8_0, q4_0, got 'int8'"):
        pjax.quantize(tiny_decoder(), "int8")
