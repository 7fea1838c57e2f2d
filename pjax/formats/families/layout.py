"""How a family's files lay out the weights that are not stored as pjax keeps them, both ways."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pjax.formats.canonical import QKV, split_name, weight_shapes
from pjax.formats.families.family import Family
from pjax.model_config import ModelConfig


def _same(value):
    return value


class Layout(NamedTuple):
    """How one weight lies in the file.

    Attributes:
        file_shape: its shape here -> the tensor's shape in the file.
        to_canonical: the tensor in the file -> the weight, a view of it where that is possible.
        to_file: the weight -> the tensor; of q, k and v of one tensor, its part: [kv_heads, rows, ...].
    """

    file_shape: Callable[[tuple[int, ...]], tuple[int, ...]] = _same
    to_canonical: Callable[[np.ndarray], np.ndarray] = _same
    to_file: Callable[[np.ndarray], np.ndarray] = _same


def layout_of(name: str, config: ModelConfig, family: Family) -> Layout:
    """Returns how the weight with a canonical name lies in the files of a family."""
    module, _, is_bias = split_name(name)
    if module == "layers.N.ffn.down" and not is_bias:
        return Layout(lambda shape: shape[::-1], np.transpose, np.transpose)
    if family.norm_offset and module.endswith("norm") and not is_bias:
        offset = np.float32(family.norm_offset)
        return Layout(
            to_canonical=lambda scale: scale.astype(np.float32) + offset,
            to_file=lambda scale: scale - scale.dtype.type(offset),
        )
    if family.fused_qkv and module in QKV:
        return _fused(QKV.index(module), config)
    return Layout()


def to_files(tensors: Mapping[str, np.ndarray], config: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """Returns the weights by their names in the files of a family, as they lie there.

    Args:
        tensors: canonical name to array.
        config: what they belong to.
        family: what they are written as.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for name in weight_shapes(config):  # q comes before k, and k before v
        part = layout_of(name, config, family).to_file(tensors[name])
        parts.setdefault(family.file_name(name, config, ()), []).append(part)
    return {
        name: np.ascontiguousarray(found[0])
        if len(found) == 1
        else np.concatenate(found, axis=1).reshape(-1, *found[0].shape[2:])
        for name, found in parts.items()
    }


def _fused(part: int, config: ModelConfig) -> Layout:
    """Each group of the tensor is its queries, one key, one value, each of head_dim rows."""
    queries = config.heads // config.kv_heads
    first, last = ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))[part]

    def to_canonical(fused: np.ndarray) -> np.ndarray:
        groups = fused.reshape(config.kv_heads, queries + 2, config.head_dim, *fused.shape[1:])
        return groups[:, first:last].reshape(-1, *fused.shape[1:])

    num_rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    return Layout(
        lambda shape: (num_rows, *shape[1:]),
        to_canonical,
        lambda rows: rows.reshape(config.kv_heads, -1, *rows.shape[1:]),
    )
