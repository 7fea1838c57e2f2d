"""Hugging Face model folders: config.json and safetensors in, and the same out for a LLaMA."""

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pjax.base import ModelConfig
from pjax.formats.canonical import weight_shapes
from pjax.formats.checkpoint import Checkpoint, SourceTensor
from pjax.formats.config_file import ConfigFile
from pjax.formats.families import FAMILIES, Family, find_family
from pjax.formats.files import expand_path, read_json
from pjax.formats.stored import FLOAT_TYPES, SINGLE_FILE, open_weights


def read_checkpoint(path: str | os.PathLike[str], *, activation: str | None = None) -> Checkpoint:
    """Opens a Hugging Face folder of a supported family; checks all of it, reads no weight yet.

    Args:
        path: the folder with config.json and model.safetensors, or its shards and their index.
        activation: replaces the activation function that config.json names.

    Raises:
        FileNotFoundError: no such folder, config.json, weights or shard.
        ValueError: a family or file type that is not supported, a value or tensor that is missing
            or wrong, or a damaged file. The message names the file and what is wrong in it.
    """
    folder = _model_folder(expand_path(path))
    file = ConfigFile(folder / "config.json", read_json(folder / "config.json"))
    generation_file = folder / "generation_config.json"
    generation = ConfigFile(generation_file, read_json(generation_file) if generation_file.is_file() else {})
    family = find_family(file)
    config = family.config(file, generation, activation)
    stored = open_weights(folder)
    return Checkpoint(config, _match_tensors(folder, config, family, stored))


def write_checkpoint(
    path: str | os.PathLike[str], config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes a LLaMA as a Hugging Face folder; it appears complete or not at all.

    Args:
        path: a folder that does not exist yet.
        config: of the family "llama".
        tensors: canonical name to array, as `canonical.weight_shapes(config)` lists them.

    Raises:
        FileExistsError: the path exists.
        ValueError: another family, or tensors that do not fit the config.
    """
    target = expand_path(path)
    if target.exists():
        raise FileExistsError(f"{target} already exists; delete it or choose another path.")
    values = _llama_values(config)
    family = FAMILIES["LlamaForCausalLM"]
    shapes = weight_shapes(config)
    found = {name: array.shape for name, array in tensors.items()}
    if found != shapes:
        wrong = sorted(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n))
        details = "; ".join(f"{n}: expected {shapes.get(n)}, found {found.get(n)}" for n in wrong[:3])
        raise ValueError(f"tensors: {len(wrong)} do not fit the config: {details}.")
    files = {family.file_name(name): _to_file_order(name, array) for name, array in tensors.items()}
    generation = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        save_file(files, folder / SINGLE_FILE, metadata={"format": "pt"})
        for name, content in (("config.json", values), ("generation_config.json", generation)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.rename(folder, target)


def _model_folder(path: Path) -> Path:
    if path.is_file():
        kind = "GGUF files are not supported yet" if path.suffix == ".gguf" else "it is a file"
        raise ValueError(f"{path}: expected a Hugging Face model folder; {kind}.")
    if not path.is_dir():
        raise FileNotFoundError(f"The model folder {path} does not exist.")
    if not (path / "config.json").is_file():
        snapshots = [str(p) for p in sorted(path.glob("snapshots/*"))]
        listed = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
        hint = f"give {snapshots[-1]} instead" if snapshots else f"it holds: {listed}"
        raise FileNotFoundError(f"{path} has no config.json, so it is no Hugging Face model folder; {hint}.")
    return path


def _match_tensors(
    folder: Path, config: ModelConfig, family: Family, stored: dict[str, SourceTensor]
) -> dict[str, SourceTensor]:
    """Finds each weight that the config calls for, and checks type and shape."""
    # Checkpoints saved from the bare model, without its head, lack the outer name.
    prefix = "model." if not any(name.startswith("model.") for name in stored) else ""
    tensors, used = {}, set()
    for name, shape in weight_shapes(config).items():
        file_name = family.file_name(name).removeprefix(prefix)
        if file_name not in stored:
            why = " (tie_word_embeddings is false)" if name == "head" else ""
            raise ValueError(f"{folder}: the weights lack the tensor {file_name}{why}, shape {list(shape)}.")
        found = stored[file_name]
        file_shape = shape[::-1] if _is_transposed(name) else shape
        if found.shape != file_shape:
            raise ValueError(
                f"{found.file}: {file_name}: config.json calls for the shape {list(file_shape)}, "
                f"found {list(found.shape)}."
            )
        if found.dtype not in FLOAT_TYPES.values():
            raise ValueError(
                f"{found.file}: {file_name}: expected one of the types {', '.join(FLOAT_TYPES)}."
            )
        tensors[name] = _transposed(found) if _is_transposed(name) else found
        used.add(file_name)
    ignored = [n for n in stored if n not in used and not _is_harmless(n, config)]
    if ignored:
        logging.warning("%s: ignored %d tensors: %s", folder, len(ignored), ", ".join(sorted(ignored)[:8]))
    return tensors


def _is_transposed(name: str) -> bool:
    return name.endswith(".ffn.down")


def _is_harmless(file_name: str, config: ModelConfig) -> bool:
    return file_name.endswith("rotary_emb.inv_freq") or (config.tied and file_name == "lm_head.weight")


def _transposed(tensor: SourceTensor) -> SourceTensor:
    return tensor._replace(read=lambda: np.ascontiguousarray(tensor.read().T), shape=tensor.shape[::-1])


def _to_file_order(name: str, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T if _is_transposed(name) else array)


def _llama_values(config: ModelConfig) -> dict[str, object]:
    """config.json of a LLaMA; reading it back must give the same config."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.model,
        "intermediate_size": config.neurons[0],
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }
    file = ConfigFile(Path("config.json"), values)
    read_back = FAMILIES["LlamaForCausalLM"].config(file, ConfigFile(file.file, {}), None)
    fields = [field.name for field in dataclasses.fields(config) if field.name != "name"]
    differing = [name for name in fields if getattr(config, name) != getattr(read_back, name)]
    if differing:
        listed = ", ".join(f"{name}={getattr(config, name)!r}" for name in differing)
        raise ValueError(f"config: a Hugging Face LLaMA cannot express {listed}.")
    return values
