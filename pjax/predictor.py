"""What predictors are and what they cost: scores and masks of every kind, weight types, ranks, seconds.

The low-rank kind is PowerInfer's (arXiv 2312.12456, section 5.1) after Deja Vu; the one of signs is
SparseInfer's (arXiv 2411.12692), with a bias for each neuron.
"""

import dataclasses
from typing import NamedTuple

import jax

from pjax import ops
from pjax.base import LowRankPredictor, Predictor, SignPredictor
from pjax.weights import BLOCK, DTYPES, QUANTISED_DTYPES, Matrix, PackedMatrix, row_bytes

KINDS = ("lowrank", "sign", "none")
"""Trained; made of the openers' signs; no predictor at all, so that mode "predicted" is "exact"."""

MAX_SHARE = 1 / 16
"""Of a layer's FFN bytes that its predictor may take: PowerInfer's take up to a fifth of them."""


def predict_scores(predictor: Predictor, x: jax.Array) -> jax.Array:
    """About the log-odds that each neuron is active.

    Args:
        predictor: of one layer.
        x: [batch, model], the input that the predictor was made for.

    Returns:
        float32 [batch, neurons].
    """
    if isinstance(predictor, SignPredictor):
        return ops.sign_scores(x, predictor.bits, predictor.slope, predictor.bias)
    hidden = jax.nn.relu(ops.matvec(x, predictor.first))
    return ops.matvec(hidden, predictor.second, predictor.bias)


def predictor_input(predictor: Predictor, x: jax.Array, residual: jax.Array) -> jax.Array:
    """Of the normed FFN input x and what it was made from, both [..., model]: the one that it reads."""
    return residual if predictor.input == "residual" else x


def predict_mask(predictor: Predictor, x: jax.Array, residual: jax.Array) -> jax.Array:
    """The neurons that may be active.

    Args:
        predictor: of one layer; its `input` says which of the two it reads.
        x: [..., model], the normed FFN input.
        residual: [..., model], what x was made from.

    Returns:
        bool [..., neurons].
    """
    seen = predictor_input(predictor, x, residual)
    rows = seen.reshape(-1, seen.shape[-1])
    if isinstance(predictor, SignPredictor):
        mask = predict_scores(predictor, rows) > predictor.threshold
    else:
        mask = ops.low_rank_mask(rows, predictor.first, predictor.second, predictor.bias, predictor.threshold)
    return mask.reshape(*x.shape[:-1], -1)


def take_neurons(predictor: Predictor, ids: jax.Array) -> Predictor:
    """The predictor of some of the neurons, in the order of their numbers `ids`, int [neurons]."""
    bias = predictor.bias[ids]
    if isinstance(predictor, SignPredictor):
        return dataclasses.replace(predictor, bits=predictor.bits[ids], bias=bias)
    return dataclasses.replace(predictor, second=predictor.second[ids], bias=bias)


def with_dtype(predictor: LowRankPredictor, dtype: str) -> LowRankPredictor:
    """The predictor with its matrices in another weight type; bias and threshold stay float32.

    Args:
        predictor: of float weights.
        dtype: "float32", "bfloat16", "float16", "q8_0" or "q4_0".

    Raises:
        ValueError: a quantised type, and widths that are not multiples of 32.
    """

    def convert(matrix: Matrix) -> Matrix:
        if isinstance(matrix, PackedMatrix):
            raise ValueError(f"predictor: expected float weights, got {matrix.format}")
        return ops.pack_matrix(matrix, dtype) if dtype in QUANTISED_DTYPES else matrix.astype(dtype)

    return dataclasses.replace(predictor, first=convert(predictor.first), second=convert(predictor.second))


def check_widths(dtype: str, model: int, rank: int | None) -> None:
    """Raises ValueError unless predictors of these widths can have the type."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if dtype in QUANTISED_DTYPES and (model % BLOCK or (rank or BLOCK) % BLOCK):
        raise ValueError(
            f"dtype: {dtype} needs a model width and a rank that are multiples of {BLOCK}, got {model} and "
            f"{rank}; use bfloat16"
        )


def fitting_dtype(dtype: str, model: int) -> str:
    """The type, or bfloat16 where the model's width has no whole blocks of it."""
    return "bfloat16" if dtype in QUANTISED_DTYPES and model % BLOCK else dtype


def lowrank_bytes(dtype: str, model: int, neurons: int, rank: int) -> int:
    """What a token reads of a low-rank predictor."""
    return rank * row_bytes(dtype, model) + neurons * row_bytes(dtype, rank) + 4 * neurons


def sign_bytes(model: int, neurons: int) -> int:
    """What a token reads of a predictor of signs."""
    return 4 * neurons * (-(-model // 32) + 1)


def rank_choices(dtype: str, model: int, neurons: int, neuron_bytes: int) -> tuple[int, ...]:
    """The ranks that a layer's predictor may have, ascending: 32, 64, 96, 128, 192, 256, 384, 512, ...

    Args:
        dtype: of the predictor.
        model: width of the residual.
        neurons: of the layer.
        neuron_bytes: of one neuron of the layer's FFN; see `MAX_SHARE`.
    """
    ranks, limit = [BLOCK], MAX_SHARE * neurons * neuron_bytes
    while True:
        rank = ranks[-1] + max(BLOCK, 1 << (ranks[-1].bit_length() - 2))
        if lowrank_bytes(dtype, model, neurons, rank) > limit:
            return tuple(ranks)
        ranks.append(rank)


def most_bytes(kind: str, dtype: str, model: int, neurons: int, neuron_bytes: int) -> int:
    """The most that a layer's predictor may have, its scalars too; arguments as of `rank_choices`."""
    if kind == "none":
        return 0
    if kind == "sign":
        return sign_bytes(model, neurons) + 8
    return lowrank_bytes(dtype, model, neurons, rank_choices(dtype, model, neurons, neuron_bytes)[-1]) + 4


class LayerCost(NamedTuple):
    """What finding a layer's active neurons costs: time is bytes over bandwidth.

    The rows of neurons that are truly active cost the same whoever finds them, and are left out.

    Attributes:
        neurons: of the layer.
        opener_bytes: of one neuron's gate row, or of its up row without a gate.
        bytes_per_s: of memory read in order.
        gather_bytes_per_s: of scattered rows.
    """

    neurons: int
    opener_bytes: float
    bytes_per_s: float
    gather_bytes_per_s: float

    @property
    def without(self) -> float:
        """Seconds a token without a predictor: all openers, in order."""
        return self.neurons * self.opener_bytes / self.bytes_per_s

    def of(self, predictor_bytes: int, density: float) -> float:
        """Seconds a token: the predictor, and the openers of the neurons that it marks.

        Args:
            predictor_bytes: of the predictor.
            density: share of neurons that it marks, 0..1.
        """
        rows = density * self.neurons * self.opener_bytes / self.gather_bytes_per_s
        return predictor_bytes / self.bytes_per_s + rows
