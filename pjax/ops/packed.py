"""Quantised weights: packing rows into blocks of codes and scales as the kernels read them, and back.

A block is 32 numbers that share one float16 scale, as in GGUF's types of the same names, to and from which
these convert without loss: q8_0 is `code * scale` with code in -128..127, q4_0 is `(code - 8) * scale` with
code in 0..15.

A row holds its codes and then its scales. Sixteen blocks (the last group of a row perhaps fewer) are laid
side by side, so that each lane of a wide register belongs to one block: see `_CODES`.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pjax.weights import BLOCK, QUANTISED_DTYPES, AnyFfn, Ffn, PackedFfn, PackedMatrix

_GROUP = 16  # Blocks side by side: the 32-bit lanes of a 512-bit register.

# Shape of a group of n blocks, apart from n itself, and which axis of it each step of the layout moves.
_CODES = {"q8_0": (8, 4), "q4_0": (4, 2, 4)}
"""q8_0: number 4 v + b of a block is byte b of its lane in vector v. q4_0: numbers 8 v + b and 8 v + 4 + b
are the low and high half of byte b of its lane in vector v."""


def _code_bytes(format: str) -> int:
    return BLOCK if format == "q8_0" else BLOCK // 2


def check_format(format: str, width: int, name: str) -> None:
    """Raises ValueError unless rows of that width can have that type."""
    if format not in QUANTISED_DTYPES:
        raise ValueError(f"format: expected one of {list(QUANTISED_DTYPES)}, got {format!r}.")
    if width % BLOCK or width == 0:
        raise ValueError(f"{name}: expected a width that is a multiple of {BLOCK} for {format}, got {width}.")


@functools.partial(jax.jit, static_argnames="format")
def quantise_rows(weight: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
    """The codes and scales that GGUF's reference quantisation gives.

    q8_0: scale = max|w| / 127; q4_0: scale = w of the largest magnitude / -8; code = round(w / scale).

    Args:
        weight: float [rows, width].
        format: "q8_0" or "q4_0".

    Returns:
        uint8 [rows, width / 32, 32] (q8_0: the bits of int8), float16 [rows, width / 32].
    """
    blocks = weight.astype(jnp.float32).reshape(weight.shape[0], weight.shape[1] // BLOCK, BLOCK)
    # Floats that are not negative have the order of their bits, and of integers XLA finds the largest eight
    # times faster.
    magnitudes = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    peaks = magnitudes.max(-1, keepdims=True)
    scales = jax.lax.bitcast_convert_type(peaks, jnp.float32) / (127 if format == "q8_0" else 8)
    if format == "q4_0":
        # Of equally large numbers the first counts: it has the highest place, whose last bit tells its sign.
        places = 2 * jnp.arange(BLOCK, 0, -1, dtype=jnp.int32)[None, None] + jnp.signbit(blocks)
        first = jnp.where(magnitudes == peaks, places, 0).max(-1, keepdims=True)
        scales = jnp.where(first & 1, scales, -scales)
    # An all-zero block has scale zero and codes of zero.
    ratios = blocks * jnp.where(scales == 0, 0, 1 / jnp.where(scales == 0, 1, scales))
    if format == "q8_0":
        codes = jnp.trunc(ratios + jnp.copysign(0.5, ratios)).astype(jnp.int8).astype(jnp.uint8)
    else:
        codes = jnp.minimum(jnp.trunc(ratios + 8.5), 15).astype(jnp.uint8)
    return codes, scales[..., 0].astype(jnp.float16)


@functools.partial(jax.jit, static_argnames="format")
def pack_codes(codes: jax.Array, scales: jax.Array, format: str) -> jax.Array:
    """Lays codes and scales out as the kernels read them.

    Args:
        codes: uint8 [rows, blocks, 32], as `quantise_rows` gives them.
        scales: float16 [rows, blocks].
        format: "q8_0" or "q4_0".

    Returns:
        uint8 [rows, row_bytes].
    """
    parts = [_interleave(part, format) for part in _groups(codes)]
    scale_bytes = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    parts.append(scale_bytes.reshape(scales.shape[0], 2 * scales.shape[1]))
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnames=("format", "width"))
def unpack_codes(rows: jax.Array, format: str, width: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack_codes`."""
    num_blocks = width // BLOCK
    code_bytes = _code_bytes(format) * num_blocks
    whole = num_blocks // _GROUP * _GROUP
    split = whole * _code_bytes(format)
    parts = [
        _deinterleave(part, format, n)
        for part, n in ((rows[:, :split], _GROUP), (rows[:, split:code_bytes], num_blocks - whole))
        if part.shape[1]
    ]
    scale_bytes = rows[:, code_bytes:].reshape(rows.shape[0], num_blocks, 2)
    return jnp.concatenate(parts, axis=1), jax.lax.bitcast_convert_type(scale_bytes, jnp.float16)


