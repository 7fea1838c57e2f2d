"""Argument checks of the operators: each error names the argument, what it must be and what it is."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pjax.model_config import SPARSE_ACTIVATIONS, Activation
from pjax.ops.packed import check_format
from pjax.weights import AnyFfn, Matrix, PackedFfn, PackedMatrix, row_bytes


def check_ffn(ffn: AnyFfn) -> None:
    """Raises ValueError unless the arrays of `ffn` fit together."""
    if isinstance(ffn, PackedFfn):
        return _check_packed_ffn(ffn)
    expect_float("ffn.up", ffn.up)
    if ffn.up.ndim != 2 or ffn.up.shape[1] == 0:
        raise ValueError(f"ffn.up: expected shape [neurons, model], model >= 1, got {list(ffn.up.shape)}.")
    neurons, model = ffn.up.shape
    rows = f"[neurons, model] = [{neurons}, {model}], the shape of ffn.up"
    gate = ffn.up if ffn.gate is None else ffn.gate
    for name, weight in (("ffn.gate", gate), ("ffn.down", ffn.down)):
        expect_float(name, weight)
        expect_shape(name, weight, (neurons, model), rows)
        if weight.dtype != ffn.up.dtype:
            raise ValueError(f"{name}: expected {ffn.up.dtype}, the type of ffn.up, got {weight.dtype}.")
    _check_ffn_biases(ffn)


def _check_packed_ffn(ffn: PackedFfn) -> None:
    check_format(ffn.format, ffn.model, "ffn.model")
    num_bytes = (3 if ffn.gated else 2) * row_bytes(ffn.format, ffn.model)
    expect_packed("ffn.rows", ffn.rows, num_bytes, "neurons")
    _check_ffn_biases(ffn)


def _check_ffn_biases(ffn: AnyFfn) -> None:
    for name, bias in (("ffn.gate_bias", ffn.gate_bias), ("ffn.up_bias", ffn.up_bias)):
        if bias is not None:
            expect_float(name, bias)
            expect_shape(name, bias, (ffn.neurons,), f"[neurons] = [{ffn.neurons}]")
    if not ffn.gated and ffn.gate_bias is not None:
        raise ValueError("ffn.gate_bias: expected None, since there is no gate; an ungated FFN uses up_bias.")


def check_matrix(weight: Matrix) -> tuple[int, int]:
    """The shape [out, in] of a matrix; raises ValueError unless it is one."""
    if isinstance(weight, PackedMatrix):
        check_format(weight.format, weight.width, "weight")
        expect_packed("weight.rows", weight.rows, row_bytes(weight.format, weight.width), "out")
        return weight.rows.shape[0], weight.width
    expect_float("weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"weight: expected shape [out, in], got {list(weight.shape)}.")
    num_outputs, num_inputs = weight.shape
    return num_outputs, num_inputs


def check_input(x: jax.Array, model: int, *, ranks: tuple[int, ...] | None) -> None:
    """Raises ValueError unless x is a float array whose last axis has `model` entries.

    Args:
        x: the array.
        model: expected size of its last axis.
        ranks: allowed ranks, None for any from 1 up.
    """
    expect_float("x", x)
    axes = "[..., in]" if ranks is None else "[in] or [batch, in]"
    if x.ndim == 0 or (ranks is not None and x.ndim not in ranks) or x.shape[-1] != model:
        raise ValueError(f"x: expected shape {axes} with in = {model}, got {list(x.shape)}.")


def as_rows(x: jax.Array) -> jax.Array:
    """Returns x as float32 [batch, model], whatever its rank."""
    return x.astype(jnp.float32).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_mask(active_mask: jax.Array | None, x: jax.Array, neurons: int) -> None:
    """Raises ValueError unless the mask is None or bool [batch, neurons] or [neurons]."""
    if active_mask is None:
        return
    if active_mask.dtype != jnp.bool_:
        raise ValueError(
            f"active_mask: expected bool, got {active_mask.dtype}; compare scores with a threshold first."
        )
    if active_mask.shape not in ((neurons,), (*x.shape[:-1], neurons)):
        formula = f"[neurons] = [{neurons}] or [batch, neurons] = {[*x.shape[:-1], neurons]}"
        raise ValueError(f"active_mask: expected shape {formula}, got {list(active_mask.shape)}.")


def check_activation(activation: str, ffn: AnyFfn, *, sparse: bool) -> Activation:
    """The parsed activation; raises ValueError unless it fits the FFN, and leaves zeros if `sparse`."""
    parsed = Activation.parse(activation)
    if sparse and not parsed.is_sparse:
        raise ValueError(
            f"activation: expected one of {', '.join(SPARSE_ACTIVATIONS)}, got {activation!r}, which leaves "
            'no neuron at exactly zero; run this model in mode "dense" (pjax.ops.dense_ffn).'
        )
    if parsed.name == "drelu" and not ffn.gated:
        raise ValueError('activation: "drelu" rectifies gate and up, but this FFN has no gate.')
    return parsed


def expect_shape(name: str, array: jax.Array, shape: tuple[int, ...], formula: str) -> None:
    """Raises ValueError unless the array has the shape, which `formula` spells for the reader."""
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {formula}, got {list(array.shape)}.")


def expect_packed(name: str, rows: jax.Array, num_bytes: int, axis: str) -> None:
    """Raises ValueError unless rows are uint8 [axis, num_bytes]."""
    if rows.dtype != jnp.uint8 or rows.ndim != 2 or rows.shape[1] != num_bytes:
        raise ValueError(
            f"{name}: expected uint8 [{axis}, {num_bytes}], got {rows.dtype} {list(rows.shape)}; was it "
            "packed by pack_ffn or pack_matrix, with this format and width?"
        )


def expect_float(name: str, array: Any) -> None:
    """Raises ValueError unless the argument is an array of a floating type."""
    if not hasattr(array, "dtype") or not hasattr(array, "ndim"):
        raise ValueError(f"{name}: expected a float array, got {type(array).__name__}.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name}: expected a floating type, got {array.dtype}.")
