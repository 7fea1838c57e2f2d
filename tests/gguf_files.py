"""Writes models as GGUF files with the `gguf` package, by the conventions of llama.cpp and PowerInfer."""

from pathlib import Path

import gguf
import numpy as np

from pjax.formats.checkpoint import Checkpoint
from pjax.model_config import ModelConfig

F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    powerinfer: bool = False,
    keys: dict | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a GGUF file of the weights of a checkpoint, and returns its path.

    Args:
        path: of the file.
        checkpoint: what to write.
        kind: type of the matrices.
        powerinfer: whether to write it as PowerInfer does: its magic, the down projection transposed.
        keys: more metadata, all texts, integers or floats; a None leaves a key out.
        extra: more tensors.
    """
    config = checkpoint.config
    name = {"mistral": "llama"}.get(config.family, config.family)
    writer = gguf.GGUFWriter(path, name)
    for key, value in (metadata(config, name) | (keys or {})).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    weights = {key: np.asarray(tensor.read(), np.float32) for key, tensor in checkpoint.tensors.items()}
    for key, array in tensors(weights, config, powerinfer).items():
        stored = kind if array.ndim > 1 else F32
        if stored == F32:
            writer.add_tensor(key, np.ascontiguousarray(array))
        else:
            writer.add_tensor(
                key, gguf.quants.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored
            )
    for key, array in (extra or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if powerinfer:
        path.write_bytes(b"PWRI" + path.read_bytes()[4:])
    return path


def metadata(config: ModelConfig, name: str) -> dict:
    """Hyperparameters by llama.cpp's keys."""
    values = {
        f"{name}.block_count": config.layers,
        f"{name}.context_length": config.context,
        f"{name}.embedding_length": config.model,
        f"{name}.feed_forward_length": config.neurons[0],
        f"{name}.attention.head_count": config.heads,
        f"{name}.attention.head_count_kv": config.kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_{'rms_' if config.norm == 'rms' else ''}epsilon": config.norm_eps,
        f"{name}.attention.sliding_window": config.window,
        "tokenizer.ggml.bos_token_id": config.bos_id,
        "tokenizer.ggml.eos_token_id": config.eos_ids[0],
    }
    if config.rope:
        values |= {
            f"{name}.rope.freq_base": config.rope.theta,
            f"{name}.rope.dimension_count": config.rope.width,
        }
        if config.rope.kind == "linear":
            values |= {
                f"{name}.rope.scaling.type": "linear",
                f"{name}.rope.scaling.factor": config.rope.factor,
            }
    if name == "minicpm":
        values |= {
            "minicpm.embedding_scale": config.embed_scale,
            "minicpm.residual_scale": config.residual_scale,
            "minicpm.logit_scale": 1 / config.logit_scale,
        }
    return values


def tensors(weights: dict[str, np.ndarray], config: ModelConfig, powerinfer: bool) -> dict[str, np.ndarray]:
    """The weights by their names in the file, as they lie there."""
    top = {
        "embed.weight": "token_embd.weight",
        "head.weight": "output.weight",
        "positions": "position_embd.weight",
        "final_norm.scale": "output_norm.weight",
        "final_norm.bias": "output_norm.bias",
    }
    found = {top[key]: array for key, array in weights.items() if key in top}
    for n in range(config.layers):
        layer = {
            key.removeprefix(f"layers.{n}."): array
            for key, array in weights.items()
            if key.startswith(f"layers.{n}.")
        }
        block = {}
        for part in ("q", "k", "v", "o"):
            for leaf in ("weight", "bias"):
                array = layer.get(f"attention.{part}.{leaf}")
                if array is not None:
                    block[f"attn_{'output' if part == 'o' else part}.{leaf}"] = array
        if config.family in ("llama", "mistral", "bamboo", "minicpm", "arcee"):
            for key in [key for key in block if key[:6] in ("attn_q", "attn_k")]:
                heads = config.heads if key[5] == "q" else config.kv_heads
                block[key] = reorder(block[key], heads)
        if config.family == "falcon":
            for leaf in [leaf for leaf in ("weight", "bias") if f"attn_q.{leaf}" in block]:
                block[f"attn_qkv.{leaf}"] = np.concatenate([block.pop(f"attn_{p}.{leaf}") for p in "qkv"])
        norms = ("attn_norm_2", "attn_norm") if config.family == "falcon" else ("attn_norm", "ffn_norm")
        for ours, theirs in zip(("attention_norm", "ffn_norm"), norms, strict=True):
            block[f"{theirs}.weight"] = layer[f"{ours}.scale"]
            if f"{ours}.bias" in layer:
                block[f"{theirs}.bias"] = layer[f"{ours}.bias"]
        for part in ("gate", "up", "down"):
            theirs = "ffn_down_t" if part == "down" and powerinfer else f"ffn_{part}"
            if f"ffn.{part}" in layer:
                matrix = layer[f"ffn.{part}"]  # a neuron is a row
                block[f"{theirs}.weight"] = matrix.T if theirs == "ffn_down" else matrix
            if f"ffn.{part}_bias" in layer:
                block[f"{theirs}.bias"] = layer[f"ffn.{part}_bias"]
        found |= {f"blk.{n}.{key}": array for key, array in block.items()}
    return found


def reorder(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converters do to q and k of models whose RoPE turns adjacent entries."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
