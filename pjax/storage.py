"""A decoder in and out of files and weight types: load, save, quantise, fingerprint."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax import ops
from pjax.formats import read_checkpoint, write_checkpoint
from pjax.formats.checkpoint import Checkpoint, module_types
from pjax.formats.mapped import load_array
from pjax.layers import PackedRows, SparseFfn
from pjax.memory import on_large_pages
from pjax.model import Decoder, Linear
from pjax.weights import DTYPES, QUANTISED_DTYPES, Ffn
from pjax.workdir import fingerprint


def weight_name(path: tuple) -> str:
    """The canonical dotted name of a weight: ("layers", 0, "ffn", "up") -> "layers.0.ffn.up"."""
    return ".".join(str(part) for part in path)


def load_model(
    path: str | os.PathLike, *, dtype: str | None = None, activation: str | None = None
) -> Decoder:
    """Loads a model.

    Args:
        path: a Hugging Face folder or a GGUF file.
        dtype: storage type of the matrices: "float32", "bfloat16", "float16", or "q8_0" and "q4_0" as
            `quantize` makes them. None keeps the file's; of a GGUF file's quantised types, Q4_0 stays and all
            others become q8_0. Norms and biases are always float32.
        activation: overrides the activation that the file names; a GGUF file may need it.

    Raises:
        ValueError, FileNotFoundError: if the file is not there, broken or of an unknown kind.
    """
    _check_dtype(dtype)
    return load_checkpoint(read_checkpoint(path, activation=activation), dtype=dtype)


def load_checkpoint(checkpoint: Checkpoint, *, dtype: str | None = None) -> Decoder:
    """`load_model`, of a model that is open already."""
    _check_dtype(dtype)
    tensors, model = checkpoint.tensors, Decoder(checkpoint.config, rngs=None)
    # Module by module, so that of a quantised model no more than one FFN is ever there in floats.
    for module_path, module in nnx.iter_modules(model):
        own = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Variable)}
        stored = {name: tensors[weight_name((*module_path, name))] for name in own}
        types = module_types(stored, dtype)
        for name, tensor in stored.items():
            array = load_array(tensor, jnp.dtype("float32" if len(tensor.shape) == 1 else types.read_as))
            own[name].set_value(jax.device_put(array))
        if types.held_as in QUANTISED_DTYPES:
            _pack(module, types.held_as)
    return model


def quantize(model: Decoder, dtype: str) -> Decoder:
    """Returns the model with its matrices in a quantised type; the given one stays as it is.

    Embedding, projections, FFNs and head are quantised by rows, as GGUF's reference does; norms, biases and
    learned positions are not. Matrices that already are quantised stay as they are.

    Args:
        model: of widths that are multiples of 32.
        dtype: "q8_0" or "q4_0".

    Raises:
        ValueError: another type, or a width that is no multiple of 32.
    """
    _check_decoder(model)
    if dtype not in QUANTISED_DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(QUANTISED_DTYPES)}, got {dtype!r}.")
    copy = nnx.merge(*nnx.split(model))  # shares the arrays
    for _, module in nnx.iter_modules(copy):
        _pack(module, dtype)
    return copy


def _pack(module: nnx.Module, dtype: str) -> None:
    """Quantises the module's own matrices, if it has any in floats."""
    if isinstance(module, Linear) and module.format is None:
        matrix = ops.pack_matrix(module.weight[...], dtype)
        module.set_weight(dataclasses.replace(matrix, rows=on_large_pages(matrix.rows)))
    if isinstance(module, SparseFfn) and isinstance(floats := module.weights, Ffn):
        ffn = ops.pack_ffn(floats, dtype)
        module.set_weights(dataclasses.replace(ffn, rows=on_large_pages(ffn.rows)))


def _check_decoder(model: Decoder) -> None:
    if not isinstance(model, Decoder):
        raise ValueError(f"model: expected a Decoder, as load_model gives, got {type(model).__name__}.")


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected None or one of {', '.join(DTYPES)}, got {dtype!r}.")


def save_model(model: Decoder, path: str | os.PathLike) -> None:
    """Writes config.json, generation_config.json and model.safetensors, in the layout of the model's family.

    `load_model(path)` gives the same model, bit for bit. The folder appears complete or not at all. The
    tokenizer's files are not written: copy them from where the model came from.

    Needs host memory for what the file lays out otherwise, the down matrices and Falcon's q, k and v, and
    for all of a model that is not in host memory.

    Args:
        model: of float weights.
        path: a folder that does not exist yet; its name becomes the model's.

    Raises:
        FileExistsError: the path exists.
        ValueError: quantised weights, or a config that no config.json of the family can express.
    """
    _check_decoder(model)
    tensors = {}
    for variable_path, variable in nnx.to_flat_state(nnx.state(model)):
        if isinstance(variable, PackedRows):
            raise ValueError(
                f"model: {weight_name(variable_path)} is quantised, and a Hugging Face folder holds float "
                'weights; load the model with dtype="bfloat16" and save that.'
            )
        tensors[weight_name(variable_path)] = np.asarray(variable[...])
    write_checkpoint(path, model.config, tensors)


FINGERPRINT_SAMPLES = 4096
"""Elements of a tensor that its fingerprint looks at: any retraining changes nearly all of them, and a
70B model is done in a second."""


def model_fingerprint(model: Decoder, *, full: bool = False) -> str:
    """A hash of the config and of each weight's name, shape, type and sampled bytes.

    Args:
        model: the decoder.
        full: hash every byte.
    """
    parts: list = [dataclasses.asdict(model.config)]
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        array = np.asarray(variable[...])
        step = 1 if full else max(1, array.size // FINGERPRINT_SAMPLES)
        parts += [weight_name(path), list(array.shape), array.reshape(-1)[::step]]
    return fingerprint(*parts)