def dequantise(rows: jax.Array, format: str, width: int) -> jax.Array:
    """The numbers of packed rows: uint8 [rows, row_bytes] -> float32 [rows, width]."""
    codes, scales = unpack_codes(rows, format, width)
    values = codes.astype(jnp.int8).astype(jnp.float32) if format == "q8_0" else codes.astype(jnp.float32) - 8
    return (values * scales.astype(jnp.float32)[:, :, None]).reshape(rows.shape[0], width)


def round_input(x: jax.Array) -> jax.Array:
    """What the kernels of quantised weights see of x: int8 codes with one scale per block of 32.

    `round(127 x / max|x|) max|x| / 127` within each block. Its gradient is that of the identity.

    Args:
        x: float32 [..., width].
    """
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    scale = jnp.abs(blocks).max(-1, keepdims=True) / 127
    inverse = jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))
    rounded = (jnp.round(blocks * inverse) * scale).reshape(x.shape)
    return x + jax.lax.stop_gradient(rounded - x)


def pack_matrix(weight: jax.Array, format: str) -> PackedMatrix:
    """Quantises a matrix, row by row.

    Args:
        weight: float [out, in], in a multiple of 32.
        format: "q8_0" or "q4_0".

    Raises:
        ValueError: another format or width.
    """
    check_format(format, weight.shape[1], "weight")
    return PackedMatrix(_pack_rows(weight, format), format, weight.shape[1])


def unpack_matrix(matrix: PackedMatrix) -> jax.Array:
    """The numbers that a packed matrix stands for: float32 [out, in]."""
    return dequantise(matrix.rows, matrix.format, matrix.width)


def pack_ffn(ffn: Ffn, format: str) -> PackedFfn:
    """Quantises an FFN, neuron by neuron.

    Args:
        ffn: float weights, of a width that is a multiple of 32.
        format: "q8_0" or "q4_0".

    Raises:
        ValueError: another format or width.
    """
    check_format(format, ffn.model, "ffn")
    parts = [_pack_rows(part, format) for part in (ffn.gate, ffn.up, ffn.down) if part is not None]
    rows = jnp.concatenate(parts, axis=1)
    return PackedFfn(rows, format, ffn.model, ffn.gated, ffn.gate_bias, ffn.up_bias)


def unpack_ffn(ffn: AnyFfn) -> Ffn:
    """The numbers that a packed FFN stands for, in float32; a plain FFN as it is."""
    if isinstance(ffn, Ffn):
        return ffn
    parts = jnp.split(ffn.rows, 3 if ffn.gated else 2, axis=1)
    *gate, up, down = [dequantise(part, ffn.format, ffn.model) for part in parts]
    return Ffn(gate[0] if gate else None, up, down, ffn.gate_bias, ffn.up_bias)


def _pack_rows(weight: jax.Array, format: str) -> jax.Array:
    return pack_codes(*quantise_rows(weight, format), format=format)


def _groups(codes: jax.Array) -> list[jax.Array]:
    """The blocks of each row in groups [rows, groups, n, 32]: the full ones, then what is left."""
    whole = codes.shape[1] // _GROUP * _GROUP
    parts = [(codes[:, :whole], _GROUP), (codes[:, whole:], codes.shape[1] - whole)]
    # Sizes, not -1, here and below: from no rows, those of a layer that is all cold, none could be told.
    return [part.reshape(part.shape[0], part.shape[1] // n, n, BLOCK) for part, n in parts if part.shape[1]]


def _interleave(groups: jax.Array, format: str) -> jax.Array:
    blocks = groups.reshape(*groups.shape[:3], *_CODES[format])
    if format == "q4_0":
        blocks = blocks[..., 0, :] | (blocks[..., 1, :] << 4)
    # Four bytes move as one number, which takes a third of the time.
    lanes = jax.lax.bitcast_convert_type(blocks, jnp.uint32).swapaxes(2, 3)
    return jax.lax.bitcast_convert_type(lanes, jnp.uint8).reshape(
        groups.shape[0], math.prod(blocks.shape[1:])
    )


def _deinterleave(part: jax.Array, format: str, n: int) -> jax.Array:
    vectors = _CODES[format][0]
    groups = part.shape[1] // (vectors * n * 4)
    blocks = part.reshape(part.shape[0], groups, vectors, n, 4).swapaxes(2, 3)
    if format == "q4_0":
        blocks = jnp.stack([blocks & 15, blocks >> 4], axis=-2)
    return blocks.reshape(part.shape[0], groups * n, BLOCK)
