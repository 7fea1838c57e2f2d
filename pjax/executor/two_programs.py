"""The decoder split over a device and a host: two programs a layer, running at the same time."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax import ops
from pjax.base import AnyArray, DecodeState, Ffn, LowRankPredictor, Mode, Predictors, SampleFn
from pjax.executor.common import check_mode, count_rows, empty_caches, last_rows, reserve
from pjax.model import Decoder, KvCache, prompt_positions
from pjax.predictor import predict_mask
from pjax.split import pack_mask, split_ffn, unpack_mask

ASYNC_FLOPS = 1024
"""XLA:CPU runs a program of fewer than 1000 counted operations inside the Python call that starts it, and
does not count custom calls: so many are added to the cold program, else the two halves never overlap."""


class Joined(NamedTuple):
    """What the two halves of a layer's FFN add to the residual stream, both on the device."""

    hot: jax.Array
    cold: jax.Array


@partial(jax.jit, static_argnames="graphdef")
def embed_program(graphdef, state, ids: jax.Array, positions: jax.Array) -> jax.Array:
    """On the device: ids and positions [batch, seq] -> residual."""
    return nnx.merge(graphdef, state).embed_ids(ids, positions)


@partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def attend_program(
    graphdef,
    state,
    predictor: LowRankPredictor | None,
    residual: jax.Array,
    joined: Joined | None,
    positions: jax.Array,
    cache: KvCache,
):
    """On the device: joins the layer before, attends, and predicts.

    Returns:
        (x, residual, cache, hot_mask or None, packed cold mask or None)
    """
    layer = nnx.merge(graphdef, state)
    if joined is not None:
        residual = residual + joined.hot + joined.cold
    x, residual, cache = layer.attend(residual, positions, cache)
    if predictor is None:
        return x, residual, cache, None, None
    mask = predict_mask(predictor, x, residual)
    hot = layer.ffn.weights.neurons
    return x, residual, cache, mask[..., :hot], pack_mask(mask[..., hot:])


@partial(jax.jit, static_argnames=("graphdef", "mode"))
def hot_program(graphdef, state, x: jax.Array, hot_mask: jax.Array | None, *, mode: Mode):
    """On the device: the hot neurons' share of the FFN, and the down bias."""
    ffn = nnx.merge(graphdef, state).ffn
    return (ffn.dense(x), None) if mode == "dense" else ffn.counted(x, hot_mask)


@partial(jax.jit, static_argnames=("mode", "activation"))
def cold_program(cold: Ffn, x: jax.Array, cold_bits: jax.Array | None, *, mode: Mode, activation: str):
    """On the host: the cold neurons' share of the FFN."""
    # The flops that make the dispatch asynchronous; returned, as XLA would drop them otherwise.
    ballast = jnp.sin(jnp.arange(ASYNC_FLOPS, dtype=jnp.float32) * x.reshape(-1)[:1]).sum()
    if mode == "dense":
        return ops.dense_ffn(x, cold, activation=activation), None, ballast
    batch, seq, model = x.shape
    mask = (
        None if cold_bits is None else unpack_mask(cold_bits, cold.neurons).reshape(batch * seq, cold.neurons)
    )
    y, counts = ops.sparse_ffn_counted(x.reshape(-1, model), cold, mask, activation=activation)
    return y.reshape(x.shape), counts, ballast


@partial(jax.jit, static_argnames=("graphdef", "sample_fn"))
def sample_program(graphdef, state, residual, joined: Joined, lengths, sampler, *, sample_fn: SampleFn):
    """On the device: joins the last layer and samples after each sequence's last token."""
    residual = residual + joined.hot + joined.cold
    if residual.shape[1] > 1:
        residual = last_rows(residual, lengths)
    return sample_fn(nnx.merge(graphdef, state).logits(residual)[:, 0], sampler)


sum_rows = jax.jit(lambda rows, aux: rows + count_rows(aux))
"""Adds the layers' counts to the running sum."""


class SplitLayer(NamedTuple):
    """One layer, split: its device part as (graphdef, state), its cold neurons, and its predictor."""

    graphdef: Any
    state: Any
    cold: Ffn
    predictor: LowRankPredictor | None


class LayerArrays(NamedTuple):
    """What one layer of a step read and made, for those who watch it."""

    x: jax.Array
    hot: jax.Array
    cold: jax.Array
    hot_mask: jax.Array | None
    x_host: jax.Array
    cold_bits: jax.Array | None


