"""Perplexity and divergence against numpy on logits that are computed another way."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax import quality
from pjax.model import Decoder
from pjax.predictor import predict_mask
from pjax.quality import (
    Quality,
    WayQuality,
    chunks,
    guard_faults,
    measure_layer_errors,
    measure_quality,
    mode_ways,
    worst_layers,
)
from tests.tiny_model import ALL, NONE, ffn_inputs, ffn_values, tiny_decoder, tiny_ids, tiny_predictors

ROWS = chunks(tiny_ids(1, 100)[0], 16, 1)
"""Six chunks of 16 tokens."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def scored(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log-probabilities [chunks * 8, vocab], log-likelihoods [chunks * 8]) of each chunk's second half."""
    log_probs = log_softmax(logits)[:, 7:15].reshape(-1, 50)
    return log_probs, log_probs[np.arange(len(log_probs)), ROWS[:, 8:].reshape(-1)]


def jitted(model: Decoder, ffn_fn=None) -> np.ndarray:
    """The logits of ROWS."""
    return np.asarray(nnx.jit(lambda m, ids: m(ids) if ffn_fn is None else m(ids, ffn_fn))(model, ROWS))


def measured(model: Decoder, modes, predictors=None, **options) -> Quality:
    return measure_quality(model, ROWS, mode_ways(model, modes, predictors), **options)


def masked_ffn_fn(predictors, *, per_token: bool):
    """The FFN with every value computed, and those outside of the predictor's mask set to zero."""

    def ffn_fn(layer, x, residual):
        mask = predict_mask(predictors.layers[layer.index], x, residual)
        mask = mask if per_token else jnp.broadcast_to(mask.any((0, 1), keepdims=True), mask.shape)
        ffn = layer.ffn.weights
        values = jnp.maximum(jnp.einsum("bsm,nm->bsn", x, ffn.gate), 0) * jnp.einsum("bsm,nm->bsn", x, ffn.up)
        return jnp.einsum("bsn,nm->bsm", values * mask, ffn.down), None

    return ffn_fn


def test_chunks_do_not_overlap_and_begin_with_bos():
    ids = np.arange(100) % 50
    rows = chunks(ids, 16, 1)
    assert rows.shape == (6, 16)
    assert rows.dtype == np.int32
    expected = ids[:96].reshape(6, 16).copy()
    expected[:, 0] = 1
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(ids, np.arange(100) % 50)  # the caller's ids stay
    np.testing.assert_array_equal(chunks(ids, 16, None), ids[:96].reshape(6, 16))
    np.testing.assert_array_equal(chunks(list(ids), 16, None), ids[:96].reshape(6, 16))


def test_chunks_are_at_most_512_tokens():
    assert chunks(np.zeros(1100, int), 4096, None).shape == (2, 512)
    assert chunks(np.zeros(512, int), 512, 1).shape == (1, 512)


@pytest.mark.parametrize(("tokens", "context"), [(15, 16), (0, 16), (511, 4096)])
def test_short_text_is_refused(tokens, context):
    wanted = min(512, context)
    with pytest.raises(
        ValueError, match=f"text: perplexity needs at least one chunk of {wanted} tokens, got {tokens}"
    ):
        chunks(np.zeros(tokens, int), context, 1)


def test_dense_perplexity_is_that_of_the_logits(model, monkeypatch):
    monkeypatch.setattr(quality, "BATCH_TOKENS", 40)
    progress, so_far = [], []
    found = measured(
        model, ("dense",), progress_fn=lambda *args: progress.append(args), report_fn=so_far.append
    )
    _, likelihoods = scored(jitted(model))
    assert found.tokens == len(likelihoods) == 48
    assert list(found.modes) == ["dense"]
    dense = found.modes["dense"]
    assert dense.perplexity == pytest.approx(math.exp(-likelihoods.mean()), rel=1e-5)
    # The relative error of exp(m) is the error of m.
    error = math.exp(-likelihoods.mean()) * likelihoods.std() / math.sqrt(48)
    assert dense.error == pytest.approx(error, rel=1e-4)
    assert dense[2:] == (0.0, 0.0, 0.0, 1.0)
    assert progress == [(2, 6), (4, 6), (6, 6)]
    assert so_far[-1] == found
    assert [q.tokens for q in so_far] == [16, 32, 48]


def test_exact_is_dense_and_an_all_true_mask_is_exact(model):
    predictors = tiny_predictors(model, ALL)
    found = measured(model, ("dense", "exact", "predicted"), predictors).modes
    assert found["exact"].perplexity == pytest.approx(found["dense"].perplexity, rel=1e-5)
    assert found["predicted"] == found["exact"]  # bitwise
    assert found["predicted"].top1_agreement == 1.0
    assert abs(found["predicted"].kl_mean) < 1e-6 and abs(found["exact"].rise) < 1e-5
    ways = mode_ways(model, ("dense", "exact", "predicted"), predictors)
    errors = measure_layer_errors(model, ROWS, ways)
    assert errors["exact"] == errors["predicted"] and max(errors["exact"]) < 1e-6


def test_an_all_false_mask_takes_the_ffn_away(model):
    found = measured(model, ("dense", "predicted"), tiny_predictors(model, NONE)).modes
    without = nnx.clone(model)
    for layer in without.layers:
        layer.ffn.down.set_value(jnp.zeros_like(layer.ffn.down[...]))
    _, likelihoods = scored(jitted(without))
    assert found["predicted"].perplexity == pytest.approx(math.exp(-likelihoods.mean()), rel=1e-5)
    assert abs(found["predicted"].perplexity / found["dense"].perplexity - 1) > 0.05


