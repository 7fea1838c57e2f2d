"""Weight files: shards come together, and a file that is broken or of another kind is named."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pjax.formats import read_checkpoint
from pjax.formats.stored import open_safetensors
from tests.tiny import assert_same, by_file_name, tiny_llama


def test_shards(tmp_path):
    """An index spreads the same tensors over files; each is read from the file it names."""
    folder = tmp_path / "m"
    tensors = tiny_llama(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = read_checkpoint(folder)
    assert_same(by_file_name(checkpoint), tensors)
    assert all(t.file.endswith(weight_map[t.name]) for t in checkpoint.tensors.values())
    weight_map["lm_head.weight"] = "model-9.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileNotFoundError, match="model-9.safetensors is missing"):
        read_checkpoint(folder)
    weight_map["lm_head.weight"] = "../m/model-0.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="files beside it"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (b"abc", "begins b'abc'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"GGUF\x03\x00\x00\x00\x00\x00\x00\x00", "GGUF"),
        (b"PK\x03\x04" + bytes(60), "PyTorch archive"),
        (b"../../blobs/0123", "link that was copied as text"),
        (b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": [[[[[[[[[[', "header is damaged"),
        (b'\x40\x00\x00\x00\x00\x00\x00\x00{"a"', "12 bytes, its header promises 72: an incomplete download"),
        (b"\x40\x00\x00\x00\x00\x00\x00\x00", "8 bytes, its header promises 72: an incomplete download"),
    ],
)
def test_not_safetensors_says_what_it_is(tmp_path, content, message):
    """Whatever lies under the name model.safetensors, the message says what to do."""
    tiny_llama(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(file))) as caught:
        read_checkpoint(tmp_path / "m")
    assert message in str(caught.value)


def test_every_cut_is_noticed(tmp_path):
    """A download that stopped anywhere is an error with both sizes, or says it is not the file."""
    folder = tmp_path / "m"
    tiny_llama(folder)
    whole = (folder / "model.safetensors").read_bytes()
    for size in range(0, len(whole), 97):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="incomplete download|is empty|is not a safetensors"):
            read_checkpoint(folder)


DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.uint8, np.int64, np.bool_)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=5), st.integers(0, 2**32 - 1)
)
def test_same_as_the_library(tmp_path_factory, specs, seed):
    """Any shapes and types, empty ones among them, read as the safetensors library reads them."""
    rng = np.random.default_rng(seed)
    tensors = {f"t{i}": rng.integers(0, 2, shape).astype(dtype) for i, (shape, dtype) in enumerate(specs)}
    file = tmp_path_factory.mktemp("same") / "x.safetensors"
    save_file(tensors, file, metadata={"a": "b"})
    found = open_safetensors(file)
    arrays = {name: tensor.read() for name, tensor in found.items()}
    assert_same(arrays, load_file(file))
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype, tensor.file) == (
            arrays[name].shape,
            arrays[name].dtype,
            str(file),
        )
        assert not arrays[name].flags.writeable


def _file(header, num_bytes: int) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(num_bytes)


def _tensor(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header, num_bytes, message",
    [
        ({"a": _tensor(0, 8), "b": _tensor(4, 12)}, 12, "b begins at byte 4 of the data, expected 8"),
        ({"a": _tensor(0, 8), "b": _tensor(12, 20)}, 20, "b begins at byte 12 of the data, expected 8"),
        ({"a": _tensor(4, 12)}, 12, "a begins at byte 4"),
        ({"a": _tensor(8, 0)}, 8, "a: F32 of shape [2] takes 8 bytes"),
        ({"a": _tensor(0, 8, (3,))}, 8, "takes 12 bytes"),
        ({"a": _tensor(0, 8, (2**62, 2**62, 4))}, 8, "takes"),
        ({"a": _tensor(0, 8, (2**64, 0))}, 8, "a: shape: expected a list of counts"),
        ({"a": _tensor(0, 8, (-2,))}, 8, "a: shape: expected a list of counts"),
        ({"a": _tensor(0, 8, (2.0,))}, 8, "a: shape: expected a list of counts"),
        ({"a": _tensor(0, 4, (True,))}, 4, "a: shape: expected a list of counts"),
        ({"a": _tensor(0, "8")}, 8, "a: data_offsets: expected a list of counts"),
        ({"a": _tensor(0, 8) | {"data_offsets": [0, 4, 8]}}, 8, "expected begin and end"),
        ({"a": _tensor(0, 8) | {"shape": 2}}, 8, "a: shape: expected a list of counts"),
        ({"a": _tensor(0, 8, dtype="F33")}, 8, "a: dtype: expected one of F32, F16, BF16"),
        ({"a": _tensor(0, 8, dtype=["F32"])}, 8, "a: dtype: expected one of F32"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "a: expected dtype, shape, data_offsets"),
        ({"a": [1]}, 8, "a: expected dtype, shape, data_offsets"),
        ({"a": _tensor(0, 8)}, 9, "its header promises"),
        ({}, 4, "its header promises"),
        (b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": {}}', 4, "a name twice"),
        (b"{" + b'"a":{' * 100_000, 4, "header is damaged"),
        (b'{"\xff": 1}', 4, "header is damaged"),
        (b'{"a": ' + b"9" * 5000 + b"}", 4, "header is damaged"),
    ],
)
def test_headers_that_do_not_describe_their_file(tmp_path, header, num_bytes, message):
    """Each byte of the data belongs to one tensor, and each tensor has the bytes that its shape takes."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(_file(header, num_bytes))
    with pytest.raises(ValueError, match=re.escape(str(file))) as caught:
        open_safetensors(file)
    assert message in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_headers(tmp_path_factory, data):
    """A header with changed bytes is refused, or gives tensors that lie in the file."""
    file = tmp_path_factory.mktemp("mutated") / "x.safetensors"
    whole = bytearray(_file({"a": _tensor(0, 24, (2, 3)), "b": _tensor(24, 28, (2, 1), "BF16")}, 28))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 29), min_size=1, max_size=4)):
        whole[place] = data.draw(st.sampled_from(b'0123456789{}[]":,-. \x00\xff'))
    file.write_bytes(whole)
    try:
        found = open_safetensors(file)
    except ValueError as error:
        assert str(file) in str(error)
    else:
        assert sum(tensor.read().nbytes for tensor in found.values()) == 28


def test_types_that_are_no_weights(tmp_path):
    """A stored type that pjax does not compute with is named with its tensor."""
    tensors = tiny_llama(tmp_path / "m")
    for dtype in (np.float64, np.int8, ml_dtypes.float8_e4m3fn):
        name = "model.layers.0.mlp.up_proj.weight"
        save_file(tensors | {name: tensors[name].astype(dtype)}, tmp_path / "m" / "model.safetensors")
        message = f"{name}: expected one of the types F32, F16, BF16, found {np.dtype(dtype)}"
        with pytest.raises(ValueError, match=re.escape(message)):
            read_checkpoint(tmp_path / "m")
