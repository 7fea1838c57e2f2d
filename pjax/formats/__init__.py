"""Foreign files in: checkpoints, tokenizers and texts."""

from pjax.formats.files import expand_path, read_json
from pjax.formats.huggingface import write_checkpoint
from pjax.formats.model_files import read_checkpoint
from pjax.formats.text import read_texts
from pjax.formats.tokenizer import load_tokenizer

__all__ = ["expand_path", "load_tokenizer", "read_checkpoint", "read_json", "read_texts", "write_checkpoint"]
