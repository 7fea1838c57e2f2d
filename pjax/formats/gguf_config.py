"""What the metadata of a GGUF file says about its model: one small table of facts per architecture."""

import math
import re
from typing import Any, Literal, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType, Keys

from pjax.formats.config_file import ConfigFile, parse_activation
from pjax.formats.families.opt import POSITION_OFFSET
from pjax.formats.gguf_file import GgufFile
from pjax.model_config import ModelConfig, Rope


class Architecture(NamedTuple):
    """What a value of `general.architecture` implies.

    Attributes:
        gated: whether the FFN has a gate.
        norm: kind of norm; "layer" has biases.
        pairs_adjacent: whether RoPE turns entries 2i and 2i+1 of a head, not i and i + width/2: llama.cpp's
            converters then reorder the rows of q and k.
        activation: the architecture's only one; None if files of several kinds carry this name.
        fused_qkv: whether q, k and v are one tensor, one below the other.
        block: see `ModelConfig`.
    """

    gated: bool
    norm: Literal["rms", "layer"]
    pairs_adjacent: bool
    activation: str | None = None
    fused_qkv: bool = False
    block: Literal["sequential", "parallel"] = "sequential"


ARCHITECTURES = {
    "llama": Architecture(gated=True, norm="rms", pairs_adjacent=True),  # Mistral and SmolLM, too
    "minicpm": Architecture(gated=True, norm="rms", pairs_adjacent=True),
    "bamboo": Architecture(gated=True, norm="rms", pairs_adjacent=True, activation="drelu"),
    "arcee": Architecture(gated=False, norm="rms", pairs_adjacent=True, activation="relu2"),
    "nemotron": Architecture(gated=False, norm="layer", pairs_adjacent=False, activation="relu2"),
    "falcon": Architecture(gated=False, norm="layer", pairs_adjacent=False, fused_qkv=True, block="parallel"),
    "opt": Architecture(gated=False, norm="layer", pairs_adjacent=False),
}
"""By `general.architecture`, as llama.cpp names them; bamboo and opt are PowerInfer's."""

_SPARSE_NAMES = {
    "relullama": "relu",
    "relufalcon": "relu",
    "prosparse": "fatrelu:0.01",
    "turbosparse": "drelu",
    "bamboo": "drelu",
}
_DENSE_NAMES = {
    "smollm": "silu",
    "tinyllama": "silu",
    "codellama": "silu",
    "openllama": "silu",
    "llama2": "silu",
    "llama3": "silu",
    "vicuna": "silu",
    "mistral": "silu",
    "zephyr": "silu",
    "falcon7b": "gelu",
    "falcon11b": "gelu",
    "falcon40b": "gelu",
    "falcon180b": "gelu",
}
"""Activations of models that are known by name (letters and digits of it), for files that do not say."""

_SWITCHES = (
    "expert_count",
    "swin_norm",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "activation_sparsity_scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attention.scale",
    "attention.output_scale",
    "attention.temperature_length",
    "attention.temperature_scale",
    "attention.shared_kv_layers",
    "attention.sliding_window_pattern",
    "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier",
)
"""Keys that change the result unless they are 0, of architectures that are not among ours."""

_FACTORS = ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")
_SCALES = ("embedding_scale", "residual_scale", "logit_scale")
"""Keys that change the result unless they are 1; MiniCPM's are read."""

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Control tokens that end a chat model's turn, whatever the file gives as its end-of-text id."""

_CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type


def is_powerinfer(file: GgufFile) -> bool:
    """Whether PowerInfer's converter made the file, perhaps with llama.cpp's magic put back."""
    return file.magic == b"PWRI" or any(".ffn_down_t." in name for name in file.tensors)


def find_architecture(file: GgufFile) -> str:
    """Returns the key of `ARCHITECTURES` that a file names.

    Raises:
        ValueError: another architecture, or no model at all.
    """
    found, name = _config_file(file), Keys.General.ARCHITECTURE
    architecture = file.metadata.get(name)
    if not isinstance(architecture, str):
        raise found.error(name, "the name of an architecture")
    if architecture == "generic.gpu_index":
        raise ValueError(
            f"{file.path}: a PowerInfer split (.gpuidx), not a model; give the model's own file."
        )
    if _text(found, Keys.General.TYPE, "model") != "model":
        raise found.unsupported(Keys.General.TYPE, found.values[Keys.General.TYPE], "model")
    if architecture not in ARCHITECTURES:
        raise found.unsupported(name, architecture, ", ".join(ARCHITECTURES))
    return architecture


