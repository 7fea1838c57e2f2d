"""What both executors share: the checks, the modes' FFNs, and the caches."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pjax.attention import KvCache
from pjax.base import MODES, DecodeState, FfnCounts, FfnFn, Mode, Predictors
from pjax.layers import dense_ffn_fn, exact_ffn_fn, predicted_ffn_fn
from pjax.model_config import ModelConfig


def check_mode(mode: str, config: ModelConfig, predictors: Predictors | None) -> None:
    """Raises ValueError if the model cannot run in this mode."""
    if mode not in MODES:
        raise ValueError(f'mode: expected "dense", "exact" or "predicted", got {mode!r}')
    if mode != "dense" and not config.is_sparse:
        raise ValueError(
            f"mode: {config.name} has the activation {config.activation!r}, which is never exactly zero, "
            f'so no neuron can be skipped; mode {mode!r} needs a ReLU-like activation, use mode="dense"'
        )
    if mode == "predicted" and predictors is None:
        raise ValueError('mode: "predicted" needs trained predictors; prepare a workdir, or use mode="exact"')


def mode_ffn_fn(mode: Mode, predictors: Predictors | None) -> FfnFn:
    """The `ffn_fn` of a mode."""
    if mode == "predicted":
        if predictors is None:
            raise ValueError('predictors: mode "predicted" needs them, got None')
        return predicted_ffn_fn(predictors)
    return exact_ffn_fn if mode == "exact" else dense_ffn_fn


def count_rows(aux: list[FfnCounts | None]) -> jax.Array:
    """float32 [3]: what the layers' counts sum to over layers and batch."""
    counts = [jnp.stack([part.sum() for part in layer]) for layer in aux if layer is not None]
    return sum(counts, jnp.zeros(3, jnp.int32)).astype(jnp.float32)


def empty_cache(config: ModelConfig, dtype: jnp.dtype, slots: int, capacity: int, device=None) -> KvCache:
    """A cache of zeros."""
    shape = (slots, config.kv_heads, capacity, config.head_dim)
    return KvCache(*(jnp.zeros(shape, dtype, device=device) for _ in range(2)))


@partial(jax.jit, static_argnames="capacity")
def grow(caches: Any, capacity: int) -> Any:
    """The caches with room for `capacity` tokens."""

    def pad(cache: jax.Array) -> jax.Array:
        return jnp.pad(cache, ((0, 0), (0, 0), (0, capacity - cache.shape[2]), (0, 0)))

    return jax.tree.map(pad, caches)


def reserve(state: DecodeState, capacity: int) -> DecodeState:
    """The state with caches of at least `capacity` tokens; the same state if they are."""
    if jax.tree.leaves(state.caches)[0].shape[2] >= capacity:
        return state
    return state._replace(caches=grow(state.caches, capacity))


def last_rows(residual: jax.Array, lengths: jax.Array) -> jax.Array:
    """[batch, 1, model]: each sequence's residual at its last token."""
    return jnp.take_along_axis(residual, (lengths - 1)[:, None, None], axis=1)
