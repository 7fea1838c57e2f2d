"""The GGUF container: typed metadata and named tensors; nothing is believed beyond what the file can hold.

Layout (GGUF specification, versions 2 and 3; all little-endian): magic, version u32, number of tensors u64,
number of keys u64; the keys with their values; for each tensor its name, dimensions (fastest first), type and
offset; padding; the tensors' bytes. PowerInfer writes the same under the magic PWRI.
"""

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
)

from pjax.formats.files import describe_content, expand_path
from pjax.formats.mapped import map_file

MAGICS = (b"GGUF", b"PWRI")
"""First bytes of a file: llama.cpp's and PowerInfer's."""

VERSIONS = (2, 3)
"""They share one layout; version 1 had 32-bit counts and was replaced within weeks."""

_NUMBER_TYPES = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "|b1",
}

_MIN_KEY_BYTES = 13  # an empty name's length, a type, a value of one byte
_MIN_TENSOR_BYTES = 32  # an empty name's length, the number of dimensions, one of them, type, offset
_MAX_DIMENSIONS = 4  # GGML's own limit
_MAX_NESTING = 4  # of arrays in arrays; no known key has any


class GgufTensor(NamedTuple):
    """One tensor of a GGUF file.

    Attributes:
        name: as in the file.
        file: the file.
        type: how its numbers are stored.
        shape: slowest dimension first, as NumPy has it.
        offset: of its first byte in the file.
        row_bytes: of one row, a step of the last dimension.
    """

    name: str
    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Number of rows, over all dimensions but the last."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first..last-1 as they are stored, uint8 [rows, row_bytes].

        Raises:
            ValueError: the file has become shorter since it was opened.
        """
        with self.file.open("rb") as stream:
            stream.seek(self.offset + first * self.row_bytes)
            rows = np.fromfile(stream, np.uint8, (last - first) * self.row_bytes)
        if rows.size != (last - first) * self.row_bytes:
            raise ValueError(f"{self.file}: {self.name}: the file has become shorter while it was read.")
        return rows.reshape(last - first, self.row_bytes)

    def map_bytes(self) -> np.ndarray:
        """Returns all rows as they are stored, uint8, a view of the mapped file."""
        return map_file(self.file)[self.offset : self.offset + self.num_rows * self.row_bytes]


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A GGUF file, checked throughout but for the tensors' numbers, which are not read yet.

    Attributes:
        path: the file.
        version: of the container.
        magic: one of `MAGICS`.
        metadata: key to value: int, float, bool or str; an array of numbers as a NumPy array, of strings or
            arrays as a tuple.
        tensors: by name, in the file's order.
    """

    path: Path
    version: int
    magic: bytes
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF or PowerInfer file does."""
    with path.open("rb") as stream:
        return stream.read(4) in MAGICS


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Opens a GGUF file and checks all counts, lengths, types, sizes and offsets in it.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a GGUF file, of another version or byte order, cut short, or inconsistent. The
            message names the file and what is wrong in it.
    """
    path = expand_path(path)
    if path.is_dir():
        raise ValueError(f"{path}: expected a GGUF file, found a folder.")
    with path.open("rb") as stream:
        cursor = _Cursor(path, stream, path.stat().st_size)
        magic, version = _read_start(cursor)
        num_tensors = cursor.count("number of tensors", _MIN_TENSOR_BYTES)
        num_keys = cursor.count("number of keys", _MIN_KEY_BYTES)
        metadata: dict[str, Any] = {}
        types: dict[str, GGUFValueType] = {}
        for _ in range(num_keys):
            key = cursor.text("a key")
            if key in metadata:
                raise cursor.error(f"the key {key!r} occurs twice")
            types[key] = cursor.value_type(key)
            metadata[key] = cursor.value(key, types[key])
        infos: dict[str, _TensorInfo] = {}
        for _ in range(num_tensors):
            info = _read_tensor_info(cursor)
            if info.name in infos:
                raise cursor.error(f"the tensor {info.name!r} occurs twice")
            infos[info.name] = info
        tensors = _place(cursor, infos, _alignment(cursor, metadata, types))
        return GgufFile(path, version, magic, metadata, tensors)


