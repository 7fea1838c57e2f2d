"""PyTorch's files, written without PyTorch, and pickles that it would not write."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np

STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "bool": "BoolStorage",
}


class Name:
    """Pickled as a global that need not exist here."""

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name


class Call:
    """Pickled as a call of a global, and perhaps of its __setstate__ thereafter."""

    def __init__(self, function: object, *args: object, state: object = None):
        self.function, self.args, self.state = function, args, state


class Storage:
    """Pickled as a persistent id."""

    def __init__(self, dtype: str, key: str, length: int):
        self.pid = ("storage", Name("torch", STORAGES[dtype]), key, "cpu", length)


class _Pickler(pickle._Pickler):  # the one in Python, which lets a test write what it likes
    dispatch = pickle._Pickler.dispatch.copy()

    def persistent_id(self, obj):
        return obj.pid if isinstance(obj, Storage) else None

    def _save_name(self, obj):
        self.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())

    def _save_call(self, obj):
        self.save(obj.function)
        self.save(obj.args)
        self.write(b"R")
        if obj.state is not None:
            self.save(obj.state)
            self.write(b"b")

    dispatch[Name], dispatch[Call] = _save_name, _save_call


def pickled(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, 2).dump(value)
    return stream.getvalue()


def stored_tensor(dtype: str, key: str, length: int, shape, strides=None, offset=0):
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :], dtype=int)) for i in range(len(shape)))
    rebuild = Name("torch._utils", "_rebuild_tensor_v2")
    hooks = Call(Name("collections", "OrderedDict"))
    return Call(rebuild, Storage(dtype, key, length), offset, shape, strides, False, hooks)


def write_archive(file, value, storages=(), compression=zipfile.ZIP_STORED, extra=()):
    """Writes what torch.save would: a value made of the above, or its pickle, and its storages' bytes."""
    members = {"data.pkl": value if isinstance(value, bytes) else pickled(value)}
    members |= {f"data/{key}": array.tobytes() for key, array in dict(storages).items()} | dict(extra)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            member = zipfile.ZipInfo(f"a/{name}")  # without the time, so that the same is the same
            member.compress_type = compression
            archive.writestr(member, content)


def save_tensors(file: Path, value: np.ndarray | dict[str, np.ndarray]) -> None:
    """Writes an array, or several by name, as torch.save would."""
    arrays = value if isinstance(value, dict) else {"": value}
    tensors = {
        name: stored_tensor(str(a.dtype), str(i), a.size, a.shape)
        for i, (name, a) in enumerate(arrays.items())
    }
    storages = {str(i): array for i, array in enumerate(arrays.values())}
    write_archive(file, tensors if isinstance(value, dict) else tensors[""], storages)
