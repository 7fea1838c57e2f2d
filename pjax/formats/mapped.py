"""Files mapped into memory, and weights read out of them piece by piece, so that no file stays there."""

import hashlib
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pjax.formats.checkpoint import SourceTensor
from pjax.memory import aligned_empty
from pjax.weights import BFLOAT16

_PIECE_BYTES = 4 << 20  # Hides what a step costs, and stays small beside the smallest models worth mapping.
_TILE = (64, 1024)  # Rows and columns turned at a time: whole cache lines both ways; the fastest of some.
_SAMPLES = 16  # Of a tensor's bytes, for its fingerprint: any training changes nearly all of them.
_SAMPLE_BYTES = 4096  # A page costs as much as a byte.
_POOL = ThreadPoolExecutor(2)  # One core does not saturate the memory; more than two gain little.


def map_file(file: Path) -> np.ndarray:
    """Returns a file's bytes, uint8 [size], read-only; they are read when they are first looked at.

    Args:
        file: an existing file.
    """
    with file.open("rb") as stream:
        if not file.stat().st_size:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def drop_pages(view: np.ndarray) -> None:
    """Tells the system that a view of a mapped file was read; an array of another kind is left alone.

    The pages leave this process's memory, not the system's cache; looking at them again is slow, not wrong.

    Args:
        view: any part of what `map_file` returned, of any type and layout.
    """
    mapping = _mapping_of(view)
    if mapping is None or not view.size or not hasattr(mmap, "MADV_DONTNEED"):
        return
    origin = np.frombuffer(mapping, np.uint8).ctypes.data
    first, last = (address - origin for address in np.lib.array_utils.byte_bounds(view))
    # Inwards, so that a page shared with a neighbour who is still to be read stays.
    first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def describe_stored(tensor: SourceTensor) -> list[str | int | list[int] | None]:
    """What tells a stored weight from another without reading all of it, as values that JSON can write.

    Its name, shape and types, the number of its bytes, and a hash of pieces of them, evenly spread.

    Args:
        tensor: of any source.

    Raises:
        ValueError: the file has become shorter since it was opened.
    """
    view = tensor.stored()
    _check_not_shrunk(tensor, view)
    content = view.reshape(-1).view(np.uint8)
    digest = hashlib.blake2b(digest_size=16)
    for start in np.linspace(0, max(0, len(content) - _SAMPLE_BYTES), _SAMPLES, dtype=np.int64):
        digest.update(content[start : start + _SAMPLE_BYTES].data)
    kinds = [str(view.dtype), str(tensor.dtype), tensor.quantised_as]
    return [tensor.name, list(tensor.shape), *kinds, len(content), digest.hexdigest()]


def load_array(tensor: SourceTensor, dtype: np.dtype) -> np.ndarray:
    """Returns a weight in memory of its own, contiguous, read-only, at an address that JAX need not copy.

    Args:
        tensor: what to read, of any float type.
        dtype: float32, float16 or bfloat16.

    Raises:
        ValueError: the file has become shorter since it was opened, or a value is beyond float16.
    """
    source = tensor.read()
    target = aligned_empty(source.shape, dtype)
    # Along the file, whichever way the weight lies in it: a piece is then read at once, or its pages dropped.
    turned = source.ndim == 2 and source.strides[0] < source.strides[1]
    pieces = list(_pieces(source.T, target.T) if turned else _pieces(source, target))

    def copy(piece: tuple[np.ndarray, np.ndarray]) -> None:
        try:
            _load_piece(tensor, *piece, turned)
        except FloatingPointError as error:
            message = "holds values beyond float16's range; ask for bfloat16 or float32."
            raise ValueError(f"{tensor.file}: {tensor.name} {message}") from error

    if len(pieces) == 1:
        copy(pieces[0])
    else:
        list(_POOL.map(copy, pieces))
    target.flags.writeable = False
    return target


