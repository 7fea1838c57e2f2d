"""Hugging Face model folders: config.json and weights in, and the same out."""

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pjax.formats.canonical import weight_shapes
from pjax.formats.checkpoint import Checkpoint, SourceTensor
from pjax.formats.config_file import ConfigFile
from pjax.formats.families import FAMILIES, Family, Source, find_family, layout_of, to_files
from pjax.formats.files import expand_path, read_json
from pjax.formats.mapped import drop_pages
from pjax.formats.stored import FLOAT_TYPES, SINGLE_FILE, open_weights
from pjax.model_config import ModelConfig

_SAMPLED_ROWS = 64
"""Of embedding and head, to compare them: any training changes nearly all."""


def read_folder(path: str | os.PathLike[str], *, activation: str | None = None) -> Checkpoint:
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
    stored = open_weights(folder)
    config = family.config(Source(file, generation, activation, stored.keys()))
    config = config.replace(tied=config.tied and not _has_own_head(folder, config, family, stored))
    config = config.replace(eos_ids=tuple(dict.fromkeys(config.eos_ids + _tokenizer_eos_ids(folder))))
    if activation is None and config.is_sparse and config.family != "bamboo" and file.values.get("auto_map"):
        logging.warning(
            "%s: auto_map names code of the model's own, which pjax does not run: the FFN is taken to be %s; "
            'if that code rectifies gate and up (dReLU), give activation="drelu".',
            file.file,
            config.activation,
        )
    return Checkpoint(config, _match_tensors(folder, config, family, stored))