class _Cursor:
    """Reads a file from front to back; never asks for more than it has left."""

    def __init__(self, path: Path, stream: BinaryIO, size: int):
        self.path, self.stream, self.size, self.position = path, stream, size, 0

    def error(self, what: str) -> ValueError:
        return ValueError(
            f"{self.path}: not a sound GGUF file: {what}. An incomplete download? Get it again."
        )

    def take(self, num_bytes: int, what: str) -> bytes:
        left = self.size - self.position
        found = self.stream.read(num_bytes) if num_bytes <= left else b""
        if len(found) != num_bytes:
            place = f"{what}, at byte {self.position},"
            raise self.error(f"{place} needs {num_bytes} bytes, the file has {left} left")
        self.position += num_bytes
        return found

    def uint32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def uint64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def count(self, what: str, min_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        found = self.uint64(what)
        if found * min_bytes > self.size - self.position:
            raise self.error(f"{what} is {found}, more than the rest of the file could hold")
        return found

    def text(self, what: str) -> str:
        raw = self.take(self.count(f"the length of {what}", 1), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {raw[:40]!r}") from error

    def value_type(self, key: str) -> GGUFValueType:
        number = self.uint32(f"the type of {key}")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.error(f"{key}: there is no value type {number}") from error

    def value(self, key: str, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text(key)
        if kind != GGUFValueType.ARRAY:
            return self.numbers(key, kind, 1)[0].item()
        if depth == _MAX_NESTING:
            raise self.error(f"{key}: arrays are nested more than {_MAX_NESTING} deep")
        item_kind = self.value_type(key)
        if item_kind in _NUMBER_TYPES:
            item_bytes = np.dtype(_NUMBER_TYPES[item_kind]).itemsize
            return self.numbers(key, item_kind, self.count(f"the length of {key}", item_bytes))
        length = self.count(f"the length of {key}", 8)
        return tuple(self.value(key, item_kind, depth + 1) for _ in range(length))

    def numbers(self, key: str, kind: GGUFValueType, length: int) -> np.ndarray:
        dtype = np.dtype(_NUMBER_TYPES[kind])
        raw = self.take(length * dtype.itemsize, key)
        if kind == GGUFValueType.BOOL and raw.strip(b"\0\1"):
            raise self.error(f"{key}: a boolean is neither 0 nor 1")
        return np.frombuffer(raw, dtype)


def _read_start(cursor: _Cursor) -> tuple[bytes, int]:
    start = cursor.stream.read(64)
    cursor.stream.seek(0)
    if start[:4] not in MAGICS:
        raise ValueError(f"{cursor.path}: expected a GGUF file, but it {describe_content(start)}.")
    magic = cursor.take(4, "the magic")
    version = cursor.uint32("the version")
    if version and not version % (1 << 16):
        raise ValueError(f"{cursor.path}: big-endian files are not supported; get the little-endian one.")
    if version not in VERSIONS:
        raise ValueError(
            f"{cursor.path}: GGUF version {version} is not supported; expected version 2 or 3. "
            "Get a current file of the model, or convert it again."
        )
    return magic, version


class _TensorInfo(NamedTuple):
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        num_rows = 1
        for size in self.shape[:-1]:
            num_rows *= size  # Python's own integers: they do not overflow
        return num_rows * self.row_bytes


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.text("a tensor's name")
    num_dimensions = cursor.uint32(f"{name}: its number of dimensions")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.error(f"{name}: expected 1 to {_MAX_DIMENSIONS} dimensions, found {num_dimensions}")
    sizes = [cursor.uint64(f"{name}: its dimensions") for _ in range(num_dimensions)]
    number = cursor.uint32(f"{name}: its type")
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise cursor.error(f"{name}: there is no tensor type {number}") from error
    # A list may be empty: a split that PowerInfer made may put nothing of a layer on the GPU.
    if (len(sizes) > 1 and not all(sizes)) or sizes[0] % block:
        raise cursor.error(
            f"{name}: expected positive dimensions, for {kind.name} the first a multiple of {block}, "
            f"found {sizes}"
        )
    offset = cursor.uint64(f"{name}: its offset")
    return _TensorInfo(name, kind, tuple(reversed(sizes)), offset, sizes[0] // block * block_bytes)


def _alignment(cursor: _Cursor, metadata: dict[str, Any], types: dict[str, GGUFValueType]) -> int:
    key = Keys.General.ALIGNMENT
    if key not in metadata:
        return GGUF_DEFAULT_ALIGNMENT
    if types[key] != GGUFValueType.UINT32:
        raise cursor.error(f"{key}: expected the type UINT32, found {types[key].name}")
    alignment = metadata[key]
    if alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(f"{key}: expected a power of two, found {alignment}")
    return alignment


def _place(cursor: _Cursor, infos: dict[str, _TensorInfo], alignment: int) -> dict[str, GgufTensor]:
    """The tensors, once it is certain that each has its bytes in the file and to itself."""
    start = -(-cursor.position // alignment) * alignment
    end, before = start, "the header"
    for info in sorted(infos.values(), key=lambda info: (info.offset, info.num_bytes)):
        first, last = start + info.offset, start + info.offset + info.num_bytes
        if info.offset % alignment:
            raise cursor.error(
                f"{info.name}: offset {info.offset} is no multiple of the alignment {alignment}"
            )
        if last > cursor.size:
            raise cursor.error(
                f"{info.name}, {info.type.name} {list(info.shape)}, ends at byte {last}, "
                f"the file at {cursor.size}"
            )
        if first < end:
            raise cursor.error(f"{info.name} overlaps {before}")
        end, before = last, info.name
    return {
        name: GgufTensor(name, cursor.path, info.type, info.shape, start + info.offset, info.row_bytes)
        for name, info in infos.items()
    }
