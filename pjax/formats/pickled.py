"""PyTorch's .bin and .pt files, read without running their pickles: tensors and plain containers only."""

import io
import math
import mmap
import pickle
import pickletools
import re
import reprlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pjax.formats.files import describe_content
from pjax.formats.mapped import map_file
from pjax.weights import BFLOAT16

_STORAGE_TYPES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": BFLOAT16,
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}

_OPERATIONS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID
"""
"""What tensors in containers are written with. The rest makes objects, or is of no use here."""

_MAX_SHARING = (
    100  # Times that a byte of a pickle may be used, on average; what shares its weights does so twice.
)

_LEGACY_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # The pickled number before PyTorch 1.6.

_StorageFn = Callable[[str, np.dtype, int], np.ndarray]  # (key, dtype, length) -> its elements


def read_pickle(file: Path) -> Any:
    """Returns what `torch.save` wrote: dicts, lists, tuples, numbers, strings, and tensors as NumPy arrays.

    The arrays are read-only views of the mapped file. Parameters become arrays too; what else hangs on a
    tensor, its device, gradient or hooks, is left out.

    Args:
        file: an existing file, as PyTorch 1.6 and later write it (a zip archive), or older ones.

    Raises:
        ValueError: another kind of file, a damaged one, or a pickle that asks for anything else than tensors
            and containers; it is named, and nothing of it runs.
    """
    content = map_file(file)
    start = content[:64].tobytes()
    try:
        if start.startswith(b"PK\x03\x04"):
            return _read_archive(file, content)
        if start.startswith(_LEGACY_START):
            return _read_legacy(file, content)
    except Exception as error:  # noqa: BLE001 - a damaged zip or pickle may raise anything
        raise ValueError(f"{file}: cannot be read as tensors saved by PyTorch: {error}.") from error
    raise ValueError(f"{file} is not a file saved by PyTorch: it {describe_content(start)}.")


class _Global:
    """Stands for a name that a pickle asks for; cannot be changed by the pickle."""

    __slots__ = ("call", "dtype")

    def __init__(self, call: Callable[..., Any] | None = None, dtype: np.dtype | None = None):
        self.call, self.dtype = call, dtype

    def __call__(self, *args: Any) -> Any:
        if self.call is None:
            raise ValueError("a storage type is called")
        return self.call(*args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("the state of a function is set")


class _Dict(dict):
    """An OrderedDict of a pickle, less the attributes that PyTorch hangs on it."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        del state


def _check_operations(pickled: bytes) -> None:
    """Raises for what tensors do not need, and for what would grow without end.

    An object may be used again, so that a tuple of two of a tuple of two of ... is short to write and endless
    to look at. Each object's weight is therefore followed: itself and all in it, as often as it is there.
    """
    operations = frozenset(_OPERATIONS.split())
    stack: list[list[int]] = []  # each in a list of its own, for objects that are filled later
    marks: list[int] = []
    memo: dict[Any, list[int]] = {}
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        if name not in operations:
            raise ValueError(f"the pickle has the operation {name}, which tensors do not need")
        # Python makes room for as many entries as the largest of these numbers says.
        if name == "LONG_BINPUT" and isinstance(argument, int) and argument > len(pickled):
            raise ValueError(f"the pickle numbers an entry {argument}, and has {len(pickled)} bytes")
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            before = operation.stack_before
            to_mark = pickletools.markobject in before
            start = (
                marks.pop() - before.index(pickletools.markobject) if to_mark else len(stack) - len(before)
            )
            used, stack[start:] = stack[start:], []
            weight = sum(item[0] for item in used)
            if weight > _MAX_SHARING * len(pickled):
                raise ValueError("the pickle puts objects into each other over and over")
            if name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
                used[0][0] = weight
                stack.append(used[0])
            else:
                stack += [[weight + 1] for _ in operation.stack_after]