def write_checkpoint(
    path: str | os.PathLike[str], config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes a Hugging Face folder; it appears complete or not at all.

    Args:
        path: a folder that does not exist yet.
        config: of any family that can be read.
        tensors: canonical name to array, as `canonical.weight_shapes(config)` lists them.

    Raises:
        FileExistsError: the path exists.
        ValueError: a config that no config.json can express, or tensors that do not fit it.
    """
    target = expand_path(path)
    if target.exists():
        raise FileExistsError(f"{target} already exists; delete it or choose another path.")
    family, values = _family_values(config)
    shapes = weight_shapes(config)
    found = {name: array.shape for name, array in tensors.items()}
    if found != shapes:
        wrong = sorted(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n))
        details = "; ".join(f"{n}: expected {shapes.get(n)}, found {found.get(n)}" for n in wrong[:3])
        raise ValueError(f"tensors: {len(wrong)} do not fit the config: {details}.")
    files = to_files(tensors, config, family)
    # Other libraries go by the first name, and would load the norms' float32 for all.
    values["torch_dtype"] = tensors["embed.weight"].dtype.name
    generation = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        save_file(files, folder / SINGLE_FILE, metadata={"format": "pt"})
        for name, content in (("config.json", values), ("generation_config.json", generation)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.rename(folder, target)


def _family_values(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The family that a config is written as, and its config.json; reading that must give the same config."""
    family = next((f for f in FAMILIES.values() if config.family in f.model_types), None)
    if family is None:
        raise ValueError(f"config: family: expected one of {', '.join(FAMILIES)}, got {config.family!r}.")
    values = family.values(config)
    file = ConfigFile(Path("config.json"), values)
    read_back = family.config(Source(file, ConfigFile(file.file, {}), None, ()))
    fields = [field.name for field in dataclasses.fields(config) if field.name != "name"]
    differing = [name for name in fields if getattr(config, name) != getattr(read_back, name)]
    if differing:
        listed = ", ".join(f"{name}={getattr(config, name)!r}" for name in differing)
        raise ValueError(f"config: a Hugging Face {values['model_type']} cannot express {listed}.")
    return family, values


def _model_folder(path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(
            f"The model {path} does not exist; pjax downloads nothing: give a folder or a GGUF file, such as "
            "`hf download NAME --local-dir FOLDER` makes."
        )
    if not (path / "config.json").is_file():
        snapshots = [str(p) for p in sorted(path.glob("snapshots/*"))]
        listed = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
        hint = f"give {snapshots[-1]} instead" if snapshots else f"it holds: {listed}"
        hint += "; give a GGUF file itself, not its folder" if ".gguf" in listed else ""
        raise FileNotFoundError(f"{path} has no config.json, so it is no Hugging Face model folder; {hint}.")
    return path


def _tokenizer_eos_ids(folder: Path) -> tuple[int, ...]:
    """The end of a text that the tokenizer's own config names: chat models often have it there alone."""
    file = folder / "tokenizer_config.json"
    values = read_json(file) if file.is_file() else {}
    end, added = values.get("eos_token"), values.get("added_tokens_decoder")
    content = end.get("content") if isinstance(end, dict) else end
    if not isinstance(added, dict) or content is None:
        return ()
    tokens = [(key, token) for key, token in added.items() if isinstance(token, dict) and key.isdecimal()]
    return tuple(int(key) for key, token in tokens if token.get("content") == content)


def _has_own_head(folder: Path, config: ModelConfig, family: Family, stored: dict[str, SourceTensor]) -> bool:
    """Whether the weights hold a head that is not the embedding, told from a sample of rows.

    Such weights were trained untied and their config is wrong: transformers 5, too, believes the weights.
    """
    embed, head = (
        stored.get(family.file_name(f"{name}.weight", config, stored)) for name in ("embed", "head")
    )
    if embed is None or head is None:
        return False
    step = max(1, config.vocab // _SAMPLED_ROWS)
    is_own = embed.shape != head.shape or not np.array_equal(embed.read()[::step], head.read()[::step])
    if is_own:
        message = (
            "%s: %s is not the embedding, so it is used, though config.json has tie_word_embeddings true."
        )
        logging.warning(message, folder, head.name)
    return is_own


def _match_tensors(
    folder: Path, config: ModelConfig, family: Family, stored: dict[str, SourceTensor]
) -> dict[str, SourceTensor]:
    """Finds each weight that the config calls for, and checks type and shape."""
    # Checkpoints saved from the bare model, without its head, lack the outer name.
    outer = family.file_name("embed.weight", config, stored).split(".")[0] + "."
    prefix = outer if not any(name.startswith(outer) for name in stored) else ""
    tensors, used = {}, set()
    for name, shape in weight_shapes(config).items():
        file_name = family.file_name(name, config, stored).removeprefix(prefix)
        if file_name not in stored:
            why = " (tie_word_embeddings is false)" if name == "head.weight" else ""
            raise ValueError(f"{folder}: the weights lack the tensor {file_name}{why}, shape {list(shape)}.")
        found = stored[file_name]
        layout = layout_of(name, config, family)
        if found.shape != layout.file_shape(shape):
            raise ValueError(
                f"{found.file}: {file_name}: config.json calls for shape {list(layout.file_shape(shape))}, "
                f"found {list(found.shape)}."
            )
        if found.dtype not in FLOAT_TYPES.values():
            raise ValueError(
                f"{found.file}: {file_name}: expected one of the types {', '.join(FLOAT_TYPES)}, "
                f"found {found.dtype}."
            )
        tensors[name] = found._replace(read=partial(_read_with, layout.to_canonical, found.read), shape=shape)
        used.add(file_name)
    ignored = [n for n in stored if n not in used and not _is_harmless(n, config)]
    if ignored:
        logging.warning("%s: ignored %d tensors: %s", folder, len(ignored), ", ".join(sorted(ignored)[:8]))
    return tensors


def _read_with(
    to_canonical: Callable[[np.ndarray], np.ndarray], read: Callable[[], np.ndarray]
) -> np.ndarray:
    stored = read()
    canonical = to_canonical(stored)
    if not np.may_share_memory(canonical, stored):  # this layout had to copy, and is done with the file
        drop_pages(stored)
    return canonical


def _is_harmless(file_name: str, config: ModelConfig) -> bool:
    return file_name.endswith("rotary_emb.inv_freq") or (config.tied and file_name == "lm_head.weight")
