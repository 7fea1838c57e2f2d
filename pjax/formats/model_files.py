"""Opening a model, whatever kind of file or folder it is in."""

import os

from pjax.formats.checkpoint import Checkpoint
from pjax.formats.files import expand_path
from pjax.formats.gguf_model import read_gguf
from pjax.formats.huggingface import read_folder


def read_checkpoint(path: str | os.PathLike[str], *, activation: str | None = None) -> Checkpoint:
    """Opens a model of a supported family; checks all of it, reads no weight yet.

    Args:
        path: a Hugging Face folder, or a GGUF file of llama.cpp or PowerInfer.
        activation: replaces the activation function that a folder's config.json names; a GGUF file names
            none, so that it is needed there unless the architecture or the model's name tells.

    Raises:
        FileNotFoundError: no such folder or file, or a part of it is missing.
        ValueError: a family or file type that is not supported, a value or tensor that is missing
            or wrong, or a damaged file. The message names the file and what is wrong in it.
    """
    path = expand_path(path)
    if not path.is_file():
        return read_folder(path, activation=activation)
    if path.suffix in (".safetensors", ".bin", ".json"):
        raise ValueError(f"{path}: a part of a Hugging Face model; give the folder it is in.")
    return read_gguf(path, activation=activation)