class _TensorUnpickler(pickle.Unpickler):
    """Knows the names that tensors need, and no others."""

    def __init__(self, pickled: bytes, storage_fn: _StorageFn):
        _check_operations(pickled)
        super().__init__(io.BytesIO(pickled), encoding="utf-8")
        self._storage_fn = storage_fn
        self._globals = {
            ("collections", "OrderedDict"): _Global(_Dict),
            ("torch", "Size"): _Global(tuple),
            ("torch._utils", "_rebuild_tensor_v2"): _Global(_rebuild_tensor),
            ("torch._utils", "_rebuild_parameter"): _Global(lambda array, *_: array),
        } | {("torch", name): _Global(dtype=dtype) for name, dtype in _STORAGE_TYPES.items()}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns a stand-in for one of the known names."""
        found = self._globals.get((module_name, global_name))
        if found is None:
            raise ValueError(
                f"its pickle asks for {module_name}.{global_name}, which no tensor needs; it was not run"
            )
        return found

    def persistent_load(self, pid: Any) -> np.ndarray:
        """Returns the elements of a storage."""
        kind, storage_type, key, _, length = pid[:5]
        if kind != "storage" or any(pid[5:]):
            raise ValueError(f"a storage is expected, the pickle has {reprlib.repr(pid)}")
        if not isinstance(storage_type, _Global) or storage_type.dtype is None:
            raise ValueError(f"storage {reprlib.repr(key)}: an element type is expected")
        if not isinstance(key, str) or type(length) is not int or length < 0:
            raise ValueError(f"a storage has the key and the length {reprlib.repr((key, length))}")
        return self._storage_fn(key, storage_type.dtype, length)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    counts = (offset, *shape, *strides)
    if not isinstance(storage, np.ndarray) or any(type(n) is not int or n < 0 for n in counts):
        raise ValueError(
            f"a tensor has the offset, shape and strides {reprlib.repr((offset, shape, strides))}"
        )
    size = math.prod(shape)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if size > storage.size or (size and last >= storage.size):
        raise ValueError(
            f"a tensor of shape {shape}, strides {strides} and offset {offset} is beyond the {storage.size} "
            "elements of its storage"
        )
    if not size:
        return np.empty(shape, storage.dtype)
    step = storage.strides[0]
    return as_strided(storage[offset:], shape, [n * step for n in strides], writeable=False)


def _read_archive(file: Path, content: np.ndarray) -> Any:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
    roots = [name[: -len("data.pkl")] for name in members if re.fullmatch("[^/]*/data.pkl", name)]
    if len(roots) != 1:
        raise ValueError(f"the archive has {len(roots)} members named */data.pkl, expected one")
    root = roots[0]
    if root + "byteorder" in members and _member(content, members[root + "byteorder"]).tobytes() != b"little":
        raise ValueError("the numbers are big-endian, which is not supported")

    def storage(key: str, dtype: np.dtype, length: int) -> np.ndarray:
        info = members.get(f"{root}data/{key}")
        if info is None:
            raise ValueError(f"the archive lacks the member data/{key}")
        if info.file_size != length * dtype.itemsize:
            raise ValueError(f"data/{key} has {info.file_size} bytes, expected {length} of {dtype}")
        return _member(content, info).view(dtype)

    pickled = _member(content, members[root + "data.pkl"]).tobytes()
    if zlib.crc32(pickled) != members[root + "data.pkl"].CRC:
        raise ValueError("the check sum of data.pkl is wrong; download the file again")
    return _TensorUnpickler(pickled, storage).load()


def _member(content: np.ndarray, info: zipfile.ZipInfo) -> np.ndarray:
    """The bytes of a member of the archive, a view."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise ValueError(f"the member {info.filename} is compressed or encrypted; PyTorch stores it as it is")
    header = content[info.header_offset : info.header_offset + 30].tobytes()
    start = info.header_offset + 30
    start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if not header.startswith(b"PK\x03\x04") or start + info.file_size > len(content):
        raise ValueError(f"the member {info.filename} lies outside the file; download it again")
    return content[start : start + info.file_size]


def _read_legacy(file: Path, content: np.ndarray) -> Any:
    """Four pickles (number, version, machine, object), one of the storages' keys, and the storages."""
    bounds = [0]
    # An ordinary file would make room for as many bytes as it is asked for, before it has them.
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        for _ in range(5):
            for _ in pickletools.genops(stream):  # type: ignore[arg-type]  # it reads as a file does
                pass
            bounds.append(stream.tell())
    _, _, machine, pickled, keys = (
        content[start:end].tobytes() for start, end in zip(bounds, bounds[1:], strict=False)
    )
    if not _TensorUnpickler(machine, _no_storage).load()["little_endian"]:
        raise ValueError("the numbers are big-endian, which is not supported")
    found: dict[str, tuple[np.dtype, int]] = {}

    def note(key: str, dtype: np.dtype, length: int) -> np.ndarray:
        found[key] = (dtype, length)
        return np.broadcast_to(np.zeros((), dtype), (length,))

    # Where a storage lies follows from the sizes of those before it, which only the object's pickle has.
    _TensorUnpickler(pickled, note).load()
    storages, position = {}, bounds[-1]
    for key in _TensorUnpickler(keys, _no_storage).load():
        dtype, length = found[key]
        start, position = position + 8, position + 8 + length * dtype.itemsize
        promised = int.from_bytes(content[start - 8 : start].tobytes(), "little")
        if position > len(content) or promised != length:
            raise ValueError(f"storage {key} is cut or not of length {length}; download the file again")
        storages[key] = content[start:position].view(dtype)
    return _TensorUnpickler(pickled, lambda key, *_: storages[key]).load()


def _no_storage(key: str, dtype: np.dtype, length: int) -> np.ndarray:
    raise ValueError(f"storage {key} ({dtype}, {length}) is named where none can be")
