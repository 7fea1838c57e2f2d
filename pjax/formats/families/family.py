"""What there is to know about a family of checkpoints, and what all of them have in common."""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from pjax.formats.canonical import split_name
from pjax.formats.config_file import ConfigFile
from pjax.model_config import ModelConfig, Rope

MAX_LAYERS = 10_000
"""Far more than any model has; what a config promises beyond must not take the memory to list it."""


class Source(NamedTuple):
    """What a family's config function may look at.

    Attributes:
        config: config.json.
        generation: generation_config.json, or an empty one.
        activation: replaces the activation function that config.json names, or None.
        names: of the tensors in the files; first Falcon configs leave their layout to be told from them.
    """

    config: ConfigFile
    generation: ConfigFile
    activation: str | None
    names: Collection[str]


class Family(NamedTuple):
    """How one family of checkpoints is read and written.

    Attributes:
        model_types: values of this key in its config files, the one to write first.
        config: reads the files' values.
        values: of config.json for a `ModelConfig`; what reading them back does not give cannot be written.
        modules: (config, tensor names) -> canonical name of what holds a weight and perhaps a bias to its
            name in the file, where {n}, {before} and {last} stand for the layer, the one before it, and the
            model's last.
        fused_qkv: whether q, k and v are one tensor: for each group of keys and values its queries, one
            key, one value.
        norm_offset: what the file's norm scales lack (Nemotron: 1).
    """

    model_types: tuple[str, ...]
    config: Callable[[Source], ModelConfig]
    values: Callable[[ModelConfig], dict[str, Any]]
    modules: Callable[[ModelConfig, Collection[str]], dict[str, str]]
    fused_qkv: bool = False
    norm_offset: float = 0.0

    def file_name(self, name: str, config: ModelConfig, names: Collection[str]) -> str:
        """Returns the name in the file of the weight with a canonical name."""
        module, n, is_bias = split_name(name)
        template = self.modules(config, names)[module]
        leaf = "bias" if is_bias else "weight"
        return f"{template.format(n=n, before=n - 1, last=config.layers - 1)}.{leaf}"


def read_heads(file: ConfigFile) -> dict[str, int]:
    """Returns vocab, model, heads, kv_heads, head_dim and context under the names that most configs use."""
    heads, model = file.count("num_attention_heads"), file.count("hidden_size")
    kv_heads = file.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise file.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if file.values.get("head_dim") is None and model % heads:
        raise file.error("hidden_size", f"a multiple of num_attention_heads = {heads}, or a head_dim")
    return {
        "vocab": file.count("vocab_size"),
        "model": model,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": file.count("head_dim", model // heads),
        "context": file.count("max_position_embeddings"),
    }


def read_ids(source: Source, bos: int | None, eos: int) -> dict[str, Any]:
    """Returns bos_id and eos_ids; the given ones are the defaults of the family's config class."""
    sources = (source.config, source.generation)
    for file in sources:
        if "bos_token_id" in file.values:
            ids = file.ids("bos_token_id")
            if len(ids) > 1 or any(i >= source.config.count("vocab_size") for i in ids):
                raise file.error("bos_token_id", "one id of the vocabulary, or null")
            bos = ids[0] if ids else None
            break
    found = [file for file in sources if "eos_token_id" in file.values]
    eos_ids = dict.fromkeys(i for file in found for i in file.ids("eos_token_id")) if found else (eos,)
    return {"bos_id": bos, "eos_ids": tuple(eos_ids)}


def read_rope(file: ConfigFile, head_dim: int, partial: float = 1.0) -> Rope:
    """Returns the rotary positions that `rope_parameters`, or the older `rope_scaling`, describe.

    Args:
        file: config.json.
        head_dim: width of one head.
        partial: share of it that is rotated, if the file does not say.

    Raises:
        ValueError: a kind of scaling that is not supported, or a parameter that is missing or wrong.
    """
    rope, key, kind = _find_rope(file)
    theta = rope.number("rope_theta", file.number("rope_theta", 10000.0))
    partial = rope.number("partial_rotary_factor", file.number("partial_rotary_factor", partial))
    if partial > 1:
        key = "partial_rotary_factor"
        raise (rope if rope.values.get(key) is not None else file).error(key, "a share of at most 1")
    width = int(head_dim * partial)
    if width % 2 or not 0 < width <= head_dim:
        raise file.error(
            "partial_rotary_factor" if partial != 1.0 else "head_dim",
            f"an even number of rotated entries, at most head_dim = {head_dim} ({width} here)",
        )
    if kind == "default":
        return Rope(theta, width)
    context = file.count("max_position_embeddings")
    original = rope.count(
        "original_max_position_embeddings", file.count("original_max_position_embeddings", context)
    )
    if kind == "linear":
        return Rope(theta, width, kind, factor=rope.number("factor"))
    if kind == "dynamic":
        return Rope(theta, width, kind, factor=rope.number("factor"), original_context=context)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"more than low_freq_factor = {low}")
        return Rope(
            theta,
            width,
            kind,
            factor=rope.number("factor"),
            original_context=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        if theta <= 1:
            raise file.error("rope_theta", f"more than 1 for yarn ({theta} here)")
        factor = rope.number("factor", context / original)
        return Rope(
            theta,
            width,
            kind,
            factor=factor,
            original_context=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=_attention_factor(rope, factor),
        )
    raise file.unsupported(f"{key}.rope_type", kind, "default, linear, dynamic, llama3, yarn")


def _find_rope(file: ConfigFile) -> tuple[ConfigFile, str, Any]:
    """The object that describes the positions, else the whole config; its key; and the kind it names."""
    found: list[tuple[ConfigFile, str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        values = file.values.get(key)
        if values is not None and not isinstance(values, dict):
            raise file.error(key, "an object or null")
        if not values:
            continue
        if any(isinstance(value, dict) for value in values.values()):
            raise file.unsupported(key, values, "the same positions in all layers")
        kinds = [values[name] for name in ("rope_type", "type") if values.get(name) is not None]
        if not kinds and values.get("factor") is not None:
            raise file.error(key, "a rope_type beside the factor")
        found += [(ConfigFile(file.file, values), key, kind) for kind in kinds or ["default"]]
    if any(kind != found[0][2] for _, _, kind in found):
        listed = ", ".join(f"{kind!r} in {key}" for _, key, kind in found)
        raise ValueError(f"{file.file}: rope_type, type: expected one kind of positions, found {listed}.")
    for rope, key, _ in found[1:]:
        for name, value in rope.values.items():
            if value is not None and found[0][0].values.get(name, value) not in (value, None):
                raise rope.error(name, f"{found[0][0].values[name]!r} in {key}, as in {found[0][1]}")
    return found[0] if found else (file, "", "default")


def _attention_factor(rope: ConfigFile, factor: float) -> float:
    """YaRN's (arXiv 2309.00071, section 3.4), or what the file says instead."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        default = scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    else:
        default = scale(1.0)
    return rope.number("attention_factor", default)


def rope_values(rope: Rope) -> dict[str, Any]:
    """Returns the `rope_parameters` that `read_rope` reads back, less `partial_rotary_factor`.

    Raises:
        ValueError: frequencies that came from a GGUF file as numbers.
    """
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "divisors":
        raise ValueError("config: rope: a config.json cannot express the frequency divisors of a GGUF file.")
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
        values |= {name: getattr(rope, name) for name in names}
    return values
