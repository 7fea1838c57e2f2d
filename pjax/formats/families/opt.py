"""OPT in all its layouts (125m to 66b, Galactica): learned positions, LayerNorm, an FFN without a gate."""

from collections.abc import Collection
from typing import Any

from pjax.formats.families.family import MAX_LAYERS, Family, Source, read_ids
from pjax.model_config import ModelConfig

POSITION_OFFSET = 2
"""The first rows of OPT's position table are never used (fairseq kept them for padding)."""


def _config(source: Source) -> ModelConfig:
    file = source.config
    heads, model = file.count("num_attention_heads"), file.count("hidden_size")
    if model % heads:
        raise file.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    before, bias = file.flag("do_layer_norm_before", True), file.flag("enable_bias", True)
    affine = file.flag("layer_norm_elementwise_affine", True)
    return ModelConfig(
        name=file.name,
        family="opt",
        vocab=file.count("vocab_size"),
        model=model,
        neurons=(file.count("ffn_dim"),) * file.count("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=model // heads,
        context=file.count("max_position_embeddings"),
        activation=file.activation("activation_function", "relu", source.activation),
        gated=False,
        norm="layer",
        norm_eps=1e-5,
        norm_scale=affine,
        norm_bias=affine,
        final_norm=not (before and file.flag("_remove_final_layer_norm", False)),
        block="sequential" if before else "post_norm",
        learned_positions=True,
        position_offset=POSITION_OFFSET,
        attention_bias=bias,
        mlp_bias=bias,
        tied=file.flag("tie_word_embeddings", True),
        embed_width=file.count("word_embed_proj_dim", model),
        **read_ids(source, bos=2, eos=2),
    )


def _values(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab,
        "hidden_size": config.model,
        "ffn_dim": config.neurons[0],
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.context,
        "word_embed_proj_dim": config.embed_width,
        "activation_function": config.activation,
        "do_layer_norm_before": config.block != "post_norm",
        "_remove_final_layer_norm": not config.final_norm,
        "layer_norm_elementwise_affine": config.norm_scale,
        "enable_bias": config.attention_bias,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }


def _modules(config: ModelConfig, names: Collection[str]) -> dict[str, str]:
    del names
    layer, attention = "model.decoder.layers.{n}", "model.decoder.layers.{n}.self_attn"
    if config.block == "post_norm":
        norms = {
            "layers.N.attention_norm": "model.decoder.layers.{before}.final_layer_norm",
            "layers.N.ffn_norm": f"{layer}.self_attn_layer_norm",
            "final_norm": "model.decoder.layers.{last}.final_layer_norm",
        }
    else:
        norms = {
            "layers.N.attention_norm": f"{layer}.self_attn_layer_norm",
            "layers.N.ffn_norm": f"{layer}.final_layer_norm",
            "final_norm": "model.decoder.final_layer_norm",
        }
    return norms | {
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "layers.N.attention.q": f"{attention}.q_proj",
        "layers.N.attention.k": f"{attention}.k_proj",
        "layers.N.attention.v": f"{attention}.v_proj",
        "layers.N.attention.o": f"{attention}.out_proj",
        "layers.N.ffn.up": f"{layer}.fc1",
        "layers.N.ffn.down": f"{layer}.fc2",
        "head": "lm_head",
    }


OPT_FAMILIES = {"OPTForCausalLM": Family(("opt",), _config, _values, _modules)}
