"""Weight files: shards come together, and a file that is broken or of another kind is named."""

import json
import re

import pytest
from safetensors.numpy import save_file

from pjax.formats import read_checkpoint
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
