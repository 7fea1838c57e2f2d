"""The GGUF container: what is sound is read as by the `gguf` package, all else says what is wrong."""

import struct

import gguf
import numpy as np
import pytest

from pjax.formats import read_checkpoint
from pjax.formats.gguf_file import open_gguf
from pjax.formats.gguf_model import read_floats
from tests.cases import find_case
from tests.gguf_files import write_gguf

Kind = gguf.GGMLQuantizationType
TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "MXFP4", "TQ1_0")


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_any_type(tmp_path, name):
    """Random blocks of every type are read as the gguf package reads them, whole and some rows of them."""
    kind, rng = Kind[name], np.random.default_rng(0)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = rng.integers(0, 256, (40, 2 * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(tmp_path / "m.gguf").tensors["x"]
    assert tensor.shape == (40, 2 * block)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, kind)
        np.testing.assert_array_equal(read_floats(tensor, slice(None), np.dtype(np.float32)), expected)
        np.testing.assert_array_equal(read_floats(tensor, slice(7, 9), np.dtype(np.float32)), expected[7:9])


def test_truncated_anywhere(tmp_path):
    """A file that is cut at any byte is an error that names the file."""
    path = write_gguf(tmp_path / "m.gguf", read_checkpoint(find_case("llama_gqa")))
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    last = max(
        tensor.offset + tensor.num_rows * tensor.row_bytes for tensor in open_gguf(path).tensors.values()
    )
    for size in range(0, last, 97):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut.gguf"):
            open_gguf(cut)


def raw_file(
    *, keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0, data: int = 0
):
    head = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_keys) + keys + tensors
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


U32, I32, BOOL, STRING, ARRAY = 4, 5, 7, 8, 9
NESTED = struct.pack("<IQ", ARRAY, 1) * 9


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (raw_file(num_keys=2**63), "number of keys is 9223372036854775808, more than the rest"),
        (raw_file(num_tensors=2**40), "number of tensors is 1099511627776, more than the rest"),
        (raw_file(num_keys=1, keys=struct.pack("<Q", 2**62) + b"x" * 32), "the length of a key is 46116860"),
        (raw_file(num_keys=1, keys=key("a", 13, b"\0" * 8)), "a: there is no value type 13"),
        (raw_file(num_keys=1, keys=key("a", BOOL, b"\2" * 8)), "a: a boolean is neither 0 nor 1"),
        (raw_file(num_keys=1, keys=key("a", ARRAY, struct.pack("<IQ", U32, 2**60))), "the length of a is"),
        (raw_file(num_keys=1, keys=key("a", ARRAY, struct.pack("<IQ", STRING, 2**60))), "the length of a is"),
        (raw_file(num_keys=1, keys=key("a", ARRAY, NESTED), data=64), "arrays are nested more than 4 deep"),
        (raw_file(num_keys=1, keys=key("a", STRING, text(b"\xff" * 9))), "a is not UTF-8"),
        (raw_file(num_keys=2, keys=2 * key("a", U32, b"\0" * 4)), "the key 'a' occurs twice"),
        (raw_file(num_keys=1, keys=key("general.alignment", I32, b"\x20\0\0\0")), "type UINT32, found INT32"),
        (raw_file(num_keys=1, keys=key("general.alignment", U32, b"\0" * 4)), "a power of two, found 0"),
        (
            raw_file(num_tensors=2, tensors=tensor("t", 8) + tensor("t", 8, offset=32), data=64),
            "'t' occurs twice",
        ),
        (
            raw_file(num_tensors=2, tensors=tensor("t", 16) + tensor("u", 8, offset=32), data=64),
            "u overlaps t",
        ),
        (
            raw_file(num_tensors=1, tensors=tensor("t", 8, offset=4), data=64),
            "offset 4 is no multiple of the alignment 32",
        ),
        (raw_file(num_tensors=1, tensors=tensor("t", 8, offset=2**63), data=64), "ends at byte 92233720368"),
        (raw_file(num_tensors=1, tensors=tensor("t", 2**32, 2**32), data=64), "ends at byte 7378697629"),
        (raw_file(num_tensors=1, tensors=tensor("t", *[2**63] * 4), data=64), "ends at byte"),
        (raw_file(num_tensors=1, tensors=tensor("t", 8, 0), data=64), "positive dimensions"),
        (
            raw_file(num_tensors=1, tensors=tensor("t", 8, kind=2), data=64),
            "for Q4_0 the first a multiple of 32",
        ),
        (raw_file(num_tensors=1, tensors=tensor("t", 8, kind=99), data=64), "there is no tensor type 99"),
        (raw_file(num_tensors=1, tensors=tensor("t", *[1] * 5), data=64), "1 to 4 dimensions, found 5"),
        (raw_file(num_tensors=1, tensors=tensor("t"), data=64), "1 to 4 dimensions, found 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"tjgg" + bytes(60), "a GGML file of before GGUF .'ggjt'"),
        (b"", "it is empty"),
        (b"{}", "begins b'{}'"),
    ],
)
def test_malformed(tmp_path, raw, message):
    """No count, length or offset is believed; the error names the file and what is wrong."""
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ValueError, match=f"m.gguf: .*{message}"):
        open_gguf(tmp_path / "m.gguf")


def test_sound_raw_file(tmp_path):
    """What the malformed files vary is itself sound."""
    keys = key("a", U32, b"\7\0\0\0") + key("b", ARRAY, struct.pack("<IQ", ARRAY, 0)) + key("c", BOOL, b"\1")
    raw = raw_file(
        num_keys=3, keys=keys, num_tensors=2, tensors=tensor("t", 8) + tensor("u", 4, 2, offset=32), data=64
    )
    (tmp_path / "m.gguf").write_bytes(raw)
    file = open_gguf(tmp_path / "m.gguf")
    assert file.metadata == {"a": 7, "b": (), "c": True}
    assert [t.shape for t in file.tensors.values()] == [(8,), (2, 4)]
    with pytest.raises(ValueError, match="found a folder"):
        open_gguf(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_gguf(tmp_path / "nope.gguf")
