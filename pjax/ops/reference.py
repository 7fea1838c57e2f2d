"""The operators in plain jnp: what every kernel is compared with, and what runs where none exists.

All sums are in float32 whatever the weight type. Every neuron is computed and the masked ones are
multiplied by zero, so these cost as much as a dense layer.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pjax.base import FfnCounts
from pjax.model_config import Activation
from pjax.ops.packed import round_input, unpack_ffn, unpack_matrix
from pjax.weights import AnyFfn, Ffn, Matrix, PackedFfn, PackedMatrix


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The activation function of a gate or an ungated up; see `Activation` for the formulas.

    Args:
        x: float32, any shape.
        activation: which one.
    """
    if activation.is_sparse:
        opened = jnp.where(x <= activation.threshold, jnp.zeros_like(x), x)  # NaN stays NaN
        return jnp.square(opened) if activation.name == "relu2" else opened
    return (
        jax.nn.silu(x) if activation.name == "silu" else jax.nn.gelu(x, approximate=activation.name != "gelu")
    )


def norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, centered: bool, eps: float
) -> jax.Array:
    """RMSNorm or, if centered, LayerNorm of float32 [batch, model]; see `pjax.ops.norm`."""
    if centered:
        x = x - x.mean(-1, keepdims=True)
    y = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * scale[None, :]
    return y if bias is None else y + bias[None, :]


def ffn_values(gate: jax.Array | None, up: jax.Array, activation: Activation) -> jax.Array:
    """What multiplies the down rows of a dense FFN: float32 [..., neurons], of gate and up products such."""
    if gate is None:
        return activate(up, activation)
    return activate(gate, activation) * (activate(up, activation) if activation.name == "drelu" else up)


def matvec(x: jax.Array, weight: Matrix, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias` in float32; x is rounded as `round_input` does where the weight is quantised.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.
    """
    if isinstance(weight, PackedMatrix):
        x, weight = round_input(x.astype(jnp.float32)), unpack_matrix(weight)
    y = _multiply(x, weight, weight_axis=1)
    return y if bias is None else y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)


def dense_ffn(x: jax.Array, ffn: AnyFfn, activation: Activation) -> tuple[jax.Array, jax.Array]:
    """The FFN with every neuron, and what multiplies the down rows: `values @ down`; see `Activation`.

    Args:
        x: [..., model].
        ffn: the weights.
        activation: the function between the matrices.

    Returns:
        float32 [..., model], the result; float32 [..., neurons], the values.
    """
    x, ffn = _plain(x, ffn)
    gate = None if ffn.gate is None else matvec(x, ffn.gate, ffn.gate_bias)
    values = ffn_values(gate, matvec(x, ffn.up, ffn.up_bias), activation)
    return _multiply(values, ffn.down, weight_axis=0), values


def sparse_ffn(
    x: jax.Array, ffn: AnyFfn, active_mask: jax.Array | None, activation: Activation
) -> tuple[jax.Array, FfnCounts]:
    """The FFN restricted to the neurons of the mask, with its counts.

    Args:
        x: [batch, model].
        ffn: the weights.
        active_mask: bool [batch, neurons], or None for all of them.
        activation: a sparse one.
    """
    x, ffn = _plain(x, ffn)
    shape = (x.shape[0], ffn.neurons)
    mask = jnp.ones(shape, bool) if active_mask is None else active_mask
    opener = matvec(x, ffn.up, ffn.up_bias) if ffn.gate is None else matvec(x, ffn.gate, ffn.gate_bias)
    closed = opener <= activation.threshold
    values = activate(opener, activation)
    if ffn.gate is not None:
        up = matvec(x, ffn.up, ffn.up_bias)
        if activation.name == "drelu":
            closed, up = closed | (up <= 0), activate(up, activation)
        values = values * up
    values = jnp.where(mask & ~closed, values, jnp.zeros_like(values))
    counts = FfnCounts(_count(mask), _count(mask & ~closed), _count(values != 0))
    return _multiply(values, ffn.down, weight_axis=0), counts


def low_rank_mask(
    x: jax.Array, first: Matrix, second: Matrix, bias: jax.Array, threshold: jax.Array
) -> jax.Array:
    """See `pjax.ops.low_rank_mask`."""
    return matvec(jax.nn.relu(matvec(x, first)), second, bias) > threshold


def stream_sum(x: jax.Array) -> jax.Array:
    """Sum modulo 2**32 of an array's bytes taken as little-endian uint32 words, zero-padded at the end."""
    flat = x.reshape(-1)
    flat = flat.astype(jnp.uint8) if flat.dtype == jnp.bool_ else flat
    per_word = 4 // flat.dtype.itemsize
    if per_word > 1:
        flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(flat, jnp.uint32).sum(dtype=jnp.uint32)


SIGNS_PER_WORD = 32
"""Bits of a word of signs."""


def pack_signs(weight: jax.Array) -> jax.Array:
    """The signs of float [rows, width], 32 in a uint32; see `pjax.ops.pack_signs`."""
    bits = jnp.pad(jnp.signbit(weight), ((0, 0), (0, -weight.shape[1] % SIGNS_PER_WORD)))
    words = bits.reshape(weight.shape[0], bits.shape[1] // SIGNS_PER_WORD, SIGNS_PER_WORD)
    places = jnp.arange(SIGNS_PER_WORD, dtype=jnp.uint32)
    return (words.astype(jnp.uint32) << places[None, None, :]).sum(-1, dtype=jnp.uint32)


def sign_scores(x: jax.Array, bits: jax.Array, slope: jax.Array, bias: jax.Array) -> jax.Array:
    """Agreement of signs, scaled, of float32 [batch, width] with each row; see `pjax.ops.sign_scores`."""
    differing = lax.population_count(pack_signs(x)[:, None, :] ^ bits[None, :, :]).sum(-1, dtype=jnp.int32)
    agreement = (x.shape[1] - 2 * differing).astype(jnp.float32)
    return slope.reshape(1, 1) * agreement + bias[None, :]


def _plain(x: jax.Array, ffn: AnyFfn) -> tuple[jax.Array, Ffn]:
    """A quantised FFN as floats, and x rounded as its kernels do."""
    return (round_input(x.astype(jnp.float32)), unpack_ffn(ffn)) if isinstance(ffn, PackedFfn) else (x, ffn)


def _multiply(x: jax.Array, weight: jax.Array, weight_axis: int) -> jax.Array:
    """Sums over the last axis of x and `weight_axis`; XLA:CPU would copy a `weight.T` (20 times slower)."""
    axes = (((x.ndim - 1,), (weight_axis,)), ((), ()))
    floats = (x.astype(jnp.float32), weight.astype(jnp.float32))
    return lax.dot_general(*floats, axes, precision=lax.Precision.HIGHEST)


def _count(mask: jax.Array) -> jax.Array:
    return mask.sum(axis=-1, dtype=jnp.int32)
