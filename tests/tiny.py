"""Tiny random Hugging Face checkpoints, written without pjax, and comparing them with what was read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, MODEL, LAYERS, HEADS, CONTEXT = 64, 16, 2, 4, 48


def tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    kv_heads: int = 2,
    neurons: int = 40,
    tied: bool = False,
    bias: bool = False,
    dtype: Any = np.float32,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Writes a LLaMA folder and returns its tensors by their names in the file.

    Args:
        path: a folder that does not exist yet.
        seed: of all weights.
        kv_heads: key and value heads, of 4 heads of width 4.
        neurons: FFN rows.
        tied: leaves lm_head out.
        bias: adds biases to attention and FFN.
        dtype: stored type.
        **config: further or other values of config.json.
    """
    key_width = MODEL // HEADS * kv_heads
    linear = {
        "self_attn.q_proj": (MODEL, MODEL),
        "self_attn.k_proj": (key_width, MODEL),
        "self_attn.v_proj": (key_width, MODEL),
        "self_attn.o_proj": (MODEL, MODEL),
        "mlp.gate_proj": (neurons, MODEL),
        "mlp.up_proj": (neurons, MODEL),
        "mlp.down_proj": (MODEL, neurons),
    }
    shapes = {"model.embed_tokens.weight": (VOCAB, MODEL), "model.norm.weight": (MODEL,)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        shapes |= _linear_shapes(stem, linear, bias)
        shapes |= {f"{stem}.{n}.weight": (MODEL,) for n in ("input_layernorm", "post_attention_layernorm")}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, MODEL)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "relu",
        "hidden_size": MODEL,
        "intermediate_size": neurons,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _write(path, values | config, shapes, seed, dtype)


def tiny_opt(
    path: Path, *, seed: int = 0, neurons: int = 40, bias: bool = True, dtype: Any = np.float32, **config: Any
) -> dict[str, np.ndarray]:
    """Writes an OPT folder and returns its tensors by their names in the file.

    Args:
        path: a folder that does not exist yet.
        seed: of all weights.
        neurons: FFN rows.
        bias: adds biases to attention and FFN; the norms have theirs in any case.
        dtype: stored type.
        **config: further or other values of config.json.
    """
    linear = {f"self_attn.{n}_proj": (MODEL, MODEL) for n in ("q", "k", "v", "out")}
    linear |= {"fc1": (neurons, MODEL), "fc2": (MODEL, neurons)}
    stem = "model.decoder"
    shapes = {
        f"{stem}.embed_tokens.weight": (VOCAB, MODEL),
        f"{stem}.embed_positions.weight": (CONTEXT + 2, MODEL),
    }
    norms = [f"{stem}.final_layer_norm"]
    for layer in range(LAYERS):
        shapes |= _linear_shapes(f"{stem}.layers.{layer}", linear, bias)
        norms += [f"{stem}.layers.{layer}.{n}" for n in ("self_attn_layer_norm", "final_layer_norm")]
    shapes |= {f"{norm}.{leaf}": (MODEL,) for norm in norms for leaf in ("weight", "bias")}
    values = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": bias,
        "ffn_dim": neurons,
        "hidden_size": MODEL,
        "layer_norm_elementwise_affine": True,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
        "word_embed_proj_dim": MODEL,
        "bos_token_id": 2,
        "eos_token_id": 2,
    }
    return _write(path, values | config, shapes, seed, dtype)


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes values of a folder's config.json; `...` removes a key."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def read_all(checkpoint):
    """Every tensor's array, each checked against what the record promised."""
    arrays = {}
    for name, tensor in checkpoint.tensors.items():
        array = arrays[name] = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), name
    return arrays


def by_file_name(checkpoint):
    """The arrays as the file has them: its names, and down turned back."""
    arrays = read_all(checkpoint)
    return {
        tensor.name: arrays[name].T if name.endswith("ffn.down") else arrays[name]
        for name, tensor in checkpoint.tensors.items()
    }


def assert_same(found, expected):
    """Same names, types and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def _linear_shapes(stem: str, linear: dict[str, tuple[int, int]], bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{stem}.{n}.weight": shape for n, shape in linear.items()}
    if bias:
        shapes |= {f"{stem}.{n}.bias": shape[:1] for n, shape in linear.items()}
    return shapes


def _write(path: Path, values: dict, shapes: dict, seed: int, dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        # Large enough that a dropped or swapped norm weight or bias changes the logits visibly.
        noise = rng.normal(size=shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)
        is_scale = "norm" in name and name.endswith("weight")
        tensors[name] = (noise + 1.0 if is_scale else noise).astype(dtype)
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(values, indent=1))
    return tensors