def add_up(array: np.ndarray) -> str:
    """A checksum of a contiguous array's bytes that costs no more than reading them.

    Of each piece the sum of its 64-bit words, in order: one wrong word changes it, whatever it becomes.

    Args:
        array: in memory.
    """
    content = array.reshape(-1).view(np.uint8)
    starts = range(0, len(content), _PIECE_BYTES)
    return hashlib.blake2b(
        b"".join(_POOL.map(lambda start: _sum_words(content[start : start + _PIECE_BYTES]), starts)),
        digest_size=16,
    ).hexdigest()


def _sum_words(content: np.ndarray) -> bytes:
    whole = len(content) // 8 * 8
    return content[:whole].view(np.uint64).sum(dtype=np.uint64).tobytes() + content[whole:].tobytes()


def _load_piece(tensor: SourceTensor, source: np.ndarray, target: np.ndarray, turned: bool) -> None:
    _check_not_shrunk(tensor, source)
    place = _place_in_file(source)
    if place is None:
        _copy_piece(source, target, turned)
        drop_pages(source)
    elif source.dtype == target.dtype and not turned:
        _read_into(tensor, target, place)
    else:
        read = np.empty(source.shape, source.dtype)
        _read_into(tensor, read, place)
        _copy_piece(read, target, turned)


def _mapping_of(view: np.ndarray) -> mmap.mmap | None:
    found: Any = view
    while found is not None and not isinstance(found, mmap.mmap):
        found = found.obj if isinstance(found, memoryview) else getattr(found, "base", None)
    return found


def _place_in_file(view: np.ndarray) -> int | None:
    """Where the bytes of a contiguous view of a mapped file begin in the file; None for any other array.

    They are read from there, and not by looking at them: each page would cost a fault.
    """
    mapping = _mapping_of(view)
    if mapping is None or not view.flags.c_contiguous or not view.size:
        return None
    return view.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data


def _read_into(tensor: SourceTensor, target: np.ndarray, start: int) -> None:
    """Fills a contiguous array with the file's bytes from `start` on."""
    with open(tensor.file, "rb", buffering=0) as stream:
        stream.seek(start)
        rest = target.view(np.uint8).reshape(-1).data
        while rest:
            count = stream.readinto(rest)
            if not count:
                raise ValueError(
                    f"{tensor.file}: {tensor.name} ends {len(rest)} bytes early; is something still writing "
                    "the file? Load it again when it is complete."
                )
            rest = rest[count:]


def _pieces(source: np.ndarray, target: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows = max(1, _PIECE_BYTES * len(source) // max(1, source.nbytes))
    for start in range(0, len(source), rows):
        yield source[start : start + rows], target[start : start + rows]


def _check_not_shrunk(tensor: SourceTensor, view: np.ndarray) -> None:
    """Looking at what is no longer there would end the process, without a word."""
    mapping = _mapping_of(view)
    if mapping is not None and mapping.size() < len(mapping):
        raise ValueError(
            f"{tensor.file}: had {len(mapping)} bytes when it was opened and has {mapping.size()} now; "
            "is something still writing it? Load it again when it is complete."
        )


def _copy_piece(source: np.ndarray, target: np.ndarray, turned: bool) -> None:
    if not turned:
        _convert(source, target)
        return
    rows, columns = _TILE
    for row in range(0, source.shape[0], rows):
        for column in range(0, source.shape[1], columns):
            tile = np.s_[row : row + rows, column : column + columns]
            _convert(source[tile].T, target[tile].T)


def _convert(source: np.ndarray, target: np.ndarray) -> None:
    """Copies with a change of type, by ways that let the other thread run: ml_dtypes' own do not."""
    if source.dtype == target.dtype:
        bits = np.dtype(f"u{source.dtype.itemsize}")
        target.view(bits)[...] = source.view(bits)
        return
    if source.dtype == BFLOAT16:  # the upper half of a float32
        upper = np.left_shift(source.view(np.uint16), 16, dtype=np.uint32)
        source = upper.view(np.float32)
    with np.errstate(over="raise", invalid="ignore"):
        target[...] = source
