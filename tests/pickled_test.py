"""PyTorch's files without PyTorch: its tensors arrive, and nothing that a pickle asks for is run."""

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from pjax.formats import read_checkpoint
from pjax.formats.pickled import read_pickle
from tests.cases import find_case
from tests.tiny import assert_same, by_file_name, tiny_opt
from tests.tiny_pickle import Call, Name, Storage, pickled, save_tensors, stored_tensor, write_archive


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (7,), (4, 5), (2, 3, 4)])
def test_types_and_shapes(tmp_path, dtype, shape):
    """Each element type and any shape, with the containers around it."""
    array = np.random.default_rng(0).normal(size=shape).astype(dtype)
    parameter = Call(
        Name("torch._utils", "_rebuild_parameter"), stored_tensor(str(array.dtype), "0", array.size, shape)
    )
    state = Call(Name("collections", "OrderedDict"), state={"_metadata": {"version": 1}})
    write_archive(tmp_path / "x.pt", {"a": [parameter, (1, "b", None, 2.5)], "c": state}, {"0": array})
    found = read_pickle(tmp_path / "x.pt")
    assert found["a"][1] == (1, "b", None, 2.5) and found["c"] == {}
    assert (found["a"][0].dtype, found["a"][0].shape) == (array.dtype, shape)
    np.testing.assert_array_equal(found["a"][0], array)


def test_views_of_one_storage(tmp_path):
    """Transposed tensors and parts of others have strides and offsets; none reaches beyond its storage."""
    base = np.arange(24, dtype=np.float32)
    good = {
        "turned": (stored_tensor("float32", "0", 24, (6, 4), (1, 6)), base.reshape(4, 6).T),
        "part": (
            stored_tensor("float32", "0", 24, (2, 3), (6, 2), offset=7),
            base[7:].reshape(-1)[:12].reshape(2, 6)[:, :6:2],
        ),
        "end": (stored_tensor("float32", "0", 24, (1,), offset=23), base[23:]),
    }
    write_archive(tmp_path / "x.pt", {name: tensor for name, (tensor, _) in good.items()}, {"0": base})
    found = read_pickle(tmp_path / "x.pt")
    for name, (_, expected) in good.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    for tensor in (
        stored_tensor("float32", "0", 24, (25,)),
        stored_tensor("float32", "0", 24, (1,), offset=24),
        stored_tensor("float32", "0", 24, (2, 2), (23, 1)),
        stored_tensor("float32", "0", 24, (10**12,), (0,)),
        stored_tensor("float32", "0", 24, (2,), (-1,), offset=3),
        stored_tensor("float32", "0", 24, (2,), (1, 1)),
        stored_tensor("float32", "0", 24, (True,), (1,)),
        stored_tensor("float32", "0", 24, ("4",), (1,)),
        stored_tensor("float32", "0", 25, (4,)),
        stored_tensor("float32", "1", 24, (4,)),
        Storage("float32", "0", -1),
        Call(Name("torch._utils", "_rebuild_tensor_v2"), base.size, 0, (1,), (1,)),
        Call(Name("torch", "FloatStorage")),
    ):
        write_archive(tmp_path / "x.pt", {"x": tensor}, {"0": base})
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / "x.pt"))):
            read_pickle(tmp_path / "x.pt")