def test_masks_are_per_token_and_divergence_is_numpys(model):
    predictors = tiny_predictors(model, 1.0)
    found = measured(model, ("dense", "predicted"), predictors).modes["predicted"]
    masked, likelihoods = scored(jitted(model, masked_ffn_fn(predictors, per_token=True)))
    _, of_union = scored(jitted(model, masked_ffn_fn(predictors, per_token=False)))
    assert found.perplexity == pytest.approx(math.exp(-likelihoods.mean()), rel=1e-5)
    assert abs(math.exp(likelihoods.mean() - of_union.mean()) - 1) > 0.01
    dense, of_dense = scored(jitted(model))
    lost = of_dense - likelihoods
    assert found.rise == pytest.approx(math.exp(lost.mean()) - 1, rel=1e-3)
    assert found.rise_error == pytest.approx(math.exp(lost.mean()) * lost.std() / math.sqrt(48), rel=1e-3)
    assert found.kl_mean == pytest.approx((np.exp(dense) * (dense - masked)).sum(-1).mean(), rel=1e-4)
    agreement = (dense.argmax(-1) == masked.argmax(-1)).mean()
    assert found.top1_agreement == pytest.approx(agreement)
    assert 0 < agreement < 1


def test_numpy_and_the_model_agree_on_the_first_ffn(model):
    """So that the reference of the masked runs above is the FFN itself."""
    x = ffn_inputs(model, ROWS)[0]
    values, _ = ffn_values(model.layers[0], x)
    y = values @ np.asarray(model.layers[0].ffn.down[...], np.float64)
    np.testing.assert_allclose(model.layers[0].ffn.dense(jnp.asarray(x, jnp.float32)), y, atol=1e-5)


def test_layer_errors_are_numpys_on_the_inputs_of_the_dense_model(model):
    predictors = tiny_predictors(model, 1.0)
    found = measure_layer_errors(model, ROWS, mode_ways(model, ("dense", "predicted"), predictors))
    assert list(found) == ["predicted"]
    expected = []
    for layer, predictor, x in zip(model.layers, predictors.layers, ffn_inputs(model, ROWS), strict=True):
        x = x[:, 8:]  # the second halves of the chunks
        mask = np.asarray(predict_mask(predictor, jnp.asarray(x, jnp.float32), jnp.zeros(x.shape)))
        values, _ = ffn_values(layer, x)
        down = np.asarray(layer.ffn.down[...], np.float64)
        expected.append(np.linalg.norm((values * ~mask) @ down) / np.linalg.norm(values @ down))
    assert min(expected) > 0.1
    np.testing.assert_allclose(found["predicted"], expected, rtol=1e-4)


def test_a_layer_that_gives_nothing_has_no_error(model):
    silent = nnx.clone(model)
    silent.layers[0].ffn.down.set_value(jnp.zeros_like(silent.layers[0].ffn.down[...]))
    ways = mode_ways(silent, ("dense", "predicted"), tiny_predictors(silent, NONE))
    assert measure_layer_errors(silent, ROWS, ways)["predicted"] == [0.0, pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("rise", "kl", "words"),
    [
        (0.02, 0.02, []),
        (-0.5, 0.0, []),
        (0.021, 0.0, ["2.1% above that of dense, more than 2.0%"]),
        (0.0, 0.03, ["0.03 nats, more than 0.02"]),
        (0.5, 0.3, ["quality.max_perplexity_rise", "quality.max_kl"]),
        (math.nan, math.nan, ["nan", "nan"]),
    ],
)
def test_guard(rise, kl, words):
    way = WayQuality(10.0, 1.0, rise, 0.0, kl, 0.9)
    quality = Quality({"dense": way._replace(rise=0.0, kl_mean=0.0), "predicted": way}, 8)
    faults = guard_faults(quality, max_perplexity_rise=0.02, max_kl=0.02)
    assert len(faults) == len(words)
    assert all(word in fault for word, fault in zip(words, faults, strict=True))


def test_worst_layers():
    assert worst_layers([0.1, 0.4, 0.0, 0.2, 0.3]) == [1, 4, 3]
    assert worst_layers([0.0, 0.2]) == [1]


@pytest.mark.parametrize(
    ("modes", "message"),
    [(("dense", "predicted"), '"predicted" needs trained predictors'), (("fast",), 'mode: expected "dense"')],
)
def test_modes_that_cannot_run(model, modes, message):
    with pytest.raises(ValueError, match=message):
        mode_ways(model, modes)


def test_only_dense_where_nothing_is_zero():
    model = tiny_decoder(activation="silu")
    with pytest.raises(ValueError, match="'silu', which is never exactly zero"):
        mode_ways(model, ("dense", "exact"))
    assert measured(model, ("dense",)).modes["dense"].perplexity > 1


def test_ids_that_do_not_fit(model):
    with pytest.raises(ValueError, match=r"ids: expected 0\.\.49"):
        measure_quality(model, ROWS + 10, mode_ways(model, ("dense",)))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_senseless_logits_are_refused(model, value):
    broken = nnx.clone(model)
    broken.head.weight.set_value(broken.head.weight[...] * value)
    with pytest.raises(ValueError, match=r"perplexity: mode 'dense' gives log-likelihoods of .* a token"):
        measured(broken, ("dense",))
