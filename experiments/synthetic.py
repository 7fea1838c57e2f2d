"""Models of published shapes with synthetic weights, whose sparsity is set: for speed, never for text."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax import ops
from pjax.base import LowRankPredictor, PredictorReport, Predictors
from pjax.memory import on_large_pages
from pjax.model import Decoder, Linear
from pjax.model_config import ModelConfig, Rope
from pjax.ops.packed import pack_codes
from pjax.weights import QUANTISED_DTYPES, Ffn, Matrix, PackedFfn, PackedMatrix


@dataclasses.dataclass(frozen=True)
class Shape:
    """A published model's shape.

    Attributes:
        config: what its decoder is; the activation's threshold is set by `make_model`.
        density: share of neurons that are active, as published.
        rank: of the predictors.
    """

    config: ModelConfig
    density: float
    rank: int


def _llama(
    name: str, vocab: int, model: int, neurons: int, layers: int, heads: int, kv_heads: int
) -> ModelConfig:
    head_dim = model // heads
    return ModelConfig(
        name=name, family="llama", vocab=vocab, model=model, neurons=(neurons,) * layers, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, context=4096, activation="relu", gated=True, norm="rms",
        norm_eps=1e-5, rope=Rope(1e4, head_dim), bos_id=None, eos_ids=(),
    )  # fmt: skip


def _opt(name: str, vocab: int, model: int, neurons: int, layers: int, heads: int) -> ModelConfig:
    return _llama(name, vocab, model, neurons, layers, heads, heads).replace(
        family="opt", context=2048, gated=False, norm="layer", norm_bias=True, rope=None,
        learned_positions=True, position_offset=2, attention_bias=True, mlp_bias=True, tied=True,
    )  # fmt: skip


SHAPES = {
    "llama-1b-mha": Shape(_llama("llama-1b-mha", 32000, 2048, 5632, 22, 32, 32), 0.10, 256),
    "minicpm-s-1b": Shape(
        _llama("minicpm-s-1b", 122752, 1536, 3840, 52, 24, 8).replace(tied=True), 0.12, 256
    ),
    "opt-1.3b": Shape(_opt("opt-1.3b", 50272, 2048, 8192, 24, 32), 0.05, 256),
    "prosparse-7b": Shape(_llama("prosparse-7b", 32000, 4096, 11008, 32, 32, 32), 0.11, 256),
    "bamboo-7b": Shape(_llama("bamboo-7b", 32000, 4096, 14336, 32, 32, 8), 0.15, 256),
    "tiny": Shape(_llama("tiny", 512, 256, 704, 2, 8, 4), 0.10, 64),
}
"""Densities: ProSparse (arXiv 2402.13516) 88-89 % sparse, MiniCPM-S 88 %, OPT 95-97 % (Deja Vu, PowerInfer),
Bamboo 85 %; llama-1b-mha is TinyLlama with full attention heads, at 10 % for comparison's sake."""


def make_model(shape: Shape, dtype: str, seed: int = 0) -> tuple[Decoder, Predictors]:
    """A decoder whose gates open at the shape's density, and predictors that find them.

    Each opener (gate, or up without one) is a product of two random matrices of inner rank `rank / 2`, so
    that `relu(x @ [A, -A].T) @ [B, -B].T` is the opener's own product: a predictor of that rank is right but
    for the rounding of both. FATReLU's threshold is the quantile of a normal product that leaves the
    density open; the random residual stream is nearly isotropic, so the measured density is close to it.

    Args:
        shape: what to build.
        dtype: of all matrices, a float type or a quantised one; predictors are in q4_0 in any case.
        seed: of the weights.
    """
    threshold = statistics.NormalDist().inv_cdf(1 - shape.density)
    config = shape.config.replace(activation=f"fatrelu:{threshold:.4f}", mlp_bias=False)
    rng = np.random.default_rng(seed)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if len(variable.shape) == 1:
            variable.set_value(jnp.full(variable.shape, 1.0 if path[-1] == "scale" else 0.0, jnp.float32))
    if model.positions is not None:
        model.positions.set_value(jnp.asarray(rng.standard_normal(model.positions.shape, np.float32) * 0.02))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            rows, width = module.weight.shape
            module.set_weight(make_matrix(rng, rows, width, dtype))
    layers = []
    for layer in model.layers:
        opener, predictor = make_opener(rng, config.model, layer.ffn.up.shape[0], shape.rank, threshold)
        layers.append(predictor)
        layer.ffn.set_weights(make_ffn(rng, opener, config.gated, dtype))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(layers[0]))
    density = shape.density
    report = PredictorReport(
        shape.rank, 1.0, 1.0, density, density, threshold, num_bytes, contribution_recall=1.0, kind="lowrank"
    )
    return model, Predictors(tuple(layers), (report,) * config.layers)


def make_matrix(rng: np.random.Generator, rows: int, width: int, dtype: str) -> Matrix:
    """Random numbers of deviation near width**-0.5."""
    if dtype in QUANTISED_DTYPES:
        return PackedMatrix(on_large_pages(make_packed_rows(rng, rows, width, dtype)), dtype, width)
    values = jnp.asarray(rng.standard_normal((rows, width), np.float32) * np.float32(width**-0.5))
    return on_large_pages(values.astype(dtype))


def make_packed_rows(rng: np.random.Generator, rows: int, width: int, dtype: str) -> jax.Array:
    """The rows of such a matrix in a quantised type: random codes, which are fast to make."""
    num_codes = 256 if dtype == "q8_0" else 16
    codes = rng.integers(0, num_codes, (rows, width // 32, 32), np.uint8)
    deviation = num_codes / 12**0.5
    scales = jnp.full((rows, width // 32), width**-0.5 / deviation, jnp.float16)
    return pack_codes(jnp.asarray(codes), scales, format=dtype)


def make_opener(
    rng: np.random.Generator, model: int, neurons: int, rank: int, threshold: float
) -> tuple[jnp.ndarray, LowRankPredictor]:
    """An opener [neurons, model] of inner rank `rank / 2`, and the predictor that is right about it."""
    inner = rank // 2
    a = jnp.asarray(rng.standard_normal((inner, model), np.float32) * np.float32(model**-0.5))
    b = jnp.asarray(rng.standard_normal((neurons, inner), np.float32) * np.float32(inner**-0.5))
    predictor = LowRankPredictor(
        ops.pack_matrix(jnp.concatenate([a, -a]), "q4_0"),
        ops.pack_matrix(jnp.concatenate([b, -b], axis=1), "q4_0"),
        jnp.zeros(neurons),
        jnp.float32(threshold),
    )
    return b @ a, predictor


def make_ffn(rng: np.random.Generator, opener: jnp.ndarray, gated: bool, dtype: str) -> Ffn | PackedFfn:
    """An FFN of that opener (gate, or up without one) and random other rows."""
    neurons, model = opener.shape
    if dtype in QUANTISED_DTYPES:
        parts = [ops.pack_matrix(opener, dtype).rows]
        parts += [make_packed_rows(rng, neurons, model, dtype) for _ in range(2 if gated else 1)]
        return PackedFfn(on_large_pages(jnp.concatenate(parts, axis=1)), dtype, model, gated)
    parts = [
        on_large_pages(opener.astype(dtype)),
        *(make_matrix(rng, neurons, model, dtype) for _ in range(2 if gated else 1)),
    ]
    return Ffn(*parts) if gated else Ffn(None, *parts)
