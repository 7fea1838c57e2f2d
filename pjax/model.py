"""The one decoder, in Flax NNX, that covers every family by its config."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from pjax import ops
from pjax.attention import KvCache, alibi_slopes, attend_prompt, cache_dtype, rotary_frequencies
from pjax.base import FfnFn
from pjax.layers import PackedRows, SparseFfn, dense_ffn_fn, random_weight
from pjax.model_config import ModelConfig
from pjax.ops.attention_reference import append, rotate, rotation_at
from pjax.weights import Matrix, PackedMatrix


class Linear(nnx.Module):
    """`x @ weight.T + bias`, x [batch, seq, in] to float32 [batch, seq, out]; weight [out, in] of any type.

    Args:
        in_width: numbers in.
        out_width: numbers out.
        bias: whether there is one.
        scale: standard deviation of the initial weights; None for `in_width ** -0.5`.
        rngs: of the initial weights; None leaves them to be set.
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        bias: bool = False,
        scale: float | None = None,
        rngs: nnx.Rngs | None,
    ):
        self.weight: nnx.Variable = random_weight(rngs, (out_width, in_width), scale or in_width**-0.5)
        self.bias = nnx.Param(jnp.zeros(out_width)) if bias else None
        self.width = in_width
        self.format: str | None = None

    @property
    def matrix(self) -> Matrix:
        """The weight [out, in]."""
        weight = self.weight[...]
        return weight if self.format is None else PackedMatrix(weight, self.format, self.width)

    def set_weight(self, matrix: Matrix) -> None:
        """Replaces the weight by one of any type."""
        packed = isinstance(matrix, PackedMatrix)
        self.weight = PackedRows(matrix.rows) if packed else nnx.Param(matrix)
        self.format = matrix.format if packed else None

    def rows(self, ids: jax.Array) -> jax.Array:
        """The weight's rows with these numbers: int32 [...] -> float32 [..., in]."""
        rows = self.matrix[ids.reshape(-1)]
        floats = ops.unpack_matrix(rows) if isinstance(rows, PackedMatrix) else rows.astype(jnp.float32)
        return floats.reshape(*ids.shape, self.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See the class."""
        return project(x, self)[0]


def project(x: jax.Array, *layers: Linear) -> list[jax.Array]:
    """What each of the layers makes of x, in one call of the kernels."""
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    ys = ops.matvecs(x.reshape(-1, x.shape[-1]), [layer.matrix for layer in layers], biases)
    return [y.reshape(*x.shape[:-1], -1) for y in ys]


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, in float32."""

    def __init__(self, config: ModelConfig):
        self.kind, self.eps = config.norm, config.norm_eps
        self.scale = nnx.Param(jnp.ones(config.model)) if config.norm_scale else None
        self.bias = nnx.Param(jnp.zeros(config.model)) if config.norm_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, model] -> float32, the same shape."""
        scale, bias = (None if weight is None else weight[...] for weight in (self.scale, self.bias))
        return ops.norm(x, scale, bias, centered=self.kind == "layer", eps=self.eps)


def check_ids(ids: np.ndarray, config: ModelConfig) -> np.ndarray:
    """int32 [batch, seq] that the model can read, or a ValueError that says what is wrong."""
    ids = np.asarray(ids)
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids: expected integers [batch, seq], at least one, got {ids.dtype} {ids.shape}")
    if ids.min() < 0 or ids.max() >= config.vocab:
        raise ValueError(
            f"ids: expected 0..{config.vocab - 1} for {config.name}, got {ids.min()}..{ids.max()}; "
            "were they made by another model's tokenizer?"
        )
    if ids.shape[1] > config.context:
        raise ValueError(
            f"ids: expected sequences of at most {config.context} tokens, the context of {config.name}, "
            f"got {ids.shape[1]}; cut them"
        )
    return ids.astype(np.int32)


def prompt_positions(ids: jax.Array) -> jax.Array:
    """int32 [batch, seq] counting from 0 in each row of ids [batch, seq]."""
    return jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :], ids.shape)


class Attention(nnx.Module):
    """Multi-head attention with grouped keys and values, and rotary positions where the config says so."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None):
        def linear(in_width: int, out_width: int) -> Linear:
            return Linear(in_width, out_width, bias=config.attention_bias, rngs=rngs)

        self.config = config
        self.q = linear(config.model, config.heads * config.head_dim)
        self.k = linear(config.model, config.kv_heads * config.head_dim)
        self.v = linear(config.model, config.kv_heads * config.head_dim)
        self.o = linear(config.heads * config.head_dim, config.model)

    def __call__(
        self, x: jax.Array, positions: jax.Array, cache: KvCache | None, first_slot: int = 0
    ) -> tuple[jax.Array, KvCache | None]:
        """Attends from x [batch, seq, model] at int32 positions [batch, seq]; returns y and the cache.

        Sequence i is in slot `first_slot + i` of the cache.
        """
        batch, seq, _ = x.shape
        q, k, v = (
            y.reshape(batch, seq, -1, self.config.head_dim) for y in project(x, self.q, self.k, self.v)
        )
        rope, window = self.config.rope, self.config.window
        slopes = jnp.asarray(alibi_slopes(self.config.heads)) if self.config.alibi else None
        frequencies = None if rope is None else jnp.asarray(rotary_frequencies(rope))
        factor = 1.0 if rope is None else rope.attention_factor
        if cache is not None and seq == 1:
            y, *caches = ops.decode_attention(
                *(part[:, 0] for part in (q, k, v)),
                *cache,
                positions[:, 0],
                frequencies=frequencies,
                attention_factor=factor,
                slopes=slopes,
                first_slot=first_slot,
                window=window,
            )
            return self.o(y[:, None]), KvCache(*caches)
        if frequencies is not None:
            rotation = rotation_at(positions, frequencies, factor)
            q, k = (rotate(part, rotation) for part in (q, k))
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if cache is not None:
            cache = KvCache(
                append(cache.k, k, positions, first_slot), append(cache.v, v, positions, first_slot)
            )
        # A text from position 0 on sees only itself.
        y = attend_prompt(q, k, v, positions, window=window, slopes=slopes)
        return self.o(y), cache


