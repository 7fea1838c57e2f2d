"""What a Hugging Face config.json means: one function and one table of tensor names per family.

A new family is a function from `ConfigFile` to `ModelConfig`, a table, and a line in `FAMILIES`.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from pjax.base import ModelConfig
from pjax.formats.canonical import split_layer
from pjax.formats.config_file import ConfigFile


class Family(NamedTuple):
    """How one family of checkpoints is read.

    Attributes:
        model_type: the value of this key in its config files.
        config: (file, generation file, activation override) -> ModelConfig.
        modules: canonical name of what holds a weight and perhaps a bias, N for the layer, to its
            name in the file.
    """

    model_type: str
    config: Callable[[ConfigFile, ConfigFile, str | None], ModelConfig]
    modules: dict[str, str]

    def file_name(self, name: str) -> str:
        """Returns the name in the file of the weight with a canonical name."""
        pattern, layer = split_layer(name)
        leaf = "bias" if pattern.endswith("bias") else "weight"
        module = re.sub(r"[._](scale|weight|bias)$", "", pattern)
        return f"{self.modules[module].replace('.N.', f'.{layer}.')}.{leaf}"


def find_family(config: ConfigFile) -> Family:
    """Returns the family that a config names by `architectures`, or by `model_type` if it has none.

    Raises:
        ValueError: a family, or a way of storing weights, that is not supported.
    """
    supported = ", ".join(FAMILIES)
    architectures, model_type = config.values.get("architectures"), config.values.get("model_type")
    if architectures:
        name = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(name, str) or name not in FAMILIES:
            raise config.unsupported("architectures", name, supported)
        family = FAMILIES[name]
    else:
        by_type = {family.model_type: family for family in FAMILIES.values()}
        if not isinstance(model_type, str) or model_type not in by_type:
            raise config.unsupported("model_type", model_type, ", ".join(by_type))
        family = by_type[model_type]
    if model_type not in (None, family.model_type):
        raise config.unsupported("model_type", model_type, f"{family.model_type} with {supported}")
    if config.values.get("quantization_config"):
        raise config.unsupported("quantization_config", config.values["quantization_config"], "float weights")
    return family


def _llama_config(file: ConfigFile, generation: ConfigFile, activation: str | None) -> ModelConfig:
    heads, model = file.count("num_attention_heads"), file.count("hidden_size")
    kv_heads = file.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise file.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if file.values.get("head_dim") is None and model % heads:
        raise file.error("hidden_size", f"a multiple of num_attention_heads = {heads}, or a head_dim")
    head_dim = file.count("head_dim", model // heads)
    if head_dim % 2:
        raise file.error("head_dim", f"an even number for rotary positions ({head_dim} here)")
    return ModelConfig(
        name=file.file.parent.resolve().name,
        family="llama",
        vocab=file.count("vocab_size"),
        model=model,
        neurons=(file.count("intermediate_size"),) * file.count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=file.count("max_position_embeddings"),
        activation=file.activation("hidden_act", "silu", activation),
        gated=True,
        norm="rms",
        norm_eps=file.number("rms_norm_eps", 1e-6),
        norm_bias=False,
        positions="rope",
        rope_theta=_rope_theta(file),
        position_offset=0,
        attention_bias=file.flag("attention_bias", False),
        mlp_bias=file.flag("mlp_bias", False),
        tied=file.flag("tie_word_embeddings", False),
        bos_id=_bos_id(file, generation, 1),
        eos_ids=_eos_ids(file, generation, 2),
    )


def _opt_config(file: ConfigFile, generation: ConfigFile, activation: str | None) -> ModelConfig:
    heads, model = file.count("num_attention_heads"), file.count("hidden_size")
    if model % heads:
        raise file.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    if file.count("word_embed_proj_dim", model) != model:
        width = file.values["word_embed_proj_dim"]
        raise file.unsupported("word_embed_proj_dim", width, f"hidden_size, {model}")
    for key, only in (
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if file.flag(key, only) is not only:
            raise file.unsupported(key, not only, str(only).lower())
    bias = file.flag("enable_bias", True)
    return ModelConfig(
        name=file.file.parent.resolve().name,
        family="opt",
        vocab=file.count("vocab_size"),
        model=model,
        neurons=(file.count("ffn_dim"),) * file.count("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=model // heads,
        context=file.count("max_position_embeddings"),
        activation=file.activation("activation_function", "relu", activation),
        gated=False,
        norm="layer",
        norm_eps=1e-5,
        norm_bias=True,
        positions="learned",
        rope_theta=None,
        position_offset=2,
        attention_bias=bias,
        mlp_bias=bias,
        tied=file.flag("tie_word_embeddings", True),
        bos_id=_bos_id(file, generation, 2),
        eos_ids=_eos_ids(file, generation, 2),
    )


def _rope_theta(file: ConfigFile) -> float:
    theta = file.number("rope_theta", 10000.0)
    for key in ("rope_parameters", "rope_scaling"):
        found = file.values.get(key)
        if found is None:
            continue
        if not isinstance(found, dict):
            raise file.error(key, "an object or null")
        rope = ConfigFile(file.file, found)
        kind = found.get("rope_type", found.get("type", "default"))
        if kind != "default":
            raise file.unsupported(f"{key}.rope_type", kind, "default")
        theta = rope.number("rope_theta", theta)
        if rope.number("partial_rotary_factor", 1.0) != 1.0:
            raise file.unsupported(f"{key}.partial_rotary_factor", found["partial_rotary_factor"], "1.0")
    if file.number("partial_rotary_factor", 1.0) != 1.0:
        raise file.unsupported("partial_rotary_factor", file.values["partial_rotary_factor"], "1.0")
    return theta


def _bos_id(file: ConfigFile, generation: ConfigFile, default: int) -> int | None:
    for source in (file, generation):
        if "bos_token_id" in source.values:
            ids = source.ids("bos_token_id")
            if len(ids) > 1 or any(i >= file.count("vocab_size") for i in ids):
                raise source.error("bos_token_id", "one id of the vocabulary, or null")
            return ids[0] if ids else None
    return default


def _eos_ids(file: ConfigFile, generation: ConfigFile, default: int) -> tuple[int, ...]:
    sources = [source for source in (file, generation) if "eos_token_id" in source.values]
    if not sources:
        return (default,)
    return tuple(dict.fromkeys(i for source in sources for i in source.ids("eos_token_id")))


LLAMA_MODULES = {
    "embed": "model.embed_tokens",
    "layers.N.attention_norm": "model.layers.N.input_layernorm",
    "layers.N.attention.q": "model.layers.N.self_attn.q_proj",
    "layers.N.attention.k": "model.layers.N.self_attn.k_proj",
    "layers.N.attention.v": "model.layers.N.self_attn.v_proj",
    "layers.N.attention.o": "model.layers.N.self_attn.o_proj",
    "layers.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "layers.N.ffn.gate": "model.layers.N.mlp.gate_proj",
    "layers.N.ffn.up": "model.layers.N.mlp.up_proj",
    "layers.N.ffn.down": "model.layers.N.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}

OPT_MODULES = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "layers.N.attention_norm": "model.decoder.layers.N.self_attn_layer_norm",
    "layers.N.attention.q": "model.decoder.layers.N.self_attn.q_proj",
    "layers.N.attention.k": "model.decoder.layers.N.self_attn.k_proj",
    "layers.N.attention.v": "model.decoder.layers.N.self_attn.v_proj",
    "layers.N.attention.o": "model.decoder.layers.N.self_attn.out_proj",
    "layers.N.ffn_norm": "model.decoder.layers.N.final_layer_norm",
    "layers.N.ffn.up": "model.decoder.layers.N.fc1",
    "layers.N.ffn.down": "model.decoder.layers.N.fc2",
    "final_norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
}

FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama_config, LLAMA_MODULES),
    "OPTForCausalLM": Family("opt", _opt_config, OPT_MODULES),
}
"""Supported families by the first entry of `architectures`."""
