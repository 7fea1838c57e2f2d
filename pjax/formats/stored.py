"""Opening .safetensors files: one, or the shards that an index names. Nothing is read until asked for."""

import json
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from pjax.formats.checkpoint import SourceTensor
from pjax.formats.files import describe_content, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Stored types that a weight may have. Importing ml_dtypes is what teaches NumPy bfloat16."""

_MAX_HEADER_BYTES = 100_000_000  # The format's own limit; a larger number means another kind of file.


def open_weights(folder: Path) -> dict[str, SourceTensor]:
    """Returns the tensors of a model folder, by their names in its files.

    A tensor of a type that is not in `FLOAT_TYPES` is listed too: its `dtype` is then void.

    Args:
        folder: an existing folder.

    Raises:
        FileNotFoundError: no weights, or a shard is missing.
        ValueError: only weights of an unsupported kind, or a broken file.
    """
    if (folder / SINGLE_FILE).is_file():
        return _open_file(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _open_shards(folder / INDEX_FILE)
    found = sorted(f.name for f in folder.iterdir())
    for suffix, kind in ((".gguf", "GGUF"), (".bin", "PyTorch pickle")):
        names = [name for name in found if name.endswith(suffix)]
        if names:
            raise ValueError(
                f"{folder / names[0]}: {kind} weights are not supported yet; "
                f"convert the model to safetensors and give that folder."
            )
    listed = ", ".join(found) or "nothing"
    raise FileNotFoundError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; it holds: {listed}.")


def _open_shards(index: Path) -> dict[str, SourceTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map: expected an object of tensor names and file names.")
    shards: dict[str, dict[str, SourceTensor]] = {}
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: weight_map: expected names of files beside it, found {shard!r}.")
        if shard not in shards and not (index.parent / shard).is_file():
            raise FileNotFoundError(
                f"{index.parent / shard} is missing, and {index.name} needs it. Download it."
            )
        shards.setdefault(shard, {})
    for shard in shards:
        shards[shard] = _open_file(index.parent / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ValueError(f"{index.parent / shard} lacks the tensor {name} that {index.name} promises.")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _open_file(file: Path) -> dict[str, SourceTensor]:
    _check_size(file)
    try:
        handle = safe_open(file, framework="numpy")
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"{file} is not a sound safetensors file ({error}). Download it again.") from error
    return {
        name: SourceTensor(
            name=name,
            file=str(file),
            read=partial(handle.get_tensor, name),
            shape=tuple(found.get_shape()),
            dtype=FLOAT_TYPES.get(found.get_dtype(), np.dtype(np.void)),
        )
        for name, found in slices.items()
    }


def _check_size(file: Path) -> None:
    """Raises if the file is of another kind, or shorter or longer than its own header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_bytes = int.from_bytes(start, "little")
        stream.seek(0)
        start = stream.read(64)
        is_other = len(start) < 8 or header_bytes > _MAX_HEADER_BYTES or start[8:9] not in (b"{", b"")
        if is_other:
            raise ValueError(f"{file} is not a safetensors file: it {describe_content(start)}.")
        stream.seek(8)
        header = stream.read(header_bytes)
    expected = 8 + header_bytes
    if size >= expected:
        try:
            tensors = json.loads(header)
            expected += max(
                (t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"), default=0
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{file}: the safetensors header is damaged ({error}). Download it again."
            ) from error
    if size != expected:
        raise ValueError(
            f"{file} has {size} bytes, its header promises {expected}: an incomplete download? Get it again."
        )