def read_gguf_config(file: GgufFile, activation: str | None) -> ModelConfig:
    """Returns what the decoder in a GGUF file is.

    Args:
        file: the file.
        activation: its activation function; None to take it from the architecture or the model's name.

    Raises:
        ValueError: a key is missing or wrong, the model is not supported, or its activation is not known.
    """
    name = find_architecture(file)
    architecture, found = ARCHITECTURES[name], _config_file(file)
    _check_supported(found, name)
    sizes = _read_sizes(file, found, name)
    is_opt, is_rms = name == "opt", architecture.norm == "rms"
    window_key = f"{name}.attention.sliding_window"
    window = found.count(window_key) if _is_set(found, window_key) else None
    return ModelConfig(
        name=file.path.stem,
        family="mistral" if name == "llama" and window else name,
        activation=_read_activation(file, architecture, activation),
        gated=architecture.gated,
        norm=architecture.norm,
        # OPT has but one epsilon, and PowerInfer's converter does not write it.
        norm_eps=found.number(
            f"{name}.attention.layer_norm_{'rms_' if is_rms else ''}epsilon", 1e-5 if is_opt else None
        ),
        norm_bias=not is_rms,
        block=architecture.block,
        rope=None if is_opt else _read_rope(file, found, name, sizes),
        learned_positions=is_opt,
        position_offset=POSITION_OFFSET if is_opt else 0,
        window=window,
        attention_bias=any(re.search(r"\.attn_(q|qkv)\.bias$", tensor) for tensor in file.tensors),
        mlp_bias=any(tensor.endswith(".ffn_up.bias") for tensor in file.tensors),
        tied="output.weight" not in file.tensors,
        **(_read_scales(found) if name == "minicpm" else {}),
        **_read_ids(file, found, sizes["vocab"]),
        **sizes,
    )


def _config_file(file: GgufFile) -> ConfigFile:
    return ConfigFile(file.path, file.metadata)


def _text(found: ConfigFile, key: str, default: str) -> str:
    value = found.values.get(key, default)
    if not isinstance(value, str):
        raise found.error(key, "a text")
    return value


def _is_set(found: ConfigFile, key: str) -> bool:
    """Whether a number is there and not 0, which means the same as its absence."""
    value = found.values.get(key, 0)
    if not isinstance(value, int | float):
        raise found.error(key, "a number")
    return value != 0


def _check_supported(found: ConfigFile, name: str) -> None:
    """Raises for what would change the result and is not implemented."""
    factors = _FACTORS if name == "minicpm" else _FACTORS + _SCALES
    for key in (f"{name}.{key}" for key in _SWITCHES + factors):
        is_neutral = key.removeprefix(f"{name}.") in factors and found.values.get(key) == 1
        if _is_set(found, key) and not is_neutral:
            raise found.unsupported(key, found.values[key], "files without it")
    if not found.flag(f"{name}.attention.causal", True):
        raise found.unsupported(f"{name}.attention.causal", False, "true")


