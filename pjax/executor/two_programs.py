"""The decoder split over a device and a host: two programs a layer, running at the same time."""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax import ops
from pjax.attention import KvCache
from pjax.base import AnyArray, DecodeState, Mode, Predictor, Predictors, SampleFn
from pjax.executor.common import check_mode, count_rows, empty_cache, last_rows, reserve
from pjax.model import Decoder, join, prompt_positions
from pjax.predictor import predict_mask, take_neurons
from pjax.split import pack_mask, split_ffn, unpack_mask
from pjax.weights import Ffn

ASYNC_FLOPS = 1024
"""XLA:CPU runs a program of fewer than 1000 counted operations inside the Python call that starts it, and
does not count custom calls: so many are added to the cold program, else the two halves never overlap."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleSpec:
    """What makes a module of its flat leaves; compared by identity, which costs a dispatch nothing."""

    graphdef: Any
    tree: Any

    def merge(self, leaves: list[jax.Array]) -> Any:
        """The module."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.tree, leaves))


@functools.cache
def _spec(graphdef, tree) -> ModuleSpec:
    """One spec for all modules of one shape, so that they share their programs."""
    return ModuleSpec(graphdef, tree)


def flatten_module(module: nnx.Module, device: jax.Device) -> tuple[ModuleSpec, list[jax.Array]]:
    """A module as its spec and its leaves on a device.

    Programs take these and not the module's state, whose flattening and hashing in Python takes
    0.6 ms a call.
    """
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return _spec(graphdef, tree), jax.device_put(leaves, device)


class Joined(NamedTuple):
    """What the two halves of a layer's FFN add to the residual stream, both on the device.

    Attributes:
        hot: [batch, seq, model].
        cold: the same; None of a layer without cold neurons.
    """

    hot: jax.Array
    cold: jax.Array | None

    @property
    def total(self) -> jax.Array:
        """The layer's FFN."""
        return self.hot if self.cold is None else self.hot + self.cold


@partial(jax.jit, static_argnames="spec")
def embed_program(spec: ModuleSpec, leaves, ids: jax.Array, lengths: jax.Array | None):
    """On the device: prompts [batch, seq], or ids [batch] after lengths [batch] -> (residual, positions)."""
    ids, positions = (ids, prompt_positions(ids)) if lengths is None else (ids[:, None], lengths[:, None])
    return spec.merge(leaves).embed_ids(ids, positions), positions


@partial(jax.jit, static_argnames="spec", donate_argnames="cache")
def attend_program(
    spec: ModuleSpec,
    leaves,
    predictor: Predictor | None,
    residual: jax.Array,
    joined: Joined | None,
    positions: jax.Array,
    cache: KvCache,
):
    """On the device: joins the layer before, attends, and predicts.

    Returns:
        (x, residual, cache, hot_mask or None, packed cold mask or None)
    """
    layer = spec.merge(leaves)
    if joined is not None:
        residual = join(residual, joined.total, layer.config)
    attended = layer.attend(residual, positions, cache)
    if predictor is None:
        return attended.x, attended.residual, attended.cache, None, None
    mask = predict_mask(predictor, attended.x, attended.source)
    hot = layer.ffn.weights.neurons
    return attended.x, attended.residual, attended.cache, mask[..., :hot], pack_mask(mask[..., hot:])


@partial(jax.jit, static_argnames=("spec", "mode"))
def hot_program(spec: ModuleSpec, leaves, x: jax.Array, hot_mask: jax.Array | None, *, mode: Mode):
    """On the device: the hot neurons' share of the FFN, and the down bias."""
    ffn = spec.merge(leaves).ffn
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


@partial(jax.jit, static_argnames=("spec", "sample_fn"))
def finish_program(
    spec: ModuleSpec, leaves, residual, joined: Joined, lengths, sampler, *, sample_fn: SampleFn
):
    """On the device: joins the last layer and samples after each sequence's last token."""
    decoder = spec.merge(leaves)
    residual = join(residual, joined.total, decoder.config)
    if residual.shape[1] > 1:
        residual = last_rows(residual, lengths)
    return sample_fn(decoder.logits(residual)[:, 0], sampler)


@jax.jit
def count_program(lengths, rows, aux):
    """On the device: one more token each, and the layers' counts added to the running sum."""
    return lengths + 1, rows + count_rows(aux)


class SplitLayer(NamedTuple):
    """One layer, split: its device part as (spec, leaves), its cold neurons, and its predictor."""

    spec: ModuleSpec
    leaves: list[jax.Array]
    cold: Ffn
    predictor: Predictor | None


WatchFn = Callable[[str, Any], None]
"""`watch_fn(name, arrays)`: told of a layer's "input", "host_input", "cold" and "hot" when dispatched."""


