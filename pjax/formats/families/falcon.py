"""Falcon: 7B (one key and value), 40B (grouped), 11B, and RW (ALiBi, sequential); old names and new."""

from collections.abc import Collection
from typing import Any

from pjax.formats.config_file import ConfigFile
from pjax.formats.families.family import MAX_LAYERS, Family, Source, read_ids, read_rope, rope_values
from pjax.model_config import ModelConfig


def _config(source: Source) -> ModelConfig:
    file = source.config
    heads, model = _either(file, "num_attention_heads", "n_head"), file.count("hidden_size")
    if model % heads:
        raise file.error("hidden_size", f"a multiple of the number of heads, {heads}")
    # The first configs (RefinedWeb) do not say which architecture they are; the norms' names do.
    grouped = file.flag("new_decoder_architecture", any(".ln_attn." in name for name in source.names))
    parallel = grouped or file.flag("parallel_attn", True)
    if grouped:
        kv_heads = _either(file, "num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if file.flag("multi_query", True) else heads
    if heads % kv_heads:
        raise file.error("num_kv_heads", f"a divisor of the number of heads, {heads}")
    alibi, bias = file.flag("alibi", False), file.flag("bias", False)
    old_key = "hidden_act" if "hidden_act" in file.values else "activation"
    return ModelConfig(
        name=file.name,
        family="falcon",
        vocab=file.count("vocab_size"),
        model=model,
        neurons=(file.count("ffn_hidden_size", 4 * model),) * _num_layers(file),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model // heads,
        context=file.count("max_position_embeddings", 2048),
        activation=file.activation(old_key, "gelu", source.activation),
        gated=False,
        norm="layer",
        norm_eps=file.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        block="parallel" if parallel else "sequential",
        rope=None if alibi else read_rope(file, model // heads),
        alibi=alibi,
        attention_bias=bias,
        mlp_bias=bias,
        tied=file.flag("tie_word_embeddings", True),
        **read_ids(source, bos=11, eos=11),
    )


def _num_layers(file: ConfigFile) -> int:
    return _either(file, "num_hidden_layers", "n_layer", most=MAX_LAYERS)


def _either(file: ConfigFile, key: str, old_key: str, default: int | None = None, **limit: int) -> int:
    return file.count(old_key if old_key in file.values and key not in file.values else key, default, **limit)


def _values(config: ModelConfig) -> dict[str, Any]:
    grouped = config.block == "parallel"  # which covers the 7B layout: one group, and its norm twice
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": config.vocab,
        "hidden_size": config.model,
        "ffn_hidden_size": config.neurons[0],
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_kv_heads": config.kv_heads,
        "max_position_embeddings": config.context,
        "activation": config.activation,
        "layer_norm_epsilon": config.norm_eps,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if grouped else None,
        "parallel_attn": grouped,
        "multi_query": config.kv_heads == 1,
        "alibi": config.alibi,
        "rope_parameters": rope_values(config.rope) if config.rope else None,
        "bias": config.attention_bias,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }


def _modules(config: ModelConfig, names: Collection[str]) -> dict[str, str]:
    layer, shared = "transformer.h.{n}", any(".input_layernorm." in name for name in names)
    if config.block == "sequential":
        norms = ("input_layernorm", "post_attention_layernorm")
    else:  # 7B and 11B have one norm for both
        norms = ("input_layernorm", "input_layernorm") if shared else ("ln_attn", "ln_mlp")
    return {
        "embed": "transformer.word_embeddings",
        "layers.N.attention_norm": f"{layer}.{norms[0]}",
        "layers.N.attention.q": f"{layer}.self_attention.query_key_value",
        "layers.N.attention.k": f"{layer}.self_attention.query_key_value",
        "layers.N.attention.v": f"{layer}.self_attention.query_key_value",
        "layers.N.attention.o": f"{layer}.self_attention.dense",
        "layers.N.ffn_norm": f"{layer}.{norms[1]}",
        "layers.N.ffn.up": f"{layer}.mlp.dense_h_to_4h",
        "layers.N.ffn.down": f"{layer}.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    }


_FALCON = Family(("falcon", "RefinedWeb", "RefinedWebModel"), _config, _values, _modules, fused_qkv=True)

FALCON_FAMILIES = {"FalconForCausalLM": _FALCON, "RWForCausalLM": _FALCON}