class AttendedLayer(NamedTuple):
    """A layer before its FFN.

    Attributes:
        x: [batch, seq, model], the FFN's input.
        source: what x was normed from.
        residual: what the FFN's result is added to.
        cache: the KV cache, or None.
    """

    x: jax.Array
    source: jax.Array
    residual: jax.Array
    cache: KvCache | None


def join(residual: jax.Array, y: jax.Array, config: ModelConfig) -> jax.Array:
    """Adds what attention or FFN gave to the residual stream."""
    return residual + (y if config.residual_scale == 1.0 else y * config.residual_scale)


class DecoderLayer(nnx.Module):
    """Attention and FFN, each behind its norm and added to the residual stream; see `ModelConfig.block`."""

    def __init__(self, config: ModelConfig, index: int, rngs: nnx.Rngs | None):
        self.index = index
        self.config = config
        self.attention_norm = None if config.block == "post_norm" and index == 0 else Norm(config)
        self.attention = Attention(config, rngs)
        self.ffn_norm = Norm(config)
        self.ffn = SparseFfn(
            config.model,
            config.neurons[index],
            activation=config.activation,
            gated=config.gated,
            bias=config.mlp_bias,
            rngs=rngs,
        )

    def attend(
        self, residual: jax.Array, positions: jax.Array, cache: KvCache | None, first_slot: int = 0
    ) -> AttendedLayer:
        """The first half of the layer, up to the input of its FFN; `first_slot` as for `Attention`."""
        block = self.config.block
        normed = residual if self.attention_norm is None else self.attention_norm(residual)
        y, cache = self.attention(normed, positions, cache, first_slot)
        if block == "parallel":
            return AttendedLayer(self.ffn_norm(residual), residual, join(residual, y, self.config), cache)
        residual = join(normed if block == "post_norm" else residual, y, self.config)
        x = self.ffn_norm(residual)
        return AttendedLayer(x, residual, x if block == "post_norm" else residual, cache)


class Decoder(nnx.Module):
    """A decoder-only language model whose FFN is run by a function passed in.

    Args:
        config: what it is.
        rngs: of the initial weights; None leaves them to be set.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        self.config = config
        self.embed = Linear(config.embed_width, config.vocab, scale=0.02, rngs=rngs)
        rows = config.context + config.position_offset
        self.positions = random_weight(rngs, (rows, config.model), 0.02) if config.learned_positions else None
        self.layers = nnx.List([DecoderLayer(config, index, rngs) for index in range(config.layers)])
        self.final_norm = Norm(config) if config.final_norm else None
        narrow = config.embed_width != config.model
        self.project_in = Linear(config.embed_width, config.model, rngs=rngs) if narrow else None
        self.project_out = Linear(config.model, config.embed_width, rngs=rngs) if narrow else None
        self.head = None if config.tied else Linear(config.embed_width, config.vocab, rngs=rngs)

    @property
    def cache_dtype(self) -> jnp.dtype:
        """Of the KV cache."""
        return cache_dtype(str(self.embed.weight[...].dtype))

    def embed_ids(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        """int32 [batch, seq] ids and positions -> float32 residual [batch, seq, model]."""
        x = self.embed.rows(ids)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions[...][positions + self.config.position_offset].astype(jnp.float32)
        return x

    def logits(self, residual: jax.Array) -> jax.Array:
        """float32 residual [batch, seq, model] -> float32 logits [batch, seq, vocab]."""
        x = residual if self.final_norm is None else self.final_norm(residual)
        if self.config.logit_scale != 1.0:
            x = x * self.config.logit_scale
        if self.project_out is not None:
            x = self.project_out(x)
        return (self.embed if self.head is None else self.head)(x)

    def run(
        self,
        ids: jax.Array,
        positions: jax.Array,
        cache: KvCache | None = None,
        ffn_fn: FfnFn = dense_ffn_fn,
    ) -> tuple[jax.Array, KvCache | None, list]:
        """All layers, without the head.

        Args:
            ids: int32 [batch, seq].
            positions: int32 [batch, seq], consecutive; 0.. if seq > 1 and there is a cache.
            cache: of all layers, `batch` slots each, one layer after the other; None to see only `ids`.
            ffn_fn: runs one layer's FFN.

        Returns:
            (residual [batch, seq, model], cache, what ffn_fn handed back for each layer)
        """
        residual = self.embed_ids(ids, positions)
        aux = []
        for index, layer in enumerate(self.layers):
            attended = layer.attend(residual, positions, cache, index * len(ids))
            cache = attended.cache
            y, layer_aux = ffn_fn(layer, attended.x, attended.source)
            residual = join(attended.residual, y, self.config)
            aux.append(layer_aux)
        return residual, cache, aux

    def __call__(self, ids: jax.Array, ffn_fn: FfnFn = dense_ffn_fn) -> jax.Array:
        """int32 ids [batch, seq] -> float32 logits [batch, seq, vocab], each position seeing those before."""
        if not isinstance(ids, Tracer):
            ids = jnp.asarray(check_ids(np.asarray(ids), self.config))
        return self.logits(self.run(ids, prompt_positions(ids), ffn_fn=ffn_fn)[0])
