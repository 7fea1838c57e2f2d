"""A model file or folder, opened but not read: what every reader of this package returns."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pjax.model_config import ModelConfig
from pjax.weights import QUANTISED_DTYPES


class SourceTensor(NamedTuple):
    """One weight as found in a file.

    Attributes:
        name: the tensor's name in the file, for messages.
        file: the file it came from.
        read: returns the array in its canonical orientation, in the stored type: where possible a read-only
            view of the mapped file, whose bytes are read when they are first looked at.
        shape: of what `read` returns.
        dtype: of what `read` returns.
        stored: returns what it is made from as it lies in the file, of any type and shape: a view of the
            mapped file.
        quantised_as: of pjax's quantised types the one nearest to the stored type: "q4_0" for itself, "q8_0"
            for all others; None for weights stored as floats.
    """

    name: str
    file: str
    read: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: Callable[[], np.ndarray]
    quantised_as: str | None = None


class ModuleTypes(NamedTuple):
    """Weight types of a module's matrices.

    Attributes:
        read_as: the float type in which they are read.
        held_as: that of the loaded model: the same, or a quantised one made of it.
    """

    read_as: str
    held_as: str


def module_types(tensors: Mapping[str, SourceTensor], dtype: str | None) -> ModuleTypes:
    """Which types the matrices of a module get when it is loaded.

    They have one type, whatever the file mixes. Only rows of weights are quantised: `up` with the rest of its
    FFN, or `weight`; learned positions are not.

    Args:
        tensors: of one module, by their names in it.
        dtype: as of `load_model`.
    """
    stored = {str(tensor.dtype) for tensor in tensors.values() if len(tensor.shape) > 1}
    read_as = stored.pop() if len(stored) == 1 else "float32"
    if dtype is not None and dtype not in QUANTISED_DTYPES:
        read_as = dtype
    rows = tensors.get("up", tensors.get("weight"))
    quantised = None if rows is None else rows.quantised_as if dtype is None else dtype
    return ModuleTypes(read_as, quantised if quantised in QUANTISED_DTYPES else read_as)


class StoredPredictors(NamedTuple):
    """PowerInfer's predictors as found in a file: fc2 @ relu(fc1 @ x), with x before the FFN's norm.

    For a parallel block (Falcon) x is the layer's input.

    Attributes:
        layers: for each layer fc1 [rank, model] and fc2 [neurons, rank].
        threshold: a neuron is predicted active if its score is at least this.
    """

    layers: tuple[tuple[SourceTensor, SourceTensor], ...]
    threshold: float


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model file or folder, opened but not read.

    Attributes:
        config: what the decoder is.
        tensors: canonical dotted name (`layers.0.ffn.up`) to the tensor that fills it.
        predictors: that the file brings along, or None.
    """

    config: ModelConfig
    tensors: dict[str, SourceTensor]
    predictors: StoredPredictors | None = None
