"""Tokenizers, from whatever files a model has."""

import os

from pjax.formats.files import expand_path
from pjax.formats.gguf_file import open_gguf
from pjax.formats.tokenizer.folder import folder_tokenizer
from pjax.formats.tokenizer.from_gguf import gguf_tokenizer
from pjax.formats.tokenizer.tokenizer import StreamDecoder, Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer"]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a model's tokenizer, with its chat template.

    Args:
        path: a Hugging Face folder (tokenizer.json, tokenizer.model, or vocab.json with merges.txt), or a
            GGUF file with a tokenizer in its metadata.

    Raises:
        FileNotFoundError: no such path, or no tokenizer there.
        ValueError: a broken file, a kind of tokenizer that is not supported, or a package that is missing.
    """
    path = expand_path(path)
    return gguf_tokenizer(open_gguf(path)) if path.is_file() else folder_tokenizer(path)
