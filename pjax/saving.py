"""Writes a decoder as a Hugging Face folder, which pjax and other libraries load."""

import os

import numpy as np
from flax import nnx

from pjax.formats import write_checkpoint
from pjax.layers import PackedRows
from pjax.model import Decoder, weight_name


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
    tensors = {}
    for variable_path, variable in nnx.to_flat_state(nnx.state(model)):
        if isinstance(variable, PackedRows):
            raise ValueError(
                f"model: {weight_name(variable_path)} is quantised, and a Hugging Face folder holds float "
                'weights; load the model with dtype="bfloat16" and save that.'
            )
        tensors[weight_name(variable_path)] = np.asarray(variable[...])
    write_checkpoint(path, model.config, tensors)
