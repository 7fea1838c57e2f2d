"""The CPU kernels as JAX functions: finds, checks and registers the shared library, on first use.

The only module that touches `jax.ffi` and `ctypes`. Importing it loads nothing.
"""

import ctypes
import functools
import os
import pathlib
import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pjax.model_config import Activation
from pjax.weights import AnyFfn, Matrix, PackedFfn, PackedMatrix, row_bytes

WEIGHT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint8, jnp.uint32)
"""Types of arrays of weights that the kernels read; uint8 are packed rows, uint32 signs."""

_FORMATS = {"q8_0": np.int64(1), "q4_0": np.int64(2)}
"""Their numbers in the handlers; 0 is a float type, which its array tells."""

_LIBRARY_NAME = "libpjax_cpu.so"
_TARGETS = tuple(
    f"pjax_{name}"
    for name in (
        "sparse_ffn",
        "packed_ffn",
        "matvec",
        "low_rank_mask",
        "combine_rows",
        "decode_attention",
        "norm",
        "sign_scores",
        "stream_sum",
        "address",
    )
)
_LOCK = threading.Lock()


def unusable_reason() -> str | None:
    """Why the kernels cannot be used here, or None if they can. Loads and registers them on the first call.

    Raises:
        ValueError: PJAX_CPU or PJAX_NUM_THREADS holds something that makes no sense.
    """
    with _LOCK:
        return _load_once()


def sparse_ffn(
    x: jax.Array, ffn: AnyFfn, active_mask: jax.Array | None, activation: Activation, *, every_neuron: bool
) -> tuple[jax.Array, jax.Array]:
    """The kernel behind `pjax.sparse_ffn`.

    Args:
        x: float32 [batch, model].
        ffn: the weights.
        active_mask: bool [batch, neurons] or None for all.
        activation: a sparse one, or any if every neuron is read.
        every_neuron: whether to read all rows, even those that the gate closes.

    Returns:
        float32 [batch, model], and int32 [3, batch]: neurons predicted, computed and active.
    """
    batch, model = x.shape
    results = (jax.ShapeDtypeStruct((batch, model), jnp.float32), jax.ShapeDtypeStruct((3, batch), jnp.int32))
    mask = jnp.zeros((0, 0), bool) if active_mask is None else active_mask
    biases = (_float32_or_empty(ffn.gate_bias), _float32_or_empty(ffn.up_bias))
    attributes: dict[str, Any] = {
        "activation": activation.name,
        "threshold": np.float32(activation.threshold),
        "every_neuron": np.bool_(every_neuron),
    }
    if isinstance(ffn, PackedFfn):
        attributes |= {"format": _FORMATS[ffn.format], "gated": np.bool_(ffn.gated)}
        y, counts = jax.ffi.ffi_call("pjax_packed_ffn", results)(x, ffn.rows, *biases, mask, **attributes)
    else:
        gate = jnp.zeros((0, model), ffn.up.dtype) if ffn.gate is None else ffn.gate
        call = jax.ffi.ffi_call("pjax_sparse_ffn", results)
        y, counts = call(x, gate, ffn.up, ffn.down, *biases, mask, **attributes)
    return y, counts


class Rows(NamedTuple):
    """Rows of weights as the kernels find them.

    Attributes:
        array: float [rows, width], or uint8 [rows, bytes] of which a packed row is a part.
        format: "q8_0" or "q4_0"; None for a float type, which the array tells.
        width: numbers in a row.
        offset: the byte at which each packed row begins.
    """

    array: jax.Array
    format: str | None
    width: int
    offset: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        """What the handlers are told beside the array."""
        return {
            "format": np.int64(0) if self.format is None else _FORMATS[self.format],
            "offset": np.int64(self.offset),
        }


def matrix_rows(weight: Matrix) -> Rows:
    """The rows of a matrix [out, in]."""
    if isinstance(weight, PackedMatrix):
        return Rows(weight.rows, weight.format, weight.width)
    return Rows(weight, None, weight.shape[1])


def ffn_rows(ffn: AnyFfn) -> tuple[Rows | None, Rows, Rows]:
    """The rows of gate (if any), up and down."""
    if isinstance(ffn, PackedFfn):
        num_bytes = row_bytes(ffn.format, ffn.model)
        parts = [Rows(ffn.rows, ffn.format, ffn.model, i * num_bytes) for i in range(3 if ffn.gated else 2)]
        return (parts[0] if ffn.gated else None), parts[-2], parts[-1]
    gate = None if ffn.gate is None else matrix_rows(ffn.gate)
    return gate, matrix_rows(ffn.up), matrix_rows(ffn.down)


def matvecs(x: jax.Array, weights: Sequence[tuple[Rows, jax.Array | None]]) -> list[jax.Array]:
    """The kernel behind `pjax.ops.matvecs`: float32 [batch, rows] of each weight.

    Args:
        x: float32 [batch, width].
        weights: rows of this width, and their bias [rows] or None.
    """
    results = [jax.ShapeDtypeStruct((x.shape[0], rows.array.shape[0]), jnp.float32) for rows, _ in weights]
    operands = [operand for rows, bias in weights for operand in (rows.array, _float32_or_empty(bias))]
    attributes = [rows.attributes for rows, _ in weights]
    formats, offsets = (np.array([each[name] for each in attributes]) for name in ("format", "offset"))
    return list(jax.ffi.ffi_call("pjax_matvec", results)(x, *operands, formats=formats, offsets=offsets))


