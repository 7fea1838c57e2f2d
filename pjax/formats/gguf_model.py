"""GGUF files as models: tensors found by name, put into the canonical layout, dequantised when read."""

import dataclasses
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pjax.formats.canonical import QKV, split_name, weight_shapes
from pjax.formats.checkpoint import Checkpoint, SourceTensor, StoredPredictors
from pjax.formats.gguf_config import ARCHITECTURES, Architecture, find_architecture, read_gguf_config
from pjax.formats.gguf_file import GgufFile, GgufTensor, open_gguf
from pjax.model_config import ModelConfig
from pjax.weights import BFLOAT16

_FLOAT32 = np.dtype(np.float32)
_FLOAT_TYPES = {
    GGMLQuantizationType.F32: _FLOAT32,
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: BFLOAT16,
}
"""Types that are kept; all others become float32."""

_BLOCK_BYTES = 1 << 22
"""Of float32 made at a time: what dequantising needs besides, a few times this, stays in the cache."""

_MODULES = {
    "embed": "token_embd",
    "positions": "position_embd",
    "layers.N.attention_norm": "blk.{n}.attn_norm",
    "layers.N.attention.q": "blk.{n}.attn_q",
    "layers.N.attention.k": "blk.{n}.attn_k",
    "layers.N.attention.v": "blk.{n}.attn_v",
    "layers.N.attention.o": "blk.{n}.attn_output",
    "layers.N.ffn_norm": "blk.{n}.ffn_norm",
    "layers.N.ffn.gate": "blk.{n}.ffn_gate",
    "layers.N.ffn.up": "blk.{n}.ffn_up",
    "layers.N.ffn.down": "blk.{n}.ffn_down",
    "final_norm": "output_norm",
    "head": "output",
}
"""Canonical name of what holds a weight and perhaps a bias -> its name in the file."""


def read_gguf(path: str | os.PathLike[str], *, activation: str | None = None) -> Checkpoint:
    """Opens a GGUF file as a model; checks all of it, reads no weight yet.

    Matrices come in the one float type that all of them have in the file; in float32 if they differ or are
    quantised, with a note of the type to quantise them to again.

    Args:
        path: the file, of llama.cpp or of PowerInfer; of several parts, any one.
        activation: the activation function, which GGUF files do not say; None if the architecture or the
            model's name tells.

    Raises:
        FileNotFoundError: no such file, or a part of it is missing.
        ValueError: a damaged file, a model that is not supported, a key or tensor that is missing or wrong,
            or an activation that is not known. The message names the file and what is wrong in it.
    """
    file = _join_parts(open_gguf(path))
    config = read_gguf_config(file, activation)
    tensors = _match_tensors(file, config)
    predictors = _read_predictors(file, config)
    used = {tensor.name for tensor in tensors.values()} | {"rope_freqs.weight"}
    if predictors is not None:
        used |= {tensor.name for layer in predictors.layers for tensor in layer}
    ignored = sorted(name for name in file.tensors if name not in used)
    if ignored:
        logging.warning("%s: ignored %d tensors: %s", path, len(ignored), ", ".join(ignored[:8]))
    return Checkpoint(config, tensors, predictors)