def _unwatched(name: str, arrays: Any) -> None:
    del name, arrays


class TwoPrograms:
    """A hot program on the device and a cold one on the host per layer, running at the same time.

    `y = hot(x) + cold(x) + down_bias`: x and the packed mask of the cold neurons go to the host,
    y [batch, seq, model] comes back, once a layer that has cold neurons; the device adds.

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
        self._spec, self._leaves = flatten_module(model, device)

    @property
    def device_bytes(self) -> int:
        """Of all weights on the device, predictors included."""
        own = [(layer.leaves, layer.predictor) for layer in self._layers]
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self._leaves, own)))

    def _split(self, layer, hot_mask: np.ndarray, predictor: Predictor | None) -> SplitLayer:
        split = split_ffn(layer.ffn.weights, hot_mask)
        layer.ffn.set_weights(split.hot)
        layer.index = 0  # so that layers of one shape share their programs
        spec, leaves = flatten_module(layer, self.device)
        if predictor is not None:
            order = jnp.concatenate([split.hot_ids, split.cold_ids])
            predictor = take_neurons(predictor, order)
        cold, predictor = jax.device_put(split.cold, self.host), jax.device_put(predictor, self.device)
        return SplitLayer(spec, leaves, cold, predictor)

    def _attend(self, layer: SplitLayer, residual, joined, positions, cache, mode: Mode):
        predictor = layer.predictor if mode == "predicted" else None
        return attend_program(layer.spec, layer.leaves, predictor, residual, joined, positions, cache)

    def _hot(self, layer: SplitLayer, x, hot_mask, mode: Mode):
        return hot_program(layer.spec, layer.leaves, x, hot_mask, mode=mode)

    def _cold(self, layer: SplitLayer, x, cold_bits, mode: Mode):
        return cold_program(layer.cold, x, cold_bits, mode=mode, activation=self.config.activation)[:2]

    def _run(self, ids, lengths, caches, mode: Mode, watch_fn: WatchFn = _unwatched):
        """All layers, see `embed_program`; returns (residual, last Joined, caches, counts)."""
        residual, positions = embed_program(self._spec, self._leaves, ids, lengths)
        joined, new_caches, aux = None, [], []
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual, cache, hot_mask, cold_bits = self._attend(
                layer, residual, joined, positions, cache, mode
            )
            watch_fn("input", x)
            cold = cold_counts = host_input = None
            if layer.cold.neurons:
                # The host first: its program starts while the device's is still being dispatched.
                host_input = jax.device_put((x, cold_bits), self.host)
                cold, cold_counts = self._cold(layer, *host_input, mode)
            watch_fn("host_input", host_input)
            watch_fn("cold", x if cold is None else cold)
            hot, hot_counts = self._hot(layer, x, hot_mask, mode)
            watch_fn("hot", hot)
            cold, cold_counts = jax.device_put((cold, cold_counts), self.device)
            joined = Joined(hot, cold)
            new_caches.append(cache)
            aux += [hot_counts, cold_counts]
        return residual, joined, tuple(new_caches), aux

    def _empty_caches(self, batch: int, capacity: int) -> tuple[KvCache, ...]:
        """One a layer, as each has a program of its own."""
        shape = self.config, self._cache_dtype, batch, capacity, self.device
        return tuple(empty_cache(*shape) for _ in self._layers)

    def prefill(
        self, ids: AnyArray, lengths: AnyArray, *, capacity: int, sample_fn: SampleFn, sampler: Any
    ) -> DecodeState:
        """See `base.Executor`."""
        prompts, ends = (jax.device_put(jnp.asarray(array), self.device) for array in (ids, lengths))
        sampler = jax.device_put(sampler, self.device)
        caches = self._empty_caches(len(prompts), capacity)
        residual, joined, caches, _ = self._run(prompts, None, caches, "dense")
        new_ids, sampler = finish_program(
            self._spec, self._leaves, residual, joined, ends, sampler, sample_fn=sample_fn
        )
        return DecodeState(caches, ends, new_ids, sampler, jnp.zeros(3, device=self.device))

    def step(self, state: DecodeState, *, sample_fn: SampleFn) -> DecodeState:
        """See `base.Executor`."""
        residual, joined, caches, aux = self._run(state.ids, state.lengths, state.caches, self.mode)
        new_ids, sampler = finish_program(
            self._spec, self._leaves, residual, joined, state.lengths, state.sampler, sample_fn=sample_fn
        )
        lengths, rows = count_program(state.lengths, state.rows, aux)
        return DecodeState(caches, lengths, new_ids, sampler, rows)

    def reserve(self, state: DecodeState, capacity: int) -> DecodeState:
        """See `base.Executor`."""
        return reserve(state, capacity)
