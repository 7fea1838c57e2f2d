"""How a family's files lay out the weights that are not stored as pjax keeps them, both ways."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pjax.formats.canonical import split_layer
from pjax.formats.families.family import Family
from pjax.model_config import ModelConfig


class Layout(NamedTuple):
    """How one weight lies in the file.

    Attributes:
        file_shape: its shape here -> the tensor's shape in the file.
        to_canonical: the tensor in the file -> the weight, a view of it where that is possible.
    """

    file_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    to_canonical: Callable[[np.ndarray], np.ndarray]


def layout_of(name: str, config: ModelConfig, family: Family) -> Layout:
    """Returns how the weight with a canonical name lies in the files of a family."""
    pattern, _ = split_layer(name)
    if pattern == "layers.N.ffn.down":
        return Layout(lambda shape: shape[::-1], np.transpose)
    if family.norm_offset and pattern.endswith("norm.scale"):
        return Layout(_same, lambda scale: scale.astype(np.float32) + np.float32(family.norm_offset))
    part = pattern.removeprefix("layers.N.attention.").split(".")[0]
    if family.fused_qkv and part in ("q", "k", "v"):
        return _fused(part, config)
    return Layout(_same, lambda array: array)


def to_files(tensors: Mapping[str, np.ndarray], config: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """Returns the weights by their names in the files of a family, as they lie there.

    Args:
        tensors: canonical name to array.
        config: what they belong to.
        family: what they are written as.
    """
    files: dict[str, np.ndarray] = {}
    fused: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        pattern, _ = split_layer(name)
        file_name = family.file_name(name, config, ())
        part = pattern.removeprefix("layers.N.attention.").split(".")[0]
        if pattern == "layers.N.ffn.down":
            array = array.T
        elif family.norm_offset and pattern.endswith("norm.scale"):
            array = array - array.dtype.type(family.norm_offset)
        if family.fused_qkv and part in ("q", "k", "v"):
            fused.setdefault(file_name, {})[part] = array
        else:
            files[file_name] = np.ascontiguousarray(array)
    return files | {name: _fuse_qkv(parts, config) for name, parts in fused.items()}


def _fuse_qkv(parts: dict[str, np.ndarray], config: ModelConfig) -> np.ndarray:
    tail = parts["q"].shape[1:]
    split = [parts[name].reshape(config.kv_heads, -1, config.head_dim, *tail) for name in ("q", "k", "v")]
    return np.concatenate(split, axis=1).reshape(-1, *tail)


def _fused(part: str, config: ModelConfig) -> Layout:
    queries = config.heads // config.kv_heads
    rows = {"q": slice(0, queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}[
        part
    ]

    def to_canonical(fused: np.ndarray) -> np.ndarray:
        groups = fused.reshape(config.kv_heads, queries + 2, config.head_dim, *fused.shape[1:])
        return groups[:, rows].reshape(-1, *fused.shape[1:])

    num_rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    return Layout(lambda shape: (num_rows, *shape[1:]), to_canonical)


def _same(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape
