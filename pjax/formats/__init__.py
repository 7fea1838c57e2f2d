"""Foreign files in: checkpoints, tokenizers, texts."""
