"""The canonical names and shapes of a decoder's weights, which every file format is mapped to."""

import re
from typing import NamedTuple

from pjax.model_config import ModelConfig


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight that a decoder has, by canonical name.

    Args:
        config: what the decoder is.
    """
    model = config.model
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab, config.embed_width)}
    if config.learned_positions:
        shapes["positions"] = (config.context + config.position_offset, model)
    if config.embed_width != model:
        width = config.embed_width
        shapes |= {"project_in.weight": (model, width), "project_out.weight": (width, model)}
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config, index).items()}
    if config.final_norm:
        shapes |= _norm_shapes("final_norm", config)
    if not config.tied:
        shapes["head.weight"] = (config.vocab, config.embed_width)
    return shapes


QKV = ("layers.N.attention.q", "layers.N.attention.k", "layers.N.attention.v")
"""The modules that some files store as one tensor."""


class NameParts(NamedTuple):
    """What a canonical name says.

    Attributes:
        module: what holds the weight and perhaps a bias, with N for the layer: `layers.N.ffn.up`.
        layer: its number; 0 outside the layers.
        is_bias: whether it is the bias.
    """

    module: str
    layer: int
    is_bias: bool


def split_name(name: str) -> NameParts:
    """Takes a canonical name apart: `layers.3.ffn.up_bias` -> (`layers.N.ffn.up`, 3, True)."""
    layer = re.match(r"layers\.(\d+)\.", name)
    pattern = f"layers.N.{name[layer.end() :]}" if layer else name
    module = re.sub(r"[._](scale|weight|bias)$", "", pattern)
    return NameParts(module, int(layer[1]) if layer else 0, pattern.endswith("bias"))


def _layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    model, neurons = config.model, config.neurons[index]
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {} if config.block == "post_norm" and index == 0 else _norm_shapes("attention_norm", config)
    for name, rows, columns in (
        ("q", queries, model),
        ("k", keys, model),
        ("v", keys, model),
        ("o", model, queries),
    ):
        shapes[f"attention.{name}.weight"] = (rows, columns)
        if config.attention_bias:
            shapes[f"attention.{name}.bias"] = (rows,)
    shapes |= _norm_shapes("ffn_norm", config)
    for name in ("gate", "up", "down") if config.gated else ("up", "down"):
        shapes[f"ffn.{name}"] = (neurons, model)
        if config.mlp_bias:
            shapes[f"ffn.{name}_bias"] = (model if name == "down" else neurons,)
    return shapes


def _norm_shapes(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    parts = {"scale": config.norm_scale, "bias": config.norm_bias}
    return {f"{name}.{part}": (config.model,) for part, wanted in parts.items() if wanted}