class _Command:
    def __init__(self, function: Callable, argument: str):
        self.function, self.argument = function, argument

    def __reduce__(self):
        return self.function, (self.argument,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_commands_are_not_run(tmp_path, protocol):
    """The file and the function that it asks for are named; nothing happened."""
    marker = tmp_path / "ran"
    for function, argument in ((os.system, f"touch {marker}"), (eval, f"open({str(marker)!r}, 'w')")):
        write_archive(tmp_path / "x.bin", pickle.dumps({"x": _Command(function, argument)}, protocol))
        with pytest.raises(ValueError, match=r"x\.bin: .*(asks for \w+\.(system|eval)|operation)"):
            read_pickle(tmp_path / "x.bin")
        assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [
        Call(Name("torch._utils", "_rebuild_tensor_v2.__globals__")),
        Call(Name("collections", "OrderedDict.__init__")),
        Call(Name("builtins", "getattr"), "a", "b"),
        Call(Name("torch.nn.modules.linear", "Linear")),
        Call(Name("functools", "partial"), Name("collections", "OrderedDict")),
    ],
)
def test_other_names_are_refused(tmp_path, value):
    """Only the few names of tensors are known, not what hangs on them."""
    write_archive(tmp_path / "x.pt", {"x": value})
    with pytest.raises(ValueError, match="asks for .*, which no tensor needs"):
        read_pickle(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x02ctorch\nFloatStorage\n}X\x01\x00\x00\x00ANsb.",  # sets the state of a stand-in
        b"\x80\x02ctorch\nFloatStorage\nN}X\x05\x00\x00\x00dtypeNs\x86b.",
        b"\x80\x02}r\xff\xff\xff\xff.",  # room for 4 G entries
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x02(I1\nos\nsystem\n.",
        b"\x80\x02X\xff\xff\xff\xffab.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x02(((((.",
        b"\x80\x02]]s.",
        b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"Ns.",  # a key that takes years to hash
        b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"Q.",  # a storage that takes years to print
        b"\x80\x02ctorch\nSize\nq\x01]q\x00" + b"h\x01]h\x00ah\x00a\x85Rq\x00" * 60 + b"}h\x00Ns.",
        b"\x80\x02"
        + b"".join(b"]r" + bytes([i, 1, 0, 0]) for i in range(60))
        + b"".join(
            b"j" + bytes([i, 1, 0, 0]) + (b"j" + bytes([i + 1, 1, 0, 0]) + b"a") * 2 for i in range(59)
        )
        + b"j\x00\x01\x00\x00Q.",
        b"",
        b"}",
    ],
)
def test_damaged_pickles(tmp_path, stream):
    """Whatever the stream does, it is one error that names the file."""
    write_archive(tmp_path / "x.pt", stream)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "x.pt"))):
        read_pickle(tmp_path / "x.pt")


