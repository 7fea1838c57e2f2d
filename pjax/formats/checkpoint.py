"""A model file or folder, opened but not read: what every reader of this package returns."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pjax.model_config import ModelConfig


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
