"""The whole token step as one jitted XLA program on one device."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pjax.base import AnyArray, DecodeState, FfnFn, Mode, Predictors, SampleFn
from pjax.executor.common import check_mode, count_rows, empty_cache, last_rows, mode_ffn_fn, reserve
from pjax.model import Decoder, prompt_positions


class OneProgram:
    """The whole token step as one XLA program on one device.

    Args:
        model: the decoder.
        mode: which neurons generated tokens compute; prompt tokens always compute all of them.
        predictors: for mode "predicted".
        device: where to run; None is JAX's default.

    Raises:
        ValueError: if the model cannot run in this mode.
    """

    kind = "one program"
    syncs_per_layer = 0

    def __init__(
        self, model: Decoder, *, mode: Mode = "dense", predictors: Predictors | None = None, device=None
    ):
        check_mode(mode, model.config, predictors)
        self.config = config = model.config
        self.mode: Mode = mode
        device = jax.local_devices()[0] if device is None else device
        self.devices = (device,)
        layers = predictors.layers if mode == "predicted" and predictors else ()
        graphdef, state = nnx.split(model)
        # Flat leaves: unflattening the module in Python would cost more than the step's dispatch.
        leaves, tree = jax.tree.flatten((state, layers))
        self._leaves = jax.device_put(leaves, self.devices[0])

        def merge(leaves: list[jax.Array]) -> tuple[Decoder, FfnFn]:
            state, layers = jax.tree.unflatten(tree, leaves)
            return nnx.merge(graphdef, state), mode_ffn_fn(mode, Predictors(layers, ()))

        def prefill(leaves, ids, lengths, sampler, *, capacity: int, sample_fn: SampleFn) -> DecodeState:
            model, _ = merge(leaves)
            cache = empty_cache(model.config, model.cache_dtype, config.layers * len(ids), capacity)
            residual, cache, _ = model.run(ids, prompt_positions(ids), cache)
            logits = model.logits(last_rows(residual, lengths))
            new_ids, sampler = sample_fn(logits[:, 0], sampler)
            return DecodeState(cache, lengths, new_ids, sampler, jnp.zeros(3))

        def step(leaves, state: DecodeState, *, sample_fn: SampleFn) -> DecodeState:
            model, ffn_fn = merge(leaves)
            positions = state.lengths[:, None]
            residual, cache, aux = model.run(state.ids[:, None], positions, state.caches, ffn_fn)
            new_ids, sampler = sample_fn(model.logits(residual)[:, 0], state.sampler)
            return DecodeState(cache, state.lengths + 1, new_ids, sampler, state.rows + count_rows(aux))

        self._prefill = jax.jit(prefill, static_argnames=("capacity", "sample_fn"))
        self._step = jax.jit(step, static_argnames="sample_fn", donate_argnames="state")

    def prefill(
        self, ids: AnyArray, lengths: AnyArray, *, capacity: int, sample_fn: SampleFn, sampler: Any
    ) -> DecodeState:
        """See `base.Executor`."""
        ids, lengths, sampler = jax.device_put((ids, lengths, sampler), self.devices[0])
        return self._prefill(self._leaves, ids, lengths, sampler, capacity=capacity, sample_fn=sample_fn)

    def step(self, state: DecodeState, *, sample_fn: SampleFn) -> DecodeState:
        """See `base.Executor`."""
        return self._step(self._leaves, state, sample_fn=sample_fn)

    def reserve(self, state: DecodeState, capacity: int) -> DecodeState:
        """See `base.Executor`."""
        return reserve(state, capacity)
