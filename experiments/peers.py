"""Other engines on the same shape and type, for comparison: llama.cpp through llama-cpp-python."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from pjax.model_config import ModelConfig

_TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


def llama_cpp_decoder(
    config: ModelConfig, dtype: str, *, context: int, threads: int
) -> Callable[[int], None]:
    """A function that decodes some tokens from `context` on with llama.cpp, dense, on random weights.

    Args:
        config: a LLaMA's; llama.cpp computes SiLU, which costs what ReLU does.
        dtype: of all matrices.
        context: tokens in the cache.
        threads: to use.

    Raises:
        ImportError: llama-cpp-python is not installed; it comes with the extra `bench`.
        ValueError: a model that is no LLaMA.
    """
    from llama_cpp import Llama

    if config.family != "llama":
        raise ValueError(f"--peer=llama_cpp: expected the shape of a LLaMA, got {config.name}.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.gguf"
        _write_gguf(path, config, dtype)
        engine = Llama(
            str(path),
            n_ctx=context + 1024,
            n_threads=threads,
            n_threads_batch=threads,
            use_mmap=False,
            verbose=False,
        )
    engine.eval([1] * context)

    def decode(tokens: int) -> None:
        engine.n_tokens = context
        for _ in range(tokens):
            engine.eval([1])

    return decode


def _write_gguf(path: Path, config: ModelConfig, dtype: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.model)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.neurons[0])
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def add(name: str, rows: int, width: int) -> None:
        writer.add_tensor(f"{name}.weight", _random(rng, rows, width, dtype), raw_dtype=_TYPES[dtype])

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(config.model, np.float32))

    add("token_embd", config.vocab, config.model)
    for layer, neurons in enumerate(config.neurons):
        block = f"blk.{layer}"
        add_norm(f"{block}.attn_norm")
        add(f"{block}.attn_q", queries, config.model)
        add(f"{block}.attn_k", keys, config.model)
        add(f"{block}.attn_v", keys, config.model)
        add(f"{block}.attn_output", config.model, queries)
        add_norm(f"{block}.ffn_norm")
        add(f"{block}.ffn_gate", neurons, config.model)
        add(f"{block}.ffn_up", neurons, config.model)
        add(f"{block}.ffn_down", config.model, neurons)
    add_norm("output_norm")
    if not config.tied:
        add("output", config.vocab, config.model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random(rng: np.random.Generator, rows: int, width: int, dtype: str) -> np.ndarray:
    """Random weights of deviation near width**-0.5, as the file stores them."""
    scale = width**-0.5
    if dtype in ("q8_0", "q4_0"):
        code_bytes, deviation = (32, 74.0) if dtype == "q8_0" else (16, 4.6)  # of uniform codes
        blocks = np.empty((rows, width // 32, 2 + code_bytes), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(scale / deviation).tobytes(), np.uint8)
        blocks[..., 2:] = rng.integers(0, 256, (rows, width // 32, code_bytes), np.uint8)
        return blocks.reshape(rows, -1)
    values = rng.standard_normal((rows, width), np.float32) * np.float32(scale)
    if dtype == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint8)
    return values.astype(dtype)
