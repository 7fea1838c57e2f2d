"""Every operator, in every implementation, against NumPy in float64; and under jit, vmap and grad."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import ops
from pjax.ops import ffi
from pjax.ops.dispatch import make_operator
from pjax.ops.sparse import MAX_FUSED_TOKENS
from pjax.weights import Ffn

IMPLEMENTATIONS = ("reference", "cpu")
DTYPES = (jnp.float32, jnp.bfloat16)
SIZES = ((0, 7), (1, 1), (7, 33), (33, 7), (64, 256), (257, 33))  # neurons, model
MASKS = (None, "all", "none", "random")
SHAPES = [("relu", *size) for size in SIZES]
SHAPES += [(name, 33, 7) for name in ("relu2", "fatrelu:0", "fatrelu:0.01", "fatrelu:0.7", "drelu")]
SHAPES += [("relu2", 257, 33), ("drelu", 257, 33)]  # what a row looks like, no activation sees


def make_ffn(neurons, model, *, dtype=jnp.float32, gated=True, biased=True, seed=0):
    rng = np.random.default_rng([seed, neurons, model])

    def matrix():
        return jnp.asarray(rng.standard_normal((neurons, model)) / model**0.5, dtype)

    def bias():
        return jnp.asarray(rng.standard_normal(neurons), jnp.float32) if biased else None

    return Ffn(matrix() if gated else None, matrix(), matrix(), bias() if gated else None, bias())


def make_tokens(batch, neurons, model, mask_kind, seed=1):
    rng = np.random.default_rng([seed, batch, neurons, model])
    x = jnp.asarray(rng.standard_normal((batch, model)), jnp.float32)
    shape = (batch, neurons)
    masks = {"all": np.ones(shape, bool), "none": np.zeros(shape, bool), "random": rng.random(shape) < 0.4}
    return x, None if mask_kind is None else jnp.asarray(masks[mask_kind])


def float64(array):
    return np.asarray(array, np.float32).astype(np.float64)


def numpy_ffn(x, ffn, mask, activation="relu"):
    """Result, error bound and counts (predicted, computed, active) in float64."""
    name, _, threshold = activation.partition(":")
    eps = np.finfo(np.float32).eps
    x = float64(x)

    def project(weight, bias):
        weight = float64(weight)
        offset = np.zeros(weight.shape[0]) if bias is None else float64(bias)
        # A float32 sum of n terms errs by less than n epsilons of the sum of their sizes.
        bound = eps * (x.shape[1] + 2) * (np.abs(x) @ np.abs(weight).T + np.abs(offset))
        return x @ weight.T + offset, bound

    up, up_bound = project(ffn.up, ffn.up_bias)
    opener, opener_bound = (up, up_bound) if ffn.gate is None else project(ffn.gate, ffn.gate_bias)
    mask = np.ones(up.shape, bool) if mask is None else np.asarray(mask)
    num_predicted = mask.sum(1)
    mask = mask & (opener > float(threshold or 0))
    if name == "drelu":
        mask = mask & (up > 0)
    if name == "relu2":
        opener, opener_bound = opener**2, opener_bound * (2 * np.abs(opener) + opener_bound)
    values, bound = opener * mask, opener_bound * mask
    if ffn.gate is not None:
        bound = mask * (opener_bound * (np.abs(up) + up_bound) + np.abs(opener) * up_bound)
        values = values * up
    bound = bound + eps * np.abs(values)
    down = np.abs(float64(ffn.down))
    bound = bound @ down + eps * (x.shape[0] + up.shape[1] + 2) * ((np.abs(values) + bound) @ down)
    counts = num_predicted, mask.sum(1), (values != 0).sum(1)
    return values @ float64(ffn.down), bound + 1e-37, counts


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("gated", (True, False), ids=("gated", "ungated"))
@pytest.mark.parametrize("activation,neurons,model", SHAPES)
def test_ffn_equals_numpy(implementation, dtype, gated, activation, neurons, model):
    if activation == "drelu" and not gated:
        return  # refused, see ops_checks_test
    for mask_kind in MASKS:
        batch, biased = (3, 1)[neurons % 2], model != 33
        ffn = make_ffn(neurons, model, dtype=dtype, gated=gated, biased=biased)
        x, mask = make_tokens(batch, neurons, model, mask_kind)
        expected, bound, counts = numpy_ffn(x, ffn, mask, activation)
        how = {"activation": activation, "implementation": implementation}
        y, got_counts = ops.sparse_ffn_counted(x, ffn, mask, **how)
        assert y.dtype == jnp.float32
        worst = np.max(np.abs(float64(y) - expected) / bound)
        assert worst <= 1, (neurons, mask_kind, worst)
        for got, want in zip(got_counts, counts, strict=True):
            np.testing.assert_array_equal(got, want)
        if mask is None:
            dense = ops.dense_ffn(x, ffn, **how)
            assert np.all(np.abs(float64(dense) - expected) <= bound)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
def test_matvec_equals_numpy(implementation, dtype):
    for num_outputs, num_inputs, batch in ((0, 7, 1), (1, 1, 3), (7, 33, 3), (33, 7, 1), (257, 256, 3)):
        weight = make_ffn(num_outputs, num_inputs, dtype=dtype).up
        x, _ = make_tokens(batch, num_outputs, num_inputs, None)
        bias = jnp.arange(num_outputs, dtype=jnp.float32) if batch == 3 else None
        offset = np.zeros(num_outputs) if bias is None else float64(bias)
        y = ops.matvec(x, weight, bias, implementation=implementation)
        sizes = np.abs(float64(x)) @ np.abs(float64(weight)).T + np.abs(offset)
        bound = np.finfo(np.float32).eps * (num_inputs + 2) * sizes
        assert np.all(np.abs(float64(y) - (float64(x) @ float64(weight).T + offset)) <= bound)
        one = ops.matvec(x[0], weight, bias, implementation=implementation)
        assert one.shape == (num_outputs,)
        assert np.all(np.abs(float64(one) - float64(y[0])) <= 2 * bound[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", (np.uint8, np.float16, np.float32, np.uint32))
def test_stream_sum_equals_numpy(implementation, dtype):
    for size in (0, 1, 3, 1000, 1 << 19):
        data = np.random.default_rng(size).integers(0, 255, size * np.dtype(dtype).itemsize, np.uint8)
        words = np.pad(data, (0, -data.size % 4)).view(np.uint32)
        got = ops.stream_sum(jnp.asarray(data.view(dtype)), implementation=implementation)
        assert int(got) == int(words.sum(dtype=np.uint64)) % 2**32


@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_pytorch_tanh"))
def test_other_activations_are_dense(activation):
    ffn = make_ffn(33, 7)
    x, _ = make_tokens(3, 33, 7, None)
    gate = float64(x) @ float64(ffn.gate).T + float64(ffn.gate_bias)
    up = float64(x) @ float64(ffn.up).T + float64(ffn.up_bias)
    erf = np.vectorize(math.erf)
    tanh = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    formulas = {"silu": gate / (1 + np.exp(-gate)), "gelu": 0.5 * gate * (1 + erf(gate / np.sqrt(2)))}
    expected = (formulas.get(activation, tanh) * up) @ float64(ffn.down)
    for implementation in IMPLEMENTATIONS:
        got = ops.dense_ffn(x[:, None], ffn, activation=activation, implementation=implementation)
        assert got.shape == (3, 1, 7)
        np.testing.assert_allclose(got[:, 0], expected, rtol=1e-4, atol=1e-4)


def sparse(x, ffn, mask, implementation=None, activation="relu"):
    return ops.sparse_ffn(x, ffn, mask, activation=activation, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_token_without_a_batch_axis(implementation):
    ffn = make_ffn(33, 7)
    x, mask = make_tokens(1, 33, 7, "random")
    y, counts = ops.sparse_ffn_counted(x[0], ffn, mask[0], activation="relu", implementation=implementation)
    assert y.shape == (7,)
    assert counts.predicted.shape == ()
    np.testing.assert_array_equal(y, sparse(x, ffn, mask, implementation)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_mask_serves_all_tokens(implementation):
    ffn = make_ffn(33, 7)
    x, mask = make_tokens(3, 33, 7, "random")
    shared = sparse(x, ffn, mask[0], implementation)
    np.testing.assert_array_equal(shared, sparse(x, ffn, jnp.stack([mask[0]] * 3), implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_neuron_whose_up_closes_it_is_skipped(implementation):
    """Down rows are added in groups of four: one group lies closed, one in part, one is open."""
    ffn = make_ffn(12, 33)
    up_bias = jnp.asarray([-99.0] * 5 + [99.0] * 7)
    ffn = dataclasses.replace(ffn, gate_bias=jnp.full(12, 99.0), up_bias=up_bias)
    x, _ = make_tokens(2, 12, 33, None)
    how = {"activation": "drelu", "implementation": implementation}
    for part, num_open in ((ffn, 7), (jax.tree.map(lambda a: a[:5], ffn), 0)):
        y, counts = ops.sparse_ffn_counted(x, part, None, **how)
        expected, bound, _ = numpy_ffn(x, part, None, "drelu")
        assert np.all(np.abs(float64(y) - expected) <= bound)
        assert counts.computed.tolist() == counts.active.tolist() == [num_open] * 2


@pytest.mark.parametrize("activation", ("relu", "drelu"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_equals_a_loop(implementation, activation):
    ffn = make_ffn(33, 7)
    x, mask = make_tokens(4, 33, 7, "random")
    fn = functools.partial(sparse, implementation=implementation, activation=activation)
    loop = jnp.stack([fn(x[i], ffn, mask[i]) for i in range(4)])
    np.testing.assert_allclose(jax.vmap(fn, (0, None, 0))(x, ffn, mask), loop, rtol=1e-6, atol=1e-6)
    same_mask = jnp.stack([fn(x[i], ffn, mask[0]) for i in range(4)])
    mapped = jax.vmap(fn, (0, None, None))(x, ffn, mask[0])
    np.testing.assert_allclose(mapped, same_mask, rtol=1e-6, atol=1e-6)
    ffns = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), ffn)
    each = jnp.stack([fn(x, jax.tree.map(lambda a, i=i: a[i], ffns), mask) for i in range(2)])
    mapped = jax.vmap(fn, (None, 0, None))(x, ffns, mask)
    np.testing.assert_allclose(mapped, each, rtol=1e-5, atol=1e-5)


def plain_formula(x, ffn, mask, activation):
    name, _, threshold = activation.partition(":")
    up = x @ ffn.up.T + ffn.up_bias[None]
    opener = up if ffn.gate is None else x @ ffn.gate.T + ffn.gate_bias[None]
    hidden = opener * (opener > float(threshold or 0))
    hidden = hidden**2 if name == "relu2" else hidden
    if ffn.gate is not None:
        hidden = hidden * (jnp.maximum(up, 0) if name == "drelu" else up)
    return (hidden * mask) @ ffn.down


@pytest.mark.parametrize("implementation", (None, *IMPLEMENTATIONS))
@pytest.mark.parametrize(
    "activation,gated",
    [("relu", True), ("relu", False), ("relu2", False), ("fatrelu:0.7", True), ("drelu", True)],
)
def test_gradient_equals_that_of_the_formula(implementation, activation, gated):
    ffn = make_ffn(33, 7, gated=gated)
    x, mask = make_tokens(3, 33, 7, "random")

    def loss(fn):
        return lambda x, ffn: (fn(x, ffn, mask, activation=activation) ** 2).sum()

    got = jax.jit(jax.grad(loss(functools.partial(sparse, implementation=implementation)), (0, 1)))(x, ffn)
    want = jax.grad(loss(plain_formula), (0, 1))(x, ffn)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_gradient_maps_over_tokens():
    ffn = make_ffn(33, 7)
    x, mask = make_tokens(3, 33, 7, "random")
    grad = jax.grad(lambda x, mask: sparse(x, ffn, mask).sum())
    each = jnp.stack([grad(x[i], mask[i]) for i in range(3)])
    np.testing.assert_allclose(jax.vmap(grad)(x, mask), each, rtol=1e-5, atol=1e-5)


def test_matvec_differentiates():
    weight = make_ffn(33, 7).up
    x, _ = make_tokens(3, 33, 7, None)
    got = jax.grad(lambda x, w: (ops.matvec(x, w) ** 2).sum(), (0, 1))(x, weight)
    want = jax.grad(lambda x, w: ((x @ w.T) ** 2).sum(), (0, 1))(x, weight)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("activation", ("relu", "relu2", "fatrelu:0.7", "drelu"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_a_number_shows(implementation, activation):
    ffn = make_ffn(33, 7)
    open_bias = ffn.up_bias.at[3].set(99.0)
    ffn = dataclasses.replace(ffn, gate_bias=ffn.gate_bias.at[3].set(jnp.nan), up_bias=open_bias)
    x, _ = make_tokens(1, 33, 7, None)
    assert np.isnan(sparse(x, ffn, None, implementation, activation)).all()
    ungated = dataclasses.replace(ffn, gate=None, gate_bias=None, up_bias=ffn.gate_bias)
    if activation != "drelu":
        assert np.isnan(sparse(x, ungated, None, implementation, activation)).all()


def lowered_text(fn, *args, platform):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_the_kernel_runs_on_a_cpu_and_the_reference_elsewhere():
    ffn = make_ffn(33, 7)
    x, mask = make_tokens(2, 33, 7, "random")
    cases = {
        "pjax_sparse_ffn": (sparse, x, ffn, mask),
        "pjax_matvec": (ops.matvec, x, ffn.up),
        "pjax_stream_sum": (ops.stream_sum, x),
    }
    for target, (fn, *args) in cases.items():
        assert target in lowered_text(fn, *args, platform="cpu")
        assert target not in lowered_text(fn, *args, platform="cuda")
    mapped = jax.vmap(sparse, (0, None, 0))
    assert "pjax_sparse_ffn" in lowered_text(mapped, x, ffn, mask, platform="cpu")


def test_what_the_kernels_are_not_for_runs_on_the_reference():
    x, mask = make_tokens(1, 33, 7, "random")
    narrow = make_ffn(33, 7, dtype=jnp.float8_e5m2)
    assert "pjax_sparse_ffn" not in lowered_text(sparse, x, narrow, mask, platform="cpu")
    with pytest.raises(ValueError, match="float8_e5m2"):
        sparse(x, narrow, mask, "cpu")
    assert "pjax" not in lowered_text(ops.matvec, x, narrow.up, platform="cpu")


def test_a_dense_ffn_is_fused_for_few_tokens_only():
    ffn = make_ffn(33, 7)
    few = MAX_FUSED_TOKENS
    for batch, activation, fused in ((few, "relu", True), (1, "silu", True), (few + 1, "relu", False)):
        x, _ = make_tokens(batch, 33, 7, None)
        text = lowered_text(functools.partial(ops.dense_ffn, activation=activation), x, ffn, platform="cpu")
        assert ("pjax_sparse_ffn" in text) == fused
        assert ("pjax_combine_rows" in text) != fused


@pytest.mark.parametrize("dtype", (*DTYPES, jnp.float16), ids=("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("batch", (17, 40))
def test_many_tokens_equal_numpy(dtype, batch):
    """Tokens by the dozen, and what is left of them; the same in either implementation of each product."""
    for neurons, model, gated in ((1, 1, True), (7, 33, False), (33, 7, True), (300, 257, True)):
        ffn = make_ffn(neurons, model, dtype=dtype, gated=gated)
        x, _ = make_tokens(batch, neurons, model, None)
        expected, bound, _ = numpy_ffn(x, ffn, None)
        y = ops.dense_ffn(x, ffn, activation="relu", implementation="cpu")
        assert np.all(np.abs(float64(y) - expected) <= bound)


def test_weights_reach_a_kernel_where_they_lie():
    weight = make_ffn(257, 256, dtype=jnp.bfloat16).up

    def matches(halves):
        return int(halves[0]) | int(halves[1]) << 32 == weight.unsafe_buffer_pointer()

    assert ffi.unusable_reason() is None
    assert matches(jax.jit(ffi.address)(weight))
    # The same way through dispatch and vmap as the operators take.
    probe = make_operator(
        kernel=lambda x, w: jnp.broadcast_to(ffi.address(w)[None], (x.shape[0], 2)),
        formula=lambda x, w: jnp.zeros((x.shape[0], 2), jnp.uint32),
    )
    for implementation in (None, "cpu"):
        fn = functools.partial(probe, implementation=implementation)
        assert matches(jax.jit(fn)(jnp.zeros((1, 3)), weight)[0])
        assert matches(jax.jit(jax.vmap(fn, (0, None)))(jnp.zeros((4, 1, 3)), weight)[2, 0])
