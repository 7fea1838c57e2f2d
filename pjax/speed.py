"""Measures how fast each mode decodes on this machine, and where the time and the bytes go."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax import ops
from pjax.base import DecodeState, Executor, FfnCounts, Predictors
from pjax.model import Decoder, prompt_positions
from pjax.predictor import predict_mask
from pjax.sampling import greedy

ROUNDS = 5
"""Of all modes in turn, of which the median counts: machines are shared, and a slow second must not fall
on one mode alone."""

TOKENS_PER_ROUND = 48
"""Enough that the clock and the first token's cold caches are below 1 %."""


WARM_UP_TOKENS = 4
"""Decoded before each round, so that no mode finds the caches as another left them."""


class Speed(NamedTuple):
    """Of the modes of one model.

    Attributes:
        tokens_per_s: decoded tokens a second, batch 1, for each mode.
        prefill_tokens_per_s: prompt tokens a second.
        first_token_s: from the call to the first token of the prompt, everything compiled.
        rows: per mode and token, neurons predicted, computed and active, summed over the layers; zeros
            for "dense", which counts none.
        prompt_tokens: length of the prompt.
    """

    tokens_per_s: dict[str, float]
    prefill_tokens_per_s: float
    first_token_s: float
    rows: dict[str, tuple[float, float, float]]
    prompt_tokens: int


def _prefill(executor: Executor, prompt: np.ndarray) -> DecodeState:
    ids, lengths = jnp.asarray(prompt), jnp.asarray([prompt.shape[1]], jnp.int32)
    state = executor.prefill(ids, lengths, capacity=512, sample_fn=greedy, sampler=None)
    np.asarray(state.ids)
    return state


def _decode(executor: Executor, state: DecodeState, tokens: int) -> DecodeState:
    """Decodes as a user's loop does: each token is read by the host before the next begins."""
    for _ in range(tokens):
        state = executor.step(state, sample_fn=greedy)
        np.asarray(state.ids)
    return state


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_speed(executors: Mapping[str, Executor], prompt_ids: np.ndarray) -> Speed:
    """Decodes the same prompt in every mode, in turn.

    Args:
        executors: one a mode.
        prompt_ids: int [seq]; no more than half of the context is used.
    """
    context = next(iter(executors.values())).config.context
    prompt = np.asarray(prompt_ids, np.int32)[None, : max(1, context // 2)]
    tokens = max(1, min(TOKENS_PER_ROUND, context - prompt.shape[1] - WARM_UP_TOKENS))
    times: dict[str, list[float]] = {mode: [] for mode in executors}
    rows: dict[str, tuple[float, float, float]] = {}
    for executor in executors.values():
        _decode(executor, _prefill(executor, prompt), 2)  # compiles
    prefill = [
        _seconds(partial(_prefill, executor, prompt)) for executor in executors.values() for _ in range(3)
    ]
    for _ in range(ROUNDS):
        for mode, executor in executors.items():
            state = _decode(executor, _prefill(executor, prompt), WARM_UP_TOKENS)
            start = time.perf_counter()
            state = _decode(executor, state, tokens)
            times[mode].append((time.perf_counter() - start) / tokens)
            predicted, computed, active = (
                float(n) for n in np.asarray(state.rows) / (tokens + WARM_UP_TOKENS)
            )
            rows[mode] = (predicted, computed, active)
    first_token_s = float(np.median(prefill))
    return Speed(
        tokens_per_s={mode: 1 / float(np.median(samples)) for mode, samples in times.items()},
        prefill_tokens_per_s=prompt.shape[1] / first_token_s,
        first_token_s=first_token_s,
        rows=rows,
        prompt_tokens=prompt.shape[1],
    )


class FfnTimes(NamedTuple):
    """Seconds a token, over all layers.

    Attributes:
        predictor_s: of the predictors.
        ffn_s: of the FFN within the predicted mask.
    """

    predictor_s: float
    ffn_s: float


def measure_ffn(model: Decoder, predictors: Predictors, prompt_ids: np.ndarray) -> FfnTimes:
    """Times the predictors and the predicted FFNs alone, on the inputs that the prompt gives them.

    Args:
        model: the decoder.
        predictors: its predictors.
        prompt_ids: int [seq].
    """
    ids = jnp.asarray(prompt_ids, jnp.int32)[None, :]
    graphdef, state = nnx.split(model)
    layers = jax.device_put(predictors.layers)  # numpy from the workdir would be copied at each call

    def record_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return layer.ffn.dense(x), (x, residual)

    @jax.jit
    def inputs_of(state):
        return nnx.merge(graphdef, state).run(ids, prompt_positions(ids), ffn_fn=record_fn)[2]

    @jax.jit
    def predict(layers, inputs):
        return [
            None if p is None else predict_mask(p, x[0], residual[0])
            for p, (x, residual) in zip(layers, inputs, strict=True)
        ]

    @jax.jit
    def run_ffn(ffns, masks, inputs) -> list[tuple[jax.Array, FfnCounts]]:
        return [
            ops.sparse_ffn_counted(x[0], ffn, mask, activation=model.config.activation)
            for ffn, mask, (x, _) in zip(ffns, masks, inputs, strict=True)
        ]

    inputs = inputs_of(state)
    last = [(x[:, -1:], residual[:, -1:]) for x, residual in inputs]
    ffns = [layer.ffn.weights for layer in model.layers]
    masks = jax.block_until_ready(predict(layers, last))
    jax.block_until_ready(run_ffn(ffns, masks, last))
    predictor = [_seconds(lambda: jax.block_until_ready(predict(layers, last))) for _ in range(50)]
    ffn = [_seconds(lambda: jax.block_until_ready(run_ffn(ffns, masks, last))) for _ in range(50)]
    return FfnTimes(float(np.median(predictor)), float(np.median(ffn)))


def bytes_per_token(
    model: Decoder, rows: tuple[float, float, float], predictors: Predictors | None, kv_tokens: int
) -> int:
    """Bytes of weights, predictors and KV cache that one token reads, in a mode that skips neurons.

    The norms, the FFN's biases and the token's own embedding row, below 0.1 %, are left out.

    Args:
        model: the decoder.
        rows: neurons predicted, computed and active, summed over the layers; the opener (gate, or up
            without a gate) of each predicted neuron is read, the rest of each computed one.
        predictors: None where the mode has none.
        kv_tokens: tokens in the KV cache.
    """
    config = model.config
    row_bytes = model.layers[0].ffn.weights.neuron_bytes // (3 if config.gated else 2)
    head = model.embed if model.head is None else model.head
    modules = [head, *(layer.attention for layer in model.layers)]
    dense = sum(a.nbytes for module in modules for a in jax.tree.leaves(nnx.state(module)))
    dense += 2 * config.layers * config.kv_heads * config.head_dim * kv_tokens * model.cache_dtype.itemsize
    dense += sum(report.bytes for report in predictors.reports) if predictors else 0
    return int(dense + row_bytes * (rows[0] + rows[1] * (2 if config.gated else 1)))