def _read_sizes(file: GgufFile, found: ConfigFile, name: str) -> dict[str, Any]:
    """Vocab, model, neurons, heads, kv_heads, head_dim and context."""
    layers, model = found.count(f"{name}.block_count"), found.count(f"{name}.embedding_length")
    if layers > len(file.tensors):  # before anything is made as long as the file says
        raise found.error(f"{name}.block_count", f"no more than the file has tensors, {len(file.tensors)}")
    heads = _per_layer(found, f"{name}.attention.head_count", layers)
    kv_key = f"{name}.attention.head_count_kv"
    kv_heads = _per_layer(found, kv_key, layers) if kv_key in found.values else heads
    neurons = _per_layer(found, f"{name}.feed_forward_length", layers)
    for key, counts in ((f"{name}.attention.head_count", heads), (kv_key, kv_heads)):
        if len(set(counts)) > 1:
            raise found.unsupported(key, list(counts), "the same number in all layers")
    if heads[0] % kv_heads[0]:
        raise found.error(kv_key, f"a divisor of the number of heads, {heads[0]}")
    key_length = f"{name}.attention.key_length"
    if key_length not in found.values and model % heads[0]:
        raise found.error(f"{name}.embedding_length", f"a multiple of the number of heads, {heads[0]}")
    head_dim = found.count(key_length, model // heads[0])
    if found.count(f"{name}.attention.value_length", head_dim) != head_dim:
        raise found.error(f"{name}.attention.value_length", f"the width of the keys, {head_dim}")
    return {
        "vocab": _num_rows(file, "token_embd.weight"),
        "model": model,
        "neurons": neurons,
        "heads": heads[0],
        "kv_heads": kv_heads[0],
        "head_dim": head_dim,
        # PowerInfer's converter writes 2048 for every OPT; the table of positions tells.
        "context": _num_rows(file, "position_embd.weight") - POSITION_OFFSET
        if name == "opt"
        else found.count(f"{name}.context_length"),
    }


def _num_rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ValueError(f"{file.path} lacks the tensor {name}.")
    return file.tensors[name].shape[0]


def _per_layer(found: ConfigFile, key: str, layers: int) -> tuple[int, ...]:
    """A count that files give once, or once for each layer."""
    value = found.values.get(key)
    if not isinstance(value, np.ndarray):
        return (found.count(key),) * layers
    if len(value) != layers or value.dtype.kind not in "iu" or value.min() <= 0:
        raise found.error(key, f"{layers} positive integers, one a layer")
    return tuple(value.tolist())


def _read_scales(found: ConfigFile) -> dict[str, float]:
    return {
        "embed_scale": found.number("minicpm.embedding_scale"),
        "residual_scale": found.number("minicpm.residual_scale"),
        "logit_scale": 1 / found.number("minicpm.logit_scale"),  # what the file's divides by
    }


def _read_rope(file: GgufFile, found: ConfigFile, name: str, sizes: dict[str, Any]) -> Rope:
    head_dim, prefix = sizes["head_dim"], f"{name}.rope"
    width = found.count(f"{prefix}.dimension_count", head_dim)
    if width % 2 or width > head_dim:
        raise found.error(f"{prefix}.dimension_count", f"an even number, at most head_dim = {head_dim}")
    theta = found.number(f"{prefix}.freq_base", 10000.0)  # the default that the specification names
    old_key = f"{prefix}.scale_linear"
    factor = found.number(f"{prefix}.scaling.factor", found.number(old_key, 1.0))
    kind = _text(found, f"{prefix}.scaling.type", "none" if factor == 1 else "linear")
    attention_factor = found.number(f"{prefix}.scaling.attn_factor", 1.0)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise found.unsupported(f"{prefix}.scaling.type", kind, "none, in a file with rope_freqs.weight")
        divisors = _read_divisors(file, width)
        return Rope(theta, width, "divisors", divisors=divisors, attention_factor=attention_factor)
    if kind == "none" or (kind == "linear" and factor == 1):
        return Rope(theta, width, attention_factor=attention_factor)
    if kind == "linear":
        return Rope(theta, width, "linear", factor=factor, attention_factor=attention_factor)
    if kind == "yarn":
        if theta <= 1:
            raise found.error(f"{prefix}.freq_base", "more than 1 for yarn")
        stretch = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0  # arXiv 2309.00071, section 3.4
        return Rope(
            theta,
            width,
            "yarn",
            factor=factor,
            original_context=found.count(f"{prefix}.scaling.original_context_length", sizes["context"]),
            beta_fast=found.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
            beta_slow=found.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
            attention_factor=stretch * attention_factor,
        )
    raise found.unsupported(f"{prefix}.scaling.type", kind, "none, linear, yarn")


def _read_divisors(file: GgufFile, width: int) -> tuple[float, ...]:
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type != GGMLQuantizationType.F32 or tensor.shape != (width // 2,):
        raise ValueError(
            f"{file.path}: rope_freqs.weight: expected F32 [{width // 2}], "
            f"found {tensor.type.name} {list(tensor.shape)}."
        )
    divisors = tensor.read_rows(0, 1).view("<f4")[0]
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ValueError(f"{file.path}: rope_freqs.weight: expected positive numbers.")
    return tuple(divisors.tolist())


def _read_ids(file: GgufFile, found: ConfigFile, vocab: int) -> dict[str, Any]:
    ids = {}
    for name in ("bos", "eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        for i in found.ids(key):
            if i >= vocab:
                raise found.error(key, f"an id of the vocabulary, below {vocab}")
            ids[name] = i
    bos = ids.pop("bos", None)
    return {"bos_id": bos, "eos_ids": tuple(dict.fromkeys([*ids.values(), *_end_of_turn_ids(file)]))}


def _end_of_turn_ids(file: GgufFile) -> list[int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, tuple) or not isinstance(types, np.ndarray) or len(tokens) != len(types):
        return []
    control = np.flatnonzero(types == _CONTROL_TOKEN).tolist()
    return [i for i in control if isinstance(tokens[i], str) and tokens[i] in _END_OF_TURN]


def _read_activation(file: GgufFile, architecture: Architecture, given: str | None) -> str:
    """What was given; else what is certain; else an error that asks. Never a guess."""
    if given is not None:
        return parse_activation(given)
    if architecture.activation:
        return architecture.activation
    if is_powerinfer(file):
        return "relu"  # PowerInfer's operators know no other; of Bamboo see its architecture
    words = (file.metadata.get(f"general.{key}", "") for key in ("basename", "name", "finetune"))
    name = re.sub("[^a-z0-9]", "", "".join(str(word) for word in words).lower())
    # A ReLU model is often named after the ordinary one it was made from.
    known = _SPARSE_NAMES if re.search("relu|reglu|sparse", name) else _SPARSE_NAMES | _DENSE_NAMES
    for part, activation in known.items():
        if part in name:
            return activation
    ordinary = "gelu" if architecture.fused_qkv else "silu"
    raise ValueError(
        f"{file.path}: a GGUF file does not say its activation function, and general.name, "
        f'{file.metadata.get("general.name")!r}, is not known here. Give activation="{ordinary}" for an '
        'ordinary model, "relu" for one trained with ReLU (ReluLLaMA), "fatrelu:0.01" for ProSparse.'
    )
