"""Opening the weight files of a model folder: one, or the shards that an index names. Nothing is read yet."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pjax.formats.checkpoint import SourceTensor
from pjax.formats.files import describe_content, read_json
from pjax.formats.mapped import map_file
from pjax.formats.pickled import read_pickle
from pjax.weights import BFLOAT16

SINGLE_FILE = "model.safetensors"

FLOAT_TYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
"""Stored types that a weight may have."""

_TYPES = FLOAT_TYPES | {
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}".lower()) for kind in "IU" for bits in (8, 16, 32, 64)},
}
_ALIGNMENT = 64  # A line of the cache, at which XLA takes an array over as it is.
_MAX_HEADER_BYTES = 100_000_000  # The format's own limit; a larger number means another kind of file.


class _Entry(NamedTuple):
    """One tensor of a safetensors header; its bytes are start:end of what follows the header."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def open_weights(folder: Path) -> dict[str, SourceTensor]:
    """Returns the tensors of a model folder, by their names in its files.

    Reading one gives a read-only view of the mapped file. Tensors of types that are not in `FLOAT_TYPES` are
    listed too.

    Args:
        folder: an existing folder.

    Raises:
        FileNotFoundError: no weights, or a shard is missing.
        ValueError: a broken file, or a pickle of more than tensors.
    """
    # The same weights often lie there in both formats.
    for name, open_fn in ((SINGLE_FILE, open_safetensors), ("pytorch_model.bin", _open_pickle)):
        if (folder / name).is_file():
            return open_fn(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _open_shards(index, open_fn)
    found = sorted(file.name for file in folder.iterdir())
    ggufs = [name for name in found if name.endswith(".gguf")]
    hint = f"give {folder / ggufs[0]} itself" if ggufs else f"it holds: {', '.join(found) or 'nothing'}"
    raise FileNotFoundError(
        f"{folder} has neither {SINGLE_FILE} nor pytorch_model.bin, nor the index of either; {hint}."
    )


def open_safetensors(file: Path) -> dict[str, SourceTensor]:
    """Returns the tensors of one safetensors file by name; the header is checked, nothing else read.

    Args:
        file: an existing file.

    Raises:
        ValueError: not such a file, cut, or a header that does not describe each byte of it once.
    """
    content = map_file(file)
    start = _data_start(file, content)
    tensors = {}
    for entry in _read_header(file, content, start):
        view = content[start + entry.start : start + entry.end].view(entry.dtype).reshape(entry.shape)
        tensors[entry.name] = _source(file, entry.name, view)
    return tensors


def safetensors_metadata(file: Path) -> dict[str, str]:
    """Returns the texts in the header of a safetensors file; none if it has none, or something else there.

    Args:
        file: an existing file, which `open_safetensors` accepts.
    """
    content = map_file(file)
    found = json.loads(content[8 : _data_start(file, content)].tobytes()).get("__metadata__")
    return (
        {key: text for key, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}
    )


def safetensors_pieces(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """Returns what a safetensors file of these arrays consists of, in order; nothing is copied.

    The library's own writer first makes one bytes object of it all. An array begins at a multiple of 64 bytes
    if all before it are as long, and those come first that are.

    Args:
        arrays: contiguous, by name.
        metadata: texts for the header.
    """
    kinds = {dtype: kind for kind, dtype in _TYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    pieces, end = [], 0
    for name, array in sorted(arrays.items(), key=lambda item: item[1].nbytes % _ALIGNMENT != 0):
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": kinds[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        pieces.append(array.reshape(-1).view(np.uint8).data)
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def _open_pickle(file: Path) -> dict[str, SourceTensor]:
    found = read_pickle(file)
    if not isinstance(found, dict):
        raise ValueError(
            f"{file}: expected a dict of names and tensors, found a {type(found).__name__}; "
            "save the model's state_dict()."
        )
    return {
        name: _source(file, name, array)
        for name, array in found.items()
        if isinstance(name, str) and isinstance(array, np.ndarray)
    }


def _open_shards(index: Path, open_fn: Callable[[Path], dict[str, SourceTensor]]) -> dict[str, SourceTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map: expected an object of tensor names and file names.")
    shards: dict[str, dict[str, SourceTensor]] = {}
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: weight_map: expected names of files beside it, found {shard!r}.")
        # Path.is_file raises for a name that no file can have.
        if shard not in shards and not os.path.isfile(index.parent / shard):
            raise FileNotFoundError(
                f"{index.parent / shard} is missing, and {index.name} needs it. Download it."
            )
        shards.setdefault(shard, {})
    for shard in shards:
        shards[shard] = open_fn(index.parent / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ValueError(f"{index.parent / shard} lacks the tensor {name} that {index.name} promises.")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _source(file: Path, name: str, array: np.ndarray) -> SourceTensor:
    view = partial(np.asarray, array)
    return SourceTensor(name, str(file), view, array.shape, array.dtype, view)


def _data_start(file: Path, content: np.ndarray) -> int:
    """Where the header ends; raises if the file is of another kind, or ends before that."""
    start = content[:64].tobytes()
    header_bytes = int.from_bytes(start[:8], "little")
    if len(start) < 8 or header_bytes > _MAX_HEADER_BYTES or start[8:9] not in (b"{", b""):
        raise ValueError(f"{file} is not a safetensors file: it {describe_content(start)}.")
    if len(content) < 8 + header_bytes:
        raise _wrong_size(file, content, 8 + header_bytes)
    return 8 + header_bytes


def _read_header(file: Path, content: np.ndarray, data_start: int) -> list[_Entry]:
    """The tensors in the order of their bytes, which they cover without gap or overlap."""
    try:
        header = json.loads(content[8:data_start].tobytes().decode(), object_pairs_hook=_without_repeats)
        entries = [_entry(name, found) for name, found in header.items() if name != "__metadata__"]
        end = 0
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
            if entry.start != end:
                raise ValueError(f"{entry.name} begins at byte {entry.start} of the data, expected {end}")
            end = entry.end
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: the safetensors header is damaged ({error}). Get it again.") from error
    if len(content) != data_start + end:
        raise _wrong_size(file, content, data_start + end)
    return entries


def _entry(name: str, found: Any) -> _Entry:
    """One entry of the header, checked by itself."""
    keys = ("dtype", "shape", "data_offsets")
    if not isinstance(found, dict) or any(key not in found for key in keys):
        raise ValueError(f"{name}: expected {', '.join(keys)}, found {str(found)[:80]}")
    kind, shape, offsets = (found[key] for key in keys)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f"{name}: dtype: expected one of {', '.join(_TYPES)}, found {str(kind)[:80]}")
    for key in keys[1:]:
        values = found[key]
        if not isinstance(values, list) or any(type(n) is not int or not 0 <= n < 2**63 for n in values):
            raise ValueError(f"{name}: {key}: expected a list of counts, found {str(values)[:80]}")
    if len(offsets) != 2:
        raise ValueError(f"{name}: data_offsets: expected begin and end, found {str(offsets)[:80]}")
    num_bytes = _TYPES[kind].itemsize
    for count in shape:
        num_bytes *= count
    if offsets[1] - offsets[0] != num_bytes:
        raise ValueError(f"{name}: {kind} of shape {shape} takes {num_bytes} bytes, data_offsets: {offsets}")
    return _Entry(name, _TYPES[kind], tuple(shape), *offsets)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a name twice among {str([name for name, _ in pairs])[:80]}")
    return found


def _wrong_size(file: Path, content: np.ndarray, expected: int) -> ValueError:
    return ValueError(
        f"{file} has {len(content)} bytes, its header promises {expected}: an incomplete download? "
        "Get it again."
    )
