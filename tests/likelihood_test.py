"""Log-likelihoods of continuations against the model's logits, one pair at a time and without padding."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax import likelihood
from pjax.likelihood import score_continuations
from pjax.model import Decoder
from pjax.quality import mode_ways
from tests.tiny_model import ALL, NONE, tiny_decoder, tiny_ids, tiny_predictors

PAIRS = [([1, 5, 9], [7]), ([1], [4, 4, 8]), (list(range(3, 30)), [2, 6]), ([3, 8], []), ([9] * 40, [7, 1])]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder()


def expected(model: Decoder, before, after, ffn_fn=None) -> tuple[float, bool]:
    row = [*before, *after][-33:]
    ids = np.asarray(row[:-1], np.int32)[None]
    logits = np.asarray(model(ids) if ffn_fn is None else model(ids, ffn_fn), np.float64)[0]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    places = np.arange(len(row) - 1)[len(row) - 1 - len(after) :]
    return float(log_probs[places, after].sum()), bool((logits[places].argmax(-1) == after).all())


def test_pairs_of_all_lengths_are_those_of_single_rows(model, monkeypatch):
    monkeypatch.setattr(likelihood, "BATCH_TOKENS", 32)
    progress = []
    found = score_continuations(
        model, PAIRS, mode_ways(model, ("dense",))["dense"], progress_fn=lambda *args: progress.append(args)
    )
    for (before, after), answer in zip(PAIRS, found, strict=True):
        score, is_greedy = expected(model, before, after)
        assert answer.log_likelihood == pytest.approx(score, abs=1e-4)
        assert answer.is_greedy == is_greedy
    assert found[3] == (0.0, True)  # nothing is certain
    assert [done for done, _ in progress] == sorted(done for done, _ in progress) and progress[-1] == (5, 5)


def test_the_greedy_continuation_is_greedy(model):
    ids = list(tiny_ids(1, 6)[0])
    best = int(np.asarray(model(np.asarray([ids], np.int32)))[0, -1].argmax())
    found = score_continuations(
        model, [(ids, [best]), (ids, [best - 1])], mode_ways(model, ("dense",))["dense"]
    )
    assert [answer.is_greedy for answer in found] == [True, False]
    assert found[0].log_likelihood > found[1].log_likelihood


def test_each_mode_runs_its_own_ffn_at_every_position(model):
    def scores(mode, threshold=ALL, of=model):
        ways = mode_ways(of, (mode,), tiny_predictors(of, threshold))
        return np.array([answer.log_likelihood for answer in score_continuations(of, PAIRS, ways[mode])])

    dense = scores("dense")
    np.testing.assert_allclose(scores("exact"), dense, atol=1e-4)
    np.testing.assert_array_equal(scores("predicted", ALL), scores("exact"))
    without = nnx.clone(model)
    for layer in without.layers:
        layer.ffn.down.set_value(jnp.zeros_like(layer.ffn.down[...]))
    np.testing.assert_allclose(scores("predicted", NONE), scores("dense", of=without), atol=1e-4)
    assert np.abs(scores("predicted", NONE) - dense).max() > 0.1


def test_what_cannot_be_scored(model):
    way = mode_ways(model, ("dense",))["dense"]
    with pytest.raises(ValueError, match="pairs: expected at least one token of context"):
        score_continuations(model, [([], [3])], way)
    with pytest.raises(ValueError, match="at most 32 that follow it, got 1 and 33"):
        score_continuations(model, [([1], [3] * 33)], way)
    with pytest.raises(ValueError, match=r"ids: expected 0\.\.49"):
        score_continuations(model, [([1], [50])], way)
    broken = nnx.clone(model)
    broken.head.weight.set_value(broken.head.weight[...] * np.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        score_continuations(broken, [([1], [3])], way)
