"""Counts of active neurons against numpy and real checkpoints."""

import json

import numpy as np
import pytest

from pjax import profiler
from pjax.profiler import collect_stats, hot_share
from pjax.storage import load_model
from pjax.training import train_predictors
from tests.cases import find_case
from tests.tiny_model import ffn_inputs, ffn_values, tiny_decoder, tiny_ids

UNCERTAIN = 1e-6
"""Distance from zero below which a neuron may be counted either way."""


def assert_counts(found, expected, openers):
    """Counts are the same, save for tokens where a neuron's pre-activation is next to zero."""
    for counts, wanted, opener in zip(found, expected, openers, strict=True):
        uncertain = (np.abs(opener) < UNCERTAIN).reshape(-1, len(counts)).sum(0)
        assert counts.dtype == np.int64
        assert counts.shape == wanted.shape
        assert (np.abs(counts - wanted) <= uncertain).all(), np.flatnonzero(
            np.abs(counts - wanted) > uncertain
        )
        assert uncertain.sum() <= 2


def numpy_ffn(model, ids):
    """(values, openers) per layer, see `ffn_values`."""
    inputs = ffn_inputs(model, ids)
    return zip(*(ffn_values(layer, x) for layer, x in zip(model.layers, inputs, strict=True)), strict=True)


@pytest.mark.parametrize("changes", [{}, {"gated": False}, {"mlp_bias": True}], ids=str)
def test_counts_are_those_of_numpy(changes):
    model, ids = tiny_decoder(**changes), tiny_ids(5, 13)
    values, openers = numpy_ffn(model, ids)
    stats = collect_stats(model, ids)
    assert stats.num_tokens == 65
    assert_counts(stats.counts, [(v != 0).reshape(65, -1).sum(0) for v in values], openers)
    assert 0.2 < np.mean(stats.density_per_layer) < 0.8


@pytest.mark.parametrize(
    "name",
    ["llama_mha", "llama_gqa", "llama_mqa", "llama_tied", "opt_base", "opt_no_bias", "opt_full_context",
     "q_llama_bfloat16", "q_opt_lm_head_too"],
)  # fmt: skip
def test_counts_are_those_of_real_checkpoints(name):
    folder = find_case(name)
    expect = folder / "expect.json"
    own = folder / "golden.npz"
    golden = np.load(
        own if own.exists() else find_case(json.loads(expect.read_text())["parent"]) / "golden.npz"
    )
    model = load_model(folder)
    stats = collect_stats(model, golden["ids"])
    assert stats.num_tokens == golden["ids"].size
    if not all(map(np.array_equal, stats.counts, golden["active"])):
        _, openers = numpy_ffn(model, golden["ids"])
        assert_counts(stats.counts, list(golden["active"]), openers)


def test_batches_change_nothing(monkeypatch):
    model, ids = tiny_decoder(), tiny_ids(7, 12)
    whole = collect_stats(model, ids)
    monkeypatch.setattr(profiler, "TOKENS_PER_BATCH", 40)
    progress = []
    parts = collect_stats(model, ids, progress_fn=lambda done, total: progress.append((done, total)))
    assert progress == [(36, 84), (72, 84), (84, 84)]
    assert parts.num_tokens == whole.num_tokens
    for a, b in zip(parts.counts, whole.counts, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(3, np.int32), r"ids: expected integers \[batch, seq\]"),
        (np.zeros((2, 3), np.float32), r"got float32 \(2, 3\)"),
        (np.zeros((2, 0), np.int32), r"at least one"),
        (np.array([[0, 50], [0, 0]]), r"ids: expected 0\.\.49 for tiny, got 0\.\.50"),
        (np.array([[0, -1], [0, 0]]), r"got -1\.\.0"),
        (np.zeros((2, 33), np.int32), r"ids: expected sequences of at most 32 tokens.* got 33"),
    ],
)
@pytest.mark.parametrize("fn", [collect_stats, train_predictors])
def test_bad_ids_are_refused(fn, ids, message):
    with pytest.raises(ValueError, match=message):
        fn(tiny_decoder(), ids)


@pytest.mark.parametrize("fn", [collect_stats, train_predictors])
def test_model_without_zeros_is_refused(fn):
    with pytest.raises(ValueError, match=r"tiny has the activation 'silu'.*nothing to profile"):
        fn(tiny_decoder(activation="silu"), tiny_ids(2, 4))


def test_hot_share_by_hand():
    counts = np.array([1, 50, 9, 0, 30, 10])  # 50 + 30 of 100 make 80 %
    assert hot_share(counts) == 2 / 6
    assert hot_share(counts, 0.81) == 3 / 6
    assert hot_share(counts, 1.0) == 5 / 6
    assert hot_share(counts, 0.5) == 1 / 6
    assert hot_share(np.ones(10, np.int64)) == 0.8
    assert hot_share(np.zeros(4, np.int64)) == 0.0
    assert hot_share(np.array([7])) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_hot_share_is_the_smallest(seed):
    counts = np.random.default_rng(seed).zipf(1.5, 50)
    for share in (0.3, 0.8, 0.99):
        sums = [np.sort(counts)[-n:].sum() for n in range(1, 51)]
        assert (
            hot_share(counts, share) == (np.flatnonzero(np.array(sums) / counts.sum() >= share)[0] + 1) / 50
        )
