"""Other engines on the same shape, for comparison: llama.cpp through llama-cpp-python, and CTranslate2."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    engine = _llama_cpp(config, dtype, context=context + 1024, threads=threads)
    engine.eval([1] * context)

    def decode(tokens: int) -> None:
        engine.n_tokens = context
        for _ in range(tokens):
            engine.eval([1])

    return decode


def llama_cpp_prefill(config: ModelConfig, dtype: str, *, tokens: int, threads: int) -> Callable[[], None]:
    """A function that reads a prompt of so many tokens with llama.cpp; else as `llama_cpp_decoder`."""
    engine = _llama_cpp(config, dtype, context=tokens, threads=threads)

    def prefill() -> None:
        engine.n_tokens = 0
        engine.eval([1] * tokens)

    return prefill


def _llama_cpp(config: ModelConfig, dtype: str, *, context: int, threads: int) -> Any:
    """The engine, with random weights."""
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    if config.family != "llama":
        raise ValueError(f"--peer=llama_cpp: expected the shape of a LLaMA, got {config.name}.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.gguf"
        _write_gguf(path, config, dtype)
        return Llama(
            str(path),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            use_mmap=False,
            verbose=False,
        )


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


def ctranslate2_decoder(config: ModelConfig, *, context: int, threads: int) -> Callable[[int], None]:
    """A function that decodes some tokens from `context` on with CTranslate2 in int8, on random weights.

    Args:
        config: an OPT's, of pre-norm blocks.
        context: tokens in the cache.
        threads: to use.

    Raises:
        ImportError: ctranslate2 is not installed; it comes with the extra `bench`.
        ValueError: a model that is no OPT.
    """
    import ctranslate2  # pyright: ignore[reportMissingImports]

    if config.family != "opt":
        raise ValueError(f"--peer=ctranslate2: expected the shape of an OPT, got {config.name}.")
    with tempfile.TemporaryDirectory() as folder:
        spec = _opt_spec(config)
        spec.validate()
        spec.optimize(quantization="int8")
        spec.save(folder)
        engine = ctranslate2.Generator(folder, compute_type="int8", intra_threads=threads)

    def decode(tokens: int) -> None:
        engine.generate_batch(
            [["1"]],
            static_prompt=["1"] * (context - 1),
            cache_static_prompt=True,
            min_length=tokens,
            max_length=tokens,
            include_prompt_in_result=False,
        )

    return decode


def _opt_spec(config: ModelConfig):
    from ctranslate2.specs import TransformerDecoderModelSpec  # pyright: ignore[reportMissingImports]

    spec = TransformerDecoderModelSpec.from_config(config.layers, config.heads)
    rng = np.random.default_rng(0)

    def matrix(rows: int, width: int) -> np.ndarray:
        return rng.standard_normal((rows, width), np.float32) * np.float32(width**-0.5)

    def linear(layer, rows: int, width: int) -> None:
        layer.weight, layer.bias = matrix(rows, width), np.zeros(rows, np.float32)

    def norm(layer) -> None:
        layer.gamma, layer.beta = np.ones(config.model, np.float32), np.zeros(config.model, np.float32)

    decoder = spec.decoder
    decoder.scale_embeddings = False
    rows = config.context + config.position_offset
    decoder.position_encodings.encodings = np.zeros((rows, config.model), np.float32)
    decoder.embeddings.weight = matrix(config.vocab, config.model)
    decoder.projection.weight = matrix(config.vocab, config.model)
    norm(decoder.layer_norm)
    for layer, neurons in zip(decoder.layer, config.neurons, strict=True):
        norm(layer.self_attention.layer_norm)
        norm(layer.ffn.layer_norm)
        linear(layer.self_attention.linear[0], 3 * config.model, config.model)
        linear(layer.self_attention.linear[1], config.model, config.model)
        linear(layer.ffn.linear_0, neurons, config.model)
        linear(layer.ffn.linear_1, config.model, neurons)
    spec.register_vocabulary([str(i) for i in range(config.vocab)])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "0", "2", "3"
    return spec
