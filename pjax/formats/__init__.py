"""Foreign files in: checkpoints, tokenizers and texts."""

from pjax.formats.huggingface import read_checkpoint, write_checkpoint
from pjax.formats.text import read_texts

__all__ = ["read_checkpoint", "read_texts", "write_checkpoint"]