def test_broken_archives(tmp_path):
    """Cut anywhere, compressed, big-endian, without its object: refused by name."""
    file, array = tmp_path / "x.pt", np.arange(300, dtype=np.float32)
    state = {"x": stored_tensor("float32", "0", 300, (300,))}
    write_archive(file, state, {"0": array}, extra={"byteorder": "little"})
    np.testing.assert_array_equal(read_pickle(file)["x"], array)
    whole = file.read_bytes()
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="x.pt"):
            read_pickle(file)
    file.write_bytes(whole.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v1", 1))
    with pytest.raises(ValueError, match="check sum of data.pkl"):
        read_pickle(file)
    for options in ({"compression": zipfile.ZIP_DEFLATED}, {"extra": {"byteorder": "big"}}):
        write_archive(file, state, {"0": array}, **options)
        with pytest.raises(ValueError, match="compressed|big-endian"):
            read_pickle(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(ValueError, match="0 members named"):
        read_pickle(file)
    for content, message in (
        (b"<html>", "web page"),
        (b"version https://git-lfs", "LFS"),
        (b"\x80\x02}.", "pickle"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_pickle(file)


def test_mutated_archives_never_crash(tmp_path):
    """A changed byte gives the object, another one, or the one kind of error."""
    file, rng = tmp_path / "x.pt", np.random.default_rng(0)
    write_archive(
        file, {"x": stored_tensor("float32", "0", 6, (2, 3))}, {"0": np.arange(6, dtype=np.float32)}
    )
    whole = np.frombuffer(file.read_bytes(), np.uint8)
    for _ in range(1000):
        mutated = whole.copy()
        mutated[rng.integers(len(whole), size=rng.integers(1, 4))] = rng.integers(256)
        file.write_bytes(mutated.tobytes())
        try:
            read_pickle(file)
        except ValueError as error:
            assert "x.pt" in str(error)


def test_model_folders(tmp_path):
    """pytorch_model.bin, single and in shards, serves where there is no safetensors file."""
    tensors = tiny_opt(tmp_path / "m", dtype=np.float16)
    safe, single = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "pytorch_model.bin"
    single.write_bytes(b"never looked at")
    assert_same(by_file_name(read_checkpoint(tmp_path / "m")), tensors)
    safe.unlink()
    save_tensors(single, tensors)
    assert_same(by_file_name(read_checkpoint(tmp_path / "m")), tensors)
    single.unlink()
    weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_tensors(tmp_path / "m" / shard, {n: a for n, a in tensors.items() if weight_map[n] == shard})
    index = tmp_path / "m" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(by_file_name(read_checkpoint(tmp_path / "m")), tensors)
    (tmp_path / "m" / "pytorch_model-1.bin").unlink()
    with pytest.raises(FileNotFoundError, match="pytorch_model-1.bin is missing"):
        read_checkpoint(tmp_path / "m")
    write_archive(single, [1, 2])
    with pytest.raises(
        ValueError, match="pytorch_model.bin: expected a dict of names and tensors, found a list"
    ):
        read_checkpoint(tmp_path / "m")


def test_real_case():
    """A file that PyTorch wrote has the tensors of the safetensors file it was made from."""
    found = by_file_name(read_checkpoint(find_case("q_opt_pickle_bin")))
    assert_same(found, by_file_name(read_checkpoint(find_case("opt_base"))))


def _legacy(value: object, storages: dict[str, np.ndarray]) -> bytes:
    """The file format before PyTorch 1.6."""
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    pickles = (0x1950A86A20F9469CFC6C, 1001, machine, value, list(storages))
    data = (struct.pack("<q", array.size) + array.tobytes() for array in storages.values())
    return b"".join([*map(pickled, pickles), *data])


def test_legacy_files(tmp_path):
    """Files from before the zip archives are read too, and noticed when cut."""
    arrays = {"7": np.arange(5, dtype=np.float16), "3": np.arange(8, dtype=np.float32)}
    state = {
        "b": stored_tensor("float32", "3", 8, (2, 2), offset=4),
        "a": stored_tensor("float16", "7", 5, (5,)),
    }
    whole = _legacy(state, arrays)
    file = tmp_path / "x.bin"
    file.write_bytes(whole)
    found = read_pickle(file)
    assert_same(found, {"a": arrays["7"], "b": arrays["3"][4:].reshape(2, 2)})
    for size in range(0, len(whole), 3):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="x.bin"):
            read_pickle(file)
    file.write_bytes(_legacy({"x": Call(Name("os", "system"), "true")}, {}))
    with pytest.raises(ValueError, match="asks for os.system"):
        read_pickle(file)


@pytest.mark.parametrize("zipped", [True, False])
def test_same_as_torch(tmp_path, zipped):
    """What torch.load gives, this gives."""
    torch = pytest.importorskip("torch", reason="PyTorch writes and reads the files compared here")
    linear = torch.nn.Linear(5, 3)
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "state": linear.state_dict(),
        "parameter": linear.weight,
        "turned": base.T,
        "part": base[1:3, ::2],
        "counts": torch.arange(7),
        "half": [base.to(torch.bfloat16), (base.half(), base > 3)],
        "size": base.shape,
        "empty": torch.zeros(0, 4),
    }
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found, expected = read_pickle(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.keys() == expected.keys() and found["size"] == tuple(expected["size"])
    pairs = [(found[k], expected[k]) for k in ("parameter", "turned", "part", "counts", "empty")]
    pairs += [(found["state"][k], expected["state"][k]) for k in ("weight", "bias")]
    pairs += [
        (found["half"][0], expected["half"][0]),
        *zip(found["half"][1], expected["half"][1], strict=True),
    ]
    for array, tensor in pairs:
        assert (str(array.dtype), array.shape) == (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        np.testing.assert_array_equal(array.astype(np.float32), tensor.detach().float().numpy())