def _join_parts(file: GgufFile) -> GgufFile:
    """The whole of a model that is split over files; the first has the metadata."""
    num_parts = file.metadata.get("split.count", 1)
    if not isinstance(num_parts, int) or num_parts < 0:
        raise ValueError(f"{file.path}: split.count: expected a number of parts, found {num_parts!r:.80}.")
    if num_parts in (0, 1):
        return file
    found = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", file.path.name)
    if not found or int(found[3]) != num_parts:
        raise ValueError(
            f"{file.path}: one of {num_parts} parts of a model; "
            f"expected a name that ends in -0000N-of-{num_parts:05}.gguf."
        )
    paths = [file.path.with_name(f"{found[1]}{i:05}{found[2]}") for i in range(1, int(found[3]) + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise FileNotFoundError(f"{file.path}: the parts {', '.join(missing[:3])} are missing beside it.")
    parts = [open_gguf(part) for part in paths]
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise ValueError(f"{part.path}: the tensor {min(twice)!r} is also in another part.")
        tensors |= part.tensors
    return dataclasses.replace(parts[0], tensors=tensors)


def _match_tensors(file: GgufFile, config: ModelConfig) -> dict[str, SourceTensor]:
    """Finds each weight that the config calls for, and checks type and shape."""
    architecture = ARCHITECTURES[find_architecture(file)]
    found: dict[str, tuple[GgufTensor, _Layout]] = {}
    shapes = weight_shapes(config)
    for name, shape in shapes.items():
        file_name = _file_name(name, file, architecture)
        if file_name not in file.tensors:
            raise ValueError(f"{file.path} lacks the tensor {file_name}, shape {list(shape)}.")
        layout = _find_layout(name, shape, file_name, architecture, config)
        found[name] = (_checked(file.tensors[file_name], layout.file_shape), layout)
    types = {tensor.type for tensor, _ in found.values() if len(tensor.shape) > 1}
    dtype = _FLOAT_TYPES.get(types.pop(), _FLOAT32) if len(types) == 1 else _FLOAT32
    return {
        name: _source(tensor, layout, shapes[name], dtype if len(shapes[name]) > 1 else _FLOAT32)
        for name, (tensor, layout) in found.items()
    }


def _file_name(name: str, file: GgufFile, architecture: Architecture) -> str:
    module, layer, is_bias = split_name(name)
    found = _MODULES[module].format(n=layer)
    if architecture.fused_qkv and module in QKV:
        found = f"blk.{layer}.attn_qkv"
    if architecture.block == "parallel":  # 7B and 11B have one norm for attention and FFN
        second = f"blk.{layer}.attn_norm_2"
        is_split = module == "layers.N.attention_norm" and f"{second}.weight" in file.tensors
        found = second if is_split else found.replace("ffn_norm", "attn_norm")
    if module == "layers.N.ffn.down" and f"{found}_t.weight" in file.tensors:
        found = f"{found}_t"
    return f"{found}.{'bias' if is_bias else 'weight'}"


class _Layout(NamedTuple):
    """How a weight lies in the file.

    Attributes:
        file_shape: the tensor's shape.
        rows: those of the tensor that are the weight.
        to_canonical: turns them into it.
    """

    file_shape: tuple[int, ...]
    rows: slice = slice(None)
    to_canonical: Callable[[np.ndarray], np.ndarray] = lambda array: array


def _find_layout(
    name: str, shape: tuple[int, ...], file_name: str, architecture: Architecture, config: ModelConfig
) -> _Layout:
    module, _, is_bias = split_name(name)
    if module == "layers.N.ffn.down" and not is_bias and "_t." not in file_name:
        return _Layout(shape[::-1], to_canonical=np.transpose)
    if module in QKV and architecture.fused_qkv:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        first = (0, queries, queries + keys)[QKV.index(module)]
        return _Layout((queries + 2 * keys, *shape[1:]), slice(first, first + shape[0]))
    if module in QKV[:2] and architecture.pairs_adjacent and config.rope:
        separate = partial(_separate_pairs, head_dim=config.head_dim, width=config.rope.width)
        return _Layout(shape, to_canonical=separate)
    return _Layout(shape)


def _separate_pairs(rows: np.ndarray, *, head_dim: int, width: int) -> np.ndarray:
    """Brings rows 0, 2, 4, ... of what RoPE turns in each head to the front, and rows 1, 3, 5, ... behind.

    Args:
        rows: [heads * head_dim, ...].
        head_dim: rows of one head.
        width: how many of these RoPE turns.
    """
    order = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2), np.arange(width, head_dim)])
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _checked(tensor: GgufTensor, shape: tuple[int, ...]) -> GgufTensor:
    """The tensor, if it has this shape and a type that can be turned into floats."""
    if tensor.shape != shape:
        raise ValueError(
            f"{tensor.file}: {tensor.name}: the file's metadata call for shape {list(shape)}, "
            f"found {list(tensor.shape)}."
        )
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
    except NotImplementedError as error:
        raise ValueError(
            f"{tensor.file}: {tensor.name}: weights of type {tensor.type.name} are not supported; get the "
            "model in another type, such as Q8_0 or F16."
        ) from error
    return tensor


def _source(tensor: GgufTensor, layout: _Layout, shape: tuple[int, ...], dtype: np.dtype) -> SourceTensor:
    return SourceTensor(
        name=tensor.name,
        file=str(tensor.file),
        read=lambda: layout.to_canonical(read_floats(tensor, layout.rows, dtype)),
        shape=shape,
        dtype=dtype,
        stored=tensor.map_bytes,
        quantised_as=_quantised_as(tensor.type),
    )


def _quantised_as(kind: GGMLQuantizationType) -> str | None:
    if kind in _FLOAT_TYPES:
        return None
    return "q4_0" if kind == GGMLQuantizationType.Q4_0 else "q8_0"


def read_floats(tensor: GgufTensor, rows: slice, dtype: np.dtype) -> np.ndarray:
    """Rows of a tensor as they lie in the file, read a few at a time: little more is held than the result."""
    if len(tensor.shape) == 1:
        return _to_floats(tensor.read_rows(0, 1), tensor.type)[0].astype(dtype)[rows]
    start, stop, _ = rows.indices(tensor.shape[0])
    result = np.empty((stop - start, *tensor.shape[1:]), dtype)
    step = max(1, _BLOCK_BYTES // (4 * tensor.shape[-1]))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        result[first - start : last - start] = _to_floats(tensor.read_rows(first, last), tensor.type)
    return result


def _to_floats(stored: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8 [rows, row_bytes] -> the numbers [rows, columns], in their own type or float32."""
    return stored.view(_FLOAT_TYPES[kind]) if kind in _FLOAT_TYPES else quants.dequantize(stored, kind)


def _read_predictors(file: GgufFile, config: ModelConfig) -> StoredPredictors | None:
    """PowerInfer's predictors, if the file has them; then for all layers."""
    if not any(re.fullmatch(r"blk\.\d+\.fc[12]\.weight", name) for name in file.tensors):
        return None
    threshold = file.metadata.get("powerinfer.sparse_threshold", 0.0)
    if not isinstance(threshold, float) or not np.isfinite(threshold):
        raise ValueError(f"{file.path}: powerinfer.sparse_threshold: expected a number, found {threshold!r}.")
    layers = []
    for index, neurons in enumerate(config.neurons):
        names = [f"blk.{index}.{part}.weight" for part in ("fc1", "fc2")]
        missing = [name for name in names if name not in file.tensors]
        if missing:
            raise ValueError(f"{file.path} has predictors, but lacks the tensor {missing[0]}.")
        rank = file.tensors[names[0]].shape[0]
        shapes = ((rank, config.model), (neurons, rank))
        layers.append(
            tuple(
                _source(
                    tensor := _checked(file.tensors[name], shape),
                    _Layout(shape),
                    shape,
                    _FLOAT_TYPES.get(tensor.type, _FLOAT32),
                )
                for name, shape in zip(names, shapes, strict=True)
            )
        )
    return StoredPredictors(tuple(layers), threshold)
