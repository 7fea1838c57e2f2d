"""LLaMA and its relatives: RMSNorm or LayerNorm, rotary positions, an FFN with or without a gate."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any

from pjax.formats.families.family import (
    MAX_LAYERS,
    Family,
    Source,
    read_heads,
    read_ids,
    read_rope,
    rope_values,
)
from pjax.model_config import ModelConfig


def _llama_config(source: Source) -> ModelConfig:
    file = source.config
    sizes = read_heads(file)
    return ModelConfig(
        name=file.name,
        family="llama",
        neurons=(file.count("intermediate_size"),) * file.count("num_hidden_layers", most=MAX_LAYERS),
        activation=file.activation("hidden_act", "silu", source.activation),
        gated=True,
        norm="rms",
        norm_eps=file.number("rms_norm_eps", 1e-6),
        rope=read_rope(file, sizes["head_dim"]),
        attention_bias=file.flag("attention_bias", False),
        mlp_bias=file.flag("mlp_bias", False),
        tied=file.flag("tie_word_embeddings", False),
        **sizes,
        **read_ids(source, bos=1, eos=2),
    )


def _mistral_config(source: Source) -> ModelConfig:
    window = source.config.count_or_none("sliding_window", 4096)
    return _llama_config(source).replace(family="mistral", window=window)


def _bamboo_config(source: Source) -> ModelConfig:
    # The file says only "relu"; the architecture's code rectifies gate and up (arXiv 2406.05955).
    activation = source.activation or "drelu"
    return _mistral_config(source._replace(activation=activation)).replace(family="bamboo")


def _minicpm_config(source: Source) -> ModelConfig:
    file = source.config
    config = _llama_config(source)
    return config.replace(
        family="minicpm",
        tied=file.flag("tie_word_embeddings", True),
        embed_scale=file.number("scale_emb", 1.0),
        residual_scale=file.number("scale_depth", 1.0) / math.sqrt(config.layers),
        logit_scale=file.number("dim_model_base", 1.0) / config.model,
    )


def _arcee_config(source: Source) -> ModelConfig:
    activation = source.activation or source.config.activation("hidden_act", "relu2", None)
    return _llama_config(source._replace(activation=activation)).replace(family="arcee", gated=False)


def _nemotron_config(source: Source) -> ModelConfig:
    file = source.config
    config = _arcee_config(source)
    return config.replace(
        family="nemotron",
        norm="layer",
        norm_bias=True,
        norm_eps=file.number("norm_eps", 1e-5),
        rope=read_rope(file, config.head_dim, partial=0.5),
    )


def _values(config: ModelConfig, *, architecture: str, model_type: str) -> dict[str, Any]:
    """The keys that all of these families share."""
    name, _, threshold = config.activation.partition(":")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.model,
        "intermediate_size": config.neurons[0],
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "hidden_act": name,
        **({"hidden_act_param": float(threshold)} if threshold else {}),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta if config.rope else None,
        "rope_parameters": rope_values(config.rope) if config.rope else None,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }


def _mistral_values(config: ModelConfig, **names: str) -> dict[str, Any]:
    return _values(config, **names) | {"sliding_window": config.window}


def _minicpm_values(config: ModelConfig, **names: str) -> dict[str, Any]:
    return _values(config, **names) | {
        "scale_emb": config.embed_scale,
        "scale_depth": config.residual_scale * math.sqrt(config.layers),
        "dim_model_base": config.logit_scale * config.model,
    }


def _nemotron_values(config: ModelConfig, **names: str) -> dict[str, Any]:
    values = _values(config, **names)
    width = config.rope.width if config.rope else 0
    values["norm_eps"] = values.pop("rms_norm_eps")
    values["rope_parameters"] |= {"partial_rotary_factor": width / config.head_dim}
    return values | {"partial_rotary_factor": width / config.head_dim}


def _modules(config: ModelConfig, names: Collection[str]) -> dict[str, str]:
    del config, names
    return {
        "embed": "model.embed_tokens",
        "layers.N.attention_norm": "model.layers.{n}.input_layernorm",
        "layers.N.attention.q": "model.layers.{n}.self_attn.q_proj",
        "layers.N.attention.k": "model.layers.{n}.self_attn.k_proj",
        "layers.N.attention.v": "model.layers.{n}.self_attn.v_proj",
        "layers.N.attention.o": "model.layers.{n}.self_attn.o_proj",
        "layers.N.ffn_norm": "model.layers.{n}.post_attention_layernorm",
        "layers.N.ffn.gate": "model.layers.{n}.mlp.gate_proj",
        "layers.N.ffn.up": "model.layers.{n}.mlp.up_proj",
        "layers.N.ffn.down": "model.layers.{n}.mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    }


def _family(architecture: str, model_type: str, config, values=_values, **facts: Any) -> Family:
    values = partial(values, architecture=architecture, model_type=model_type)
    return Family((model_type,), config, values, _modules, **facts)


LLAMA_FAMILIES = {
    "LlamaForCausalLM": _family("LlamaForCausalLM", "llama", _llama_config),
    "SparseLlamaForCausalLM": _family("SparseLlamaForCausalLM", "sparsellama", _llama_config),  # ProSparse
    "MistralForCausalLM": _family("MistralForCausalLM", "mistral", _mistral_config, _mistral_values),
    "BambooForCausalLM": _family("BambooForCausalLM", "bamboo", _bamboo_config, _mistral_values),
    "MiniCPMForCausalLM": _family("MiniCPMForCausalLM", "minicpm", _minicpm_config, _minicpm_values),
    "ArceeForCausalLM": _family("ArceeForCausalLM", "arcee", _arcee_config),
    "NemotronForCausalLM": _family(
        "NemotronForCausalLM", "nemotron", _nemotron_config, _nemotron_values, norm_offset=1.0
    ),
}
