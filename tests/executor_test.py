"""Split over two devices or whole on one: the same tokens, few programs, no copies left behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax.base import Placement, Predictors
from pjax.executor import OneProgram, TwoPrograms, device_pair, make_executor, measure_overlap
from pjax.executor.two_programs import cold_program, hot_program
from pjax.sampling import greedy
from tests.tiny_model import tiny_decoder, tiny_ids, tiny_predictors

SHARES = (0.0, 0.37, 1.0)
MODES = ("dense", "exact", "predicted")
SOURCES = ("normed", "residual")  # what a predictor reads


def masks(model, share):
    rng = np.random.default_rng(0)
    return tuple(rng.permutation(n) < round(share * n) for n in model.config.neurons)


def placement(model, share):
    return Placement(masks(model, share), "optimal", 0.0, 0.0, 0, 0, 0.0)


def keep_logits(logits, state):
    """A sample function that also hands the logits back."""
    return jnp.argmax(logits, -1).astype(jnp.int32), logits


def decode(executor, ids, steps):
    """The ids and logits of a prefill and some steps."""
    lengths = np.full(len(ids), ids.shape[1], np.int32)
    state = executor.prefill(ids, lengths, capacity=32, sample_fn=keep_logits, sampler=None)
    tokens, logits = [np.asarray(state.ids)], [np.asarray(state.sampler)]
    for _ in range(steps):
        state = executor.step(state, sample_fn=keep_logits)
        tokens.append(np.asarray(state.ids))
        logits.append(np.asarray(state.sampler))
    return np.stack(tokens), np.stack(logits), np.asarray(state.rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gated", [True, False])
def test_split_equals_whole(mode, gated):
    model = tiny_decoder(gated=gated, mlp_bias=True)
    predictors = tiny_predictors(model, threshold=-0.5)
    ids = tiny_ids(2, 6)
    tokens, logits, rows = decode(OneProgram(model, mode=mode, predictors=predictors), ids, 6)
    for share in SHARES:
        device, host = jax.devices()
        split = TwoPrograms(
            model, masks(model, share), mode=mode, predictors=predictors, device=device, host=host
        )
        split_tokens, split_logits, split_rows = decode(split, ids, 6)
        np.testing.assert_array_equal(split_tokens, tokens)
        np.testing.assert_allclose(split_logits, logits, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(split_rows, rows)


def test_a_whole_layer_asks_nothing_of_the_host():
    model, ids = tiny_decoder(), tiny_ids(1, 6)
    device, host = jax.devices()
    some, whole = np.arange(24) < 9, np.ones(40, bool)
    split = TwoPrograms(model, (some, whole), mode="exact", device=device, host=host)
    seen = []
    caches = split._empty_caches(1, 32)
    _, joined, _, _ = split._run(ids, None, caches, "exact", lambda name, arrays: seen.append((name, arrays)))
    assert [arrays is None for name, arrays in seen if name == "host_input"] == [False, True]
    assert joined.cold is None
    np.testing.assert_array_equal(decode(split, ids, 4)[0], decode(OneProgram(model), ids, 4)[0])


BLOCKS = {
    "parallel": dict(block="parallel", norm="layer", norm_bias=True, gated=False),  # Falcon
    "post_norm": dict(block="post_norm", embed_width=8, final_norm=False, mlp_bias=True),  # OPT-350m
    "scaled": dict(residual_scale=0.4, embed_scale=12.0, logit_scale=0.5),  # MiniCPM
}


@pytest.mark.parametrize("mode, source", [("dense", ""), ("exact", ""), *(("predicted", s) for s in SOURCES)])
@pytest.mark.parametrize("block", BLOCKS)
def test_split_equals_whole_for_every_block(block, mode, source):
    model, ids = tiny_decoder(**BLOCKS[block]), tiny_ids(2, 6)
    predictors = tiny_predictors(model, threshold=0.0)
    layers = tuple(dataclasses.replace(layer, input=source) for layer in predictors.layers)
    predictors = Predictors(layers, predictors.reports)
    tokens, logits, rows = decode(OneProgram(model, mode=mode, predictors=predictors), ids, 4)
    device, host = jax.devices()
    split = TwoPrograms(model, masks(model, 0.4), mode=mode, predictors=predictors, device=device, host=host)
    split_tokens, split_logits, split_rows = decode(split, ids, 4)
    np.testing.assert_array_equal(split_tokens, tokens)
    np.testing.assert_allclose(split_logits, logits, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(split_rows, rows)


def test_exact_equals_dense_and_computes_less():
    model, ids = tiny_decoder(), tiny_ids(2, 6)
    dense, exact = (decode(OneProgram(model, mode=mode), ids, 6) for mode in ("dense", "exact"))
    np.testing.assert_allclose(exact[1], dense[1], rtol=0, atol=1e-5)
    predicted_rows, computed_rows, active_rows = exact[2]
    assert predicted_rows == 2 * 6 * sum(model.config.neurons)
    assert 0 < active_rows <= computed_rows < predicted_rows


def test_predictors_that_say_no_leave_only_attention():
    model, ids = tiny_decoder(), tiny_ids(1, 6)
    never = decode(OneProgram(model, mode="predicted", predictors=tiny_predictors(model, 1e9)), ids, 3)
    np.testing.assert_array_equal(never[2], 0)
    dense = decode(OneProgram(model), ids, 3)
    np.testing.assert_array_equal(never[1][0], dense[1][0])  # the prompt itself is always dense
    assert np.abs(never[1][1:] - dense[1][1:]).max() > 1e-3


def test_both_halves_run_the_kernel():
    model = tiny_decoder()
    device, host = jax.devices()
    split = TwoPrograms(model, masks(model, 0.5), mode="exact", device=device, host=host)
    layer, x = split._layers[0], jnp.ones((1, 1, 16))
    hot = hot_program.lower(layer.spec, layer.leaves, x, None, mode="exact").as_text()
    cold = cold_program.lower(layer.cold, x, None, mode="exact", activation="relu").as_text()
    assert "pjax_sparse_ffn" in hot and "pjax_sparse_ffn" in cold


def test_cold_program_is_dispatched_asynchronously():
    model = tiny_decoder()
    device, host = jax.devices()
    layer = TwoPrograms(model, masks(model, 0.5), mode="exact", device=device, host=host)._layers[0]
    lowered = cold_program.lower(layer.cold, jnp.ones((1, 1, 16)), None, mode="exact", activation="relu")
    assert lowered.compile().cost_analysis()["flops"] >= 1000  # XLA:CPU's limit for running inline


def test_layers_of_one_shape_share_their_programs():
    model = tiny_decoder(neurons=(40, 40, 40))
    device, host = jax.devices()
    split = TwoPrograms(model, masks(model, 0.5), mode="exact", device=device, host=host)
    before = hot_program._cache_size()
    decode(split, tiny_ids(1, 4), 2)
    assert hot_program._cache_size() - before == 2  # one for the prompt, one for a token


@pytest.mark.parametrize("split", [False, True])
def test_number_of_programs_does_not_grow(split):
    model = tiny_decoder(context=600)
    executor = make_executor(model, placement(model, 0.5), mode="exact", simulated=split)
    programs = (hot_program, cold_program) if split else (executor._step,)
    state = executor.prefill(
        tiny_ids(1, 4), np.array([4], np.int32), capacity=256, sample_fn=greedy, sampler=None
    )
    counts = []
    for step in range(200):
        state = executor.step(state, sample_fn=greedy)
        if step == 1:
            counts = [program._cache_size() for program in programs]
    assert [program._cache_size() for program in programs] == counts


def test_cache_is_donated_and_grows():
    executor = OneProgram(tiny_decoder(context=600))
    state = executor.prefill(
        tiny_ids(1, 4), np.array([4], np.int32), capacity=4096, sample_fn=greedy, sampler=None
    )
    old = state.caches.k
    address = old.unsafe_buffer_pointer()
    state = executor.step(state, sample_fn=greedy)
    assert old.is_deleted() and state.caches.k.unsafe_buffer_pointer() == address
    lowered = executor._step.lower(executor._leaves, state, sample_fn=greedy)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < old.nbytes, "a layer copies the cache"
    before = np.asarray(state.caches.v)
    state = executor.reserve(state, 8192)
    assert state.caches.v.shape[2] == 8192
    np.testing.assert_array_equal(state.caches.v[:, :, :4096], before)
    assert executor.reserve(state, 8192) is state


def test_make_executor_follows_the_placement():
    model = tiny_decoder()
    pair = device_pair(simulated=True)
    assert pair is not None and device_pair(simulated=False) is None
    assert isinstance(make_executor(model, placement(model, 0.37), mode="exact", simulated=True), TwoPrograms)
    assert isinstance(make_executor(model, placement(model, 0.37), mode="exact"), OneProgram)
    cold = make_executor(model, placement(model, 0.0), mode="exact", simulated=True)
    assert isinstance(cold, OneProgram) and cold.devices == pair[1:]


def test_overlap_is_measured():
    model = tiny_decoder(context=600)
    split = make_executor(model, placement(model, 0.5), mode="exact", simulated=True)
    state = split.prefill(
        tiny_ids(1, 4), np.array([4], np.int32), capacity=256, sample_fn=greedy, sampler=None
    )
    overlap = measure_overlap(split, state, greedy)
    assert min(overlap.step_s, overlap.device_s, overlap.host_s) > 0
    assert len(overlap.timeline) == model.config.layers
    starts = [times.start_s for times in overlap.timeline]
    assert starts == sorted(starts)


def test_modes_are_checked():
    with pytest.raises(ValueError, match='"predicted" needs trained predictors'):
        OneProgram(tiny_decoder(), mode="predicted")
    with pytest.raises(ValueError, match="activation 'silu'.*use mode=\"dense\""):
        OneProgram(tiny_decoder(activation="silu"), mode="exact")
    with pytest.raises(ValueError, match="mode: expected .* got 'fast'"):
        OneProgram(tiny_decoder(), mode="fast")
    with pytest.raises(ValueError, match=r"hot_mask: expected one mask a layer"):
        TwoPrograms(tiny_decoder(), (), device=jax.devices()[0], host=jax.devices()[1])