class TwoPrograms:
    """A hot program on the device and a cold one on the host per layer, running at the same time.

    `y = hot(x) + cold(x) + down_bias`: x and the packed mask of the cold neurons go to the host,
    y [batch, seq, model] comes back, once a layer; the device adds.

    Args:
        model: the decoder, whole.
        hot_mask: bool [neurons] per layer, the placement.
        mode: which neurons generated tokens compute; prompt tokens always compute all of them.
        predictors: for mode "predicted".
        device: gets the hot neurons and all that is not FFN.
        host: gets the cold neurons.

    Raises:
        ValueError: if the model cannot run in this mode or the masks do not fit it.
    """

    kind = "two programs"
    syncs_per_layer = 1

    def __init__(
        self,
        model: Decoder,
        hot_mask: tuple[np.ndarray, ...],
        *,
        mode: Mode = "dense",
        predictors: Predictors | None = None,
        device,
        host,
    ):
        check_mode(mode, model.config, predictors)
        widths = tuple(len(mask) for mask in hot_mask)
        if widths != model.config.neurons:
            raise ValueError(f"hot_mask: expected one mask a layer of {model.config.neurons}, got {widths}")
        self.config, self.device, self.host = model.config, device, host
        self.mode: Mode = mode
        self.devices = (device, host)
        self._cache_dtype = model.cache_dtype
        model = nnx.clone(model)
        self._layers = [
            self._split(layer, mask, predictors.layers[i] if mode == "predicted" and predictors else None)
            for i, (layer, mask) in enumerate(zip(model.layers, hot_mask, strict=True))
        ]
        model.layers = nnx.List([])
        self._graphdef, state = nnx.split(model)
        self._state = jax.device_put(state, device)

    def _split(self, layer, hot_mask: np.ndarray, predictor: LowRankPredictor | None) -> SplitLayer:
        split = split_ffn(layer.ffn.weights, hot_mask)
        layer.ffn.set_weights(split.hot)
        layer.index = 0  # so that layers of one shape share their programs
        graphdef, state = nnx.split(layer)
        if predictor is not None:
            order = jnp.concatenate([split.hot_ids, split.cold_ids])
            predictor = LowRankPredictor(
                predictor.first,
                predictor.second[order],
                predictor.bias[order],
                predictor.threshold,
                predictor.input,
            )
        state, predictor = jax.device_put((state, predictor), self.device)
        return SplitLayer(graphdef, state, jax.device_put(split.cold, self.host), predictor)

    def _attend(self, layer: SplitLayer, residual, joined, positions, cache, mode: Mode):
        predictor = layer.predictor if mode == "predicted" else None
        return attend_program(layer.graphdef, layer.state, predictor, residual, joined, positions, cache)

    def _hot(self, layer: SplitLayer, x, hot_mask, mode: Mode):
        return hot_program(layer.graphdef, layer.state, x, hot_mask, mode=mode)

    def _cold(self, layer: SplitLayer, x, cold_bits, mode: Mode):
        return cold_program(layer.cold, x, cold_bits, mode=mode, activation=self.config.activation)[:2]

    def _run(self, ids, positions, caches, mode: Mode, events: list | None = None):
        """All layers: (residual, last Joined, caches, counts), and each layer's arrays in `events`."""
        residual = embed_program(self._graphdef, self._state, ids, positions)
        joined, new_caches, aux = None, [], []
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual, cache, hot_mask, cold_bits = self._attend(
                layer, residual, joined, positions, cache, mode
            )
            # The host first: its program starts while the device's is still being dispatched.
            x_host, bits_host = jax.device_put((x, cold_bits), self.host)
            cold, cold_counts = self._cold(layer, x_host, bits_host, mode)
            hot, hot_counts = self._hot(layer, x, hot_mask, mode)
            if events is not None:
                events.append(LayerArrays(x, hot, cold, hot_mask, x_host, bits_host))
            cold, cold_counts = jax.device_put((cold, cold_counts), self.device)
            joined = Joined(hot, cold)
            new_caches.append(cache)
            aux += [hot_counts, cold_counts]
        return residual, joined, tuple(new_caches), aux

    def prefill(
        self, ids: AnyArray, lengths: AnyArray, *, capacity: int, sample_fn: SampleFn, sampler: Any
    ) -> DecodeState:
        """See `base.Executor`."""
        prompts, ends = (jax.device_put(jnp.asarray(array), self.device) for array in (ids, lengths))
        sampler = jax.device_put(sampler, self.device)
        caches = empty_caches(self.config, self._cache_dtype, prompts.shape[0], capacity, self.device)
        residual, joined, caches, _ = self._run(prompts, prompt_positions(prompts), caches, "dense")
        new_ids, sampler = sample_program(
            self._graphdef, self._state, residual, joined, ends, sampler, sample_fn=sample_fn
        )
        return DecodeState(caches, ends, new_ids, sampler, jnp.zeros(3, device=self.device))

    def step(self, state: DecodeState, *, sample_fn: SampleFn) -> DecodeState:
        """See `base.Executor`."""
        residual, joined, caches, aux = self._run(
            state.ids[:, None], state.lengths[:, None], state.caches, self.mode
        )
        new_ids, sampler = sample_program(
            self._graphdef, self._state, residual, joined, state.lengths, state.sampler, sample_fn=sample_fn
        )
        return DecodeState(caches, state.lengths + 1, new_ids, sampler, sum_rows(state.rows, aux))

    def reserve(self, state: DecodeState, capacity: int) -> DecodeState:
        """See `base.Executor`."""
        return reserve(state, capacity)