def combine_rows(x: jax.Array, rows: Rows) -> jax.Array:
    """`sum_i x_i * rows_i`, for many tokens.

    Args:
        x: float32 [batch, rows].
        rows: the weight.

    Returns:
        float32 [batch, width].
    """
    result = jax.ShapeDtypeStruct((x.shape[0], rows.width), jnp.float32)
    return jax.ffi.ffi_call("pjax_combine_rows", result)(x, rows.array, **rows.attributes)


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    positions: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    slopes: jax.Array | None,
    *,
    first_slot: int,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel behind `pjax.ops.decode_attention`; rotation: cosines and sines, [batch, 1, width / 2]."""
    batch, heads, head_dim = q.shape
    waves = jnp.zeros((batch, 0)) if rotation is None else jnp.concatenate(rotation, axis=-1)[:, 0]
    result = jax.ShapeDtypeStruct((batch, heads * head_dim), jnp.float32)
    caches = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_cache, v_cache)]
    call = jax.ffi.ffi_call("pjax_decode_attention", (result, *caches), input_output_aliases={3: 1, 4: 2})
    arrays = (q, k, v, k_cache, v_cache, positions, waves, _float32_or_empty(slopes))
    y, k_cache, v_cache = call(*arrays, first_slot=np.int64(first_slot), window=np.int64(window or 0))
    return y, k_cache, v_cache


def norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, centered: bool, eps: float
) -> jax.Array:
    """The kernel behind `pjax.ops.norm`, x float32 [batch, model]."""
    call = jax.ffi.ffi_call("pjax_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    weights = (_float32_or_empty(scale), _float32_or_empty(bias))
    return call(x, *weights, centered=np.bool_(centered), eps=np.float32(eps))


def low_rank_mask(
    x: jax.Array, first: Rows, second: Rows, bias: jax.Array, threshold: jax.Array
) -> jax.Array:
    """The kernel behind `pjax.ops.low_rank_mask`: bool [batch, neurons], x float32 [batch, in]."""
    formats = {"first_format": first.attributes["format"], "second_format": second.attributes["format"]}
    result = jax.ShapeDtypeStruct((x.shape[0], second.array.shape[0]), bool)
    call = jax.ffi.ffi_call("pjax_low_rank_mask", result)
    return call(x, first.array, second.array, bias, threshold, **formats)


def sign_scores(x: jax.Array, bits: jax.Array, slope: jax.Array, bias: jax.Array) -> jax.Array:
    """The kernel behind `pjax.ops.sign_scores`: float32 [batch, rows], x float32 [batch, width]."""
    result = jax.ShapeDtypeStruct((x.shape[0], bits.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("pjax_sign_scores", result)(x, bits, slope, bias)


def stream_sum(x: jax.Array) -> jax.Array:
    """The kernel behind `pjax.ops.stream_sum`: uint32 scalar."""
    return jax.ffi.ffi_call("pjax_stream_sum", jax.ShapeDtypeStruct((), jnp.uint32))(x)


def address(x: jax.Array) -> jax.Array:
    """Where a kernel sees its operand: uint32 [2], the lower and upper half of the address.

    A test compares it with `x.unsafe_buffer_pointer()`, to find out whether XLA copied a weight.
    """
    return jax.ffi.ffi_call("pjax_address", jax.ShapeDtypeStruct((2,), jnp.uint32))(x)


def _float32_or_empty(bias: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if bias is None else bias.astype(jnp.float32)


@functools.cache
def _load_once() -> str | None:
    path = _find_library()
    if path is None:
        return f"{_LIBRARY_NAME} is missing; reinstall pjax where a C++ compiler is installed"
    if not path.exists():
        return f"PJAX_LIBRARY names a missing file, {path}; unset it or give the path of a {_LIBRARY_NAME}"
    try:
        library = ctypes.CDLL(str(path))
        handlers = {name: getattr(library, name) for name in _TARGETS}
        library.pjax_ffi_api_version.restype = ctypes.c_uint32
        built = divmod(library.pjax_ffi_api_version(), 1 << 16)
        library.pjax_init.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return f"{path} does not load ({error}); reinstall pjax"
    supported = _jaxlib_ffi_version()
    if supported is not None and (built[0] != supported[0] or built > supported):
        return (
            f"{path} was built for XLA FFI {built[0]}.{built[1]}, but this jaxlib offers {supported[0]}."
            f"{supported[1]}; reinstall pjax, or install a newer jaxlib"
        )
    if problem := library.pjax_init():
        raise ValueError(problem.decode())
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return None


def _find_library() -> pathlib.Path | None:
    """The file that PJAX_LIBRARY names, or the one in the package.

    An editable install keeps the built library apart from the sources: the package then has two folders.
    """
    if override := os.environ.get("PJAX_LIBRARY"):
        return pathlib.Path(override)
    import pjax.ops

    paths = (pathlib.Path(folder) / _LIBRARY_NAME for folder in pjax.ops.__path__)
    return next((path for path in paths if path.exists()), None)


def _jaxlib_ffi_version() -> tuple[int, int] | None:
    """The version in jaxlib's own header, or None if it ships without."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    if not header.exists():
        return None
    text = header.read_text()
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(number.group(1)) if number else 0 for number in numbers)
    return major, minor
