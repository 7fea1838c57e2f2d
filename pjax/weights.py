"""Weights in every type: matrices of numbers or of quantised blocks, and FFNs whose rows are neurons."""

import dataclasses
import math

import jax
import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
"""Importing ml_dtypes is what teaches NumPy this type."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Types of weights that are plain arrays."""

QUANTISED_DTYPES = ("q8_0", "q4_0")
"""Types of weights in blocks of codes that share a float16 scale, as GGUF's of the same names."""

DTYPES = FLOAT_DTYPES + QUANTISED_DTYPES
"""All weight types, from most to fewest bits."""

BLOCK = 32
"""Numbers of a quantised block; fixed by the file formats."""

_BLOCK_BYTES = {"q8_0": BLOCK + 2, "q4_0": BLOCK // 2 + 2}


def row_bytes(dtype: str, width: int) -> int:
    """Bytes of a row of `width` numbers in a weight type; a block that is begun counts whole."""
    if dtype in QUANTISED_DTYPES:
        return math.ceil(width / BLOCK) * _BLOCK_BYTES[dtype]
    return width * (4 if dtype == "float32" else 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ffn:
    """The FFN weights of one layer, or of some of its neurons: one neuron is one row.

    Computes `act(x @ gate.T + gate_bias) * (x @ up.T + up_bias) @ down`, or, without a gate,
    `act(x @ up.T + up_bias) @ down`. The layer's down bias is not part of it: it is added once,
    after the blocks of a split layer are summed.

    Attributes:
        gate: [neurons, model], or None for an ungated FFN.
        up: [neurons, model].
        down: [neurons, model], the transpose of the usual [model, neurons].
        gate_bias: [neurons] or None.
        up_bias: [neurons] or None.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None

    @property
    def model(self) -> int:
        """Width of input and output."""
        return self.up.shape[1]

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.gate is not None

    @property
    def format(self) -> str:
        """The weight type: "float32", "bfloat16" or "float16"."""
        return str(self.up.dtype)

    @property
    def neurons(self) -> int:
        """Number of rows."""
        return self.up.shape[0]

    @property
    def neuron_bytes(self) -> int:
        """Bytes of one neuron: its rows and its biases."""
        arrays = jax.tree.leaves(self)
        return sum(a.dtype.itemsize * (a.shape[1] if a.ndim == 2 else 1) for a in arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """A matrix whose rows are quantised in blocks of 32; `pjax.ops.pack_matrix` makes it.

    Attributes:
        rows: uint8 [out, bytes], each row's codes in the kernels' order, then its scales.
        format: "q8_0" or "q4_0".
        width: numbers in a row, a multiple of 32.
    """

    rows: jax.Array
    format: str = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], as of an array."""
        return self.rows.shape[0], self.width

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.rows.nbytes

    def __getitem__(self, ids: jax.Array) -> "PackedMatrix":
        """The rows with these numbers, int [rows]."""
        return dataclasses.replace(self, rows=self.rows[ids])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedFfn:
    """An `Ffn` whose neurons are quantised, each one row; `pjax.pack_ffn` makes it.

    Attributes:
        rows: uint8 [neurons, bytes]: each neuron's gate (if any), up and down, packed as the rows of a
            `PackedMatrix` are, one behind the other.
        format: "q8_0" or "q4_0".
        model: width of input and output, a multiple of 32.
        gated: whether there is a gate.
        gate_bias: [neurons] or None.
        up_bias: [neurons] or None.
    """

    rows: jax.Array
    format: str = dataclasses.field(metadata={"static": True})
    model: int = dataclasses.field(metadata={"static": True})
    gated: bool = dataclasses.field(metadata={"static": True})
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None

    @property
    def neurons(self) -> int:
        """Number of rows."""
        return self.rows.shape[0]

    @property
    def neuron_bytes(self) -> int:
        """Bytes of one neuron: its row and its biases."""
        biases = jax.tree.leaves((self.gate_bias, self.up_bias))
        return self.rows.shape[1] + sum(bias.dtype.itemsize for bias in biases)


AnyFfn = Ffn | PackedFfn
"""The weights of an FFN in any type."""

Matrix = jax.Array | PackedMatrix
"""A matrix [out, in] in any weight type."""
