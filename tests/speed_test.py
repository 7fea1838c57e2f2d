"""What the speed measurement counts, against the profile and by hand; no time is asserted."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax import speed
from pjax.executor import OneProgram
from pjax.profiler import collect_stats
from pjax.speed import bytes_per_token, measure_ffn, measure_speed
from tests.tiny_model import ALL, NONE, tiny_decoder, tiny_ids, tiny_predictors


def greedy_ids(model, prompt: np.ndarray, num_tokens: int) -> np.ndarray:
    """The prompt continued by the best tokens, the whole text computed for each; [1, seq]."""
    total = len(prompt) + num_tokens
    logits_fn = nnx.jit(lambda model, ids: model(ids))
    ids = np.zeros((1, total), np.int32)
    ids[0, : len(prompt)] = prompt
    for i in range(len(prompt), total):
        ids[0, i] = np.asarray(logits_fn(model, jnp.asarray(ids)))[0, i - 1].argmax()
    return ids


def test_rows_are_those_of_the_decoded_tokens(monkeypatch):
    monkeypatch.setattr(speed, "ROUNDS", 2)
    monkeypatch.setattr(speed, "TOKENS_PER_ROUND", 6)
    model, prompt = tiny_decoder(neurons=(64,)), tiny_ids(1, 8)[0]
    # A fresh profile of the ten decoded tokens: that of the whole text less that of the prompt.
    ids = greedy_ids(model, prompt, 10)
    whole, start = (
        sum(int(c.sum()) for c in collect_stats(model, part).counts) for part in (ids, ids[:, :8])
    )
    executors = {
        "dense": OneProgram(model),
        "exact": OneProgram(model, mode="exact"),
        "predicted": OneProgram(model, mode="predicted", predictors=tiny_predictors(model, NONE)),
    }
    found = measure_speed(executors, prompt)
    assert found.rows["dense"] == (0, 0, 0)
    assert found.rows["predicted"] == (0, 0, 0)  # the mask is all false
    predicted, computed, active = found.rows["exact"]
    assert predicted == 64
    assert active == pytest.approx((whole - start) / 10)
    assert active <= computed < predicted
    assert found.prompt_tokens == 8
    assert set(found.tokens_per_s) == set(executors)
    assert all(np.isfinite(rate) and rate > 0 for rate in found.tokens_per_s.values())
    assert found.prefill_tokens_per_s == pytest.approx(8 / found.first_token_s)


def test_measure_ffn_runs_and_gives_seconds():
    model = tiny_decoder()
    times = measure_ffn(model, tiny_predictors(model, ALL), tiny_ids(1, 8)[0])
    assert all(np.isfinite(value) and value > 0 for value in times)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_per_token_by_hand(dtype, gated, tied):
    model = tiny_decoder(gated=gated, tied=tied)
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        if variable[...].ndim == 2:
            variable.set_value(variable[...].astype(dtype))
    size = jnp.dtype(dtype).itemsize
    attention = (16 * 16 + 2 * 8 * 16 + 16 * 16) * size  # q, k and v of two heads, o
    head = 50 * 16 * size
    cache = 2 * 2 * 4 * 10 * size  # k and v, two heads of four, ten tokens
    whole = 2 * (attention + cache) + head
    rows = 16 * size * (30 + 12 * (2 if gated else 1))  # 30 gates (or ups) read, 12 of them open
    assert bytes_per_token(model, (30.0, 12.0, 11.0), None, 10) == whole + rows
    predictors = tiny_predictors(model, 0.0)
    assert bytes_per_token(model, (30.0, 12.0, 11.0), predictors, 10) == whole + rows + 201
    assert bytes_per_token(model, (0.0, 0.0, 0.0), None, 0) == 2 * attention + head


def test_bytes_per_token_grows_with_the_cache():
    model = tiny_decoder()
    ten, twenty = (bytes_per_token(model, (1.0, 1.0, 1.0), None, tokens) for tokens in (10, 20))
    assert twenty - ten == 2 * 2 * 2 * 4 * 10 * 4
