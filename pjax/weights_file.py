"""`weights.pack`: the weights of a prepared model as its programs use them, so that nothing is made again.

It is a safetensors file of the decoder's own arrays: canonical names, `down` turned, quantised rows packed as
the kernels read them. They are read into memory on large pages, from which decoding is faster than from the
mapped file. The file is used only if it is whole and was made from the weights that are there now.
"""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from pjax.base import VERSION
from pjax.formats.checkpoint import Checkpoint, SourceTensor
from pjax.formats.mapped import add_up, describe_stored, load_array
from pjax.formats.stored import open_safetensors, safetensors_metadata, safetensors_pieces
from pjax.layers import PackedRows, SparseFfn
from pjax.model import Decoder, Linear
from pjax.model_config import ModelConfig
from pjax.storage import weight_name
from pjax.weights import FLOAT_DTYPES, PackedFfn, PackedMatrix, row_bytes
from pjax.workdir import fingerprint, write_atomically

WEIGHTS_FILE = "weights.pack"
"""Its name in a workdir."""


def weights_origin(checkpoint: Checkpoint, dtype: str | None) -> str:
    """A hash of what weights are made from: the stored tensors, sampled, and the type asked for.

    Args:
        checkpoint: the opened model.
        dtype: as of `load_model`.
    """
    tensors = {name: describe_stored(tensor) for name, tensor in checkpoint.tensors.items()}
    return fingerprint(VERSION, dtype, tensors)


def save_weights(file: Path, model: Decoder, origin: str) -> None:
    """Writes the weights, whole or not at all. On a full disk it only warns: no run depends on the file.

    Args:
        file: in an existing folder; is replaced.
        model: of weights of any types.
        origin: from `weights_origin`.
    """
    state = nnx.to_flat_state(nnx.state(model))
    arrays = {weight_name(path): np.asarray(variable[...]) for path, variable in state}
    formats = {weight_name(path): getattr(module, "format", None) for path, module in nnx.iter_modules(model)}
    metadata = {
        "origin": origin,
        "formats": json.dumps({name: format for name, format in formats.items() if format is not None}),
    }
    metadata["checksum"] = _checksum(arrays, metadata)
    try:
        write_atomically(file, *safetensors_pieces(arrays, metadata))
    except OSError as error:
        logging.warning("%s; the next run prepares the weights again", error)


def load_weights(file: Path, config: ModelConfig, origin: str) -> Decoder | None:
    """Reads the weights.

    Args:
        file: what `save_weights` wrote.
        config: of the model.
        origin: what the weights must have been made from.

    Returns:
        None if there is no such file, if it is damaged (with a note in the log), or if its weights were made
        from others.
    """
    if not file.is_file():
        return None
    try:
        tensors, metadata = open_safetensors(file), safetensors_metadata(file)
        if metadata.get("origin") != origin:
            return None
        model = Decoder(config, rngs=None)
        slots = _slots(model, dict(json.loads(metadata["formats"])))
        _check_fit(slots, tensors)
        arrays = {name: load_array(tensor, tensor.dtype) for name, tensor in tensors.items()}
        if _checksum(arrays, metadata) != metadata["checksum"]:
            raise ValueError("its checksum is wrong")
    except (ValueError, LookupError, TypeError, RecursionError, OSError) as error:
        logging.warning("%s is damaged (%s) and is not used", file, error)
        return None
    for name, variable in slots.items():
        variable.set_value(jax.device_put(arrays[name]))
    return model


def _slots(model: Decoder, formats: dict[str, str]) -> dict[str, nnx.Variable]:
    """The model's variables by name, of the types that they will have."""
    slots = {}
    for path, module in nnx.iter_modules(model):
        stem = weight_name(path)
        if format := formats.get(stem):
            _make_packed(module, format)
        own = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Variable)}
        slots |= {f"{stem}.{name}".lstrip("."): variable for name, variable in own.items()}
    return slots


def _make_packed(module: nnx.Module, format: str) -> None:
    """Gives a module rows of that format, yet to be set."""
    if isinstance(module, Linear):
        rows = _rows(module.weight.shape[0], row_bytes(format, module.width))
        module.set_weight(PackedMatrix(rows, format, module.width))
    elif isinstance(module, SparseFfn):
        num_bytes = row_bytes(format, module.model) * (3 if module.gated else 2)
        rows = _rows(module.up.shape[0], num_bytes)
        biases = (None if bias is None else bias[...] for bias in (module.gate_bias, module.up_bias))
        module.set_weights(PackedFfn(rows, format, module.model, module.gated, *biases))


def _rows(num_rows: int, num_bytes: int) -> Any:
    """What takes the place of packed rows until they are read."""
    return jax.ShapeDtypeStruct((num_rows, num_bytes), np.uint8)


def _check_fit(slots: dict[str, nnx.Variable], tensors: dict[str, SourceTensor]) -> None:
    """Raises ValueError unless there is a weight of the right shape and kind for each variable."""
    if slots.keys() != tensors.keys():
        raise ValueError(f"it lacks or has too much of: {sorted(slots.keys() ^ tensors.keys())[:4]}")
    for name, variable in slots.items():
        found = tensors[name]
        kinds = FLOAT_DTYPES if len(variable.shape) > 1 else ("float32",)
        if isinstance(variable, PackedRows):
            kinds = ("uint8",)
        if found.shape != variable.shape or str(found.dtype) not in kinds:
            raise ValueError(
                f"{name}: expected {' or '.join(kinds)} {list(variable.shape)}, found {found.dtype} "
                f"{list(found.shape)}"
            )


def _checksum(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """Sees every byte, and that at the speed of memory."""
    facts = [[name, str(array.dtype), list(array.shape), add_up(array)] for name, array in arrays.items()]
    return fingerprint(sorted(facts), metadata["origin"], metadata["formats"])
