"""`weights.pack` gives the model that was saved, bit for bit, or nothing: never another one."""

import json
import logging
import multiprocessing
import random
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file, safe_open

import pjax
from pjax import ops
from pjax.formats import read_checkpoint
from pjax.model_config import Rope
from pjax.storage import load_checkpoint, weight_name
from pjax.weights_file import load_weights, save_weights, weights_origin
from tests.gguf_files import write_gguf
from tests.tiny import tiny_llama
from tests.tiny_model import tiny_decoder
from tests.tiny_pickle import save_tensors

WIDE = dict(model=32, head_dim=8, rope=Rope(1e4, 8))
KINDS = {
    "llama": WIDE,
    "opt": WIDE
    | dict(
        rope=None, learned_positions=True, position_offset=2, tied=True, gated=False, norm="layer",
        norm_bias=True, attention_bias=True, mlp_bias=True, embed_width=64, family="opt",
    ),
}  # fmt: skip


def arrays(model):
    state = nnx.to_flat_state(nnx.state(model))
    return {weight_name(path): np.asarray(variable[...]) for path, variable in state}


def assert_same(found, expected):
    """The same structure, types and bits, which is all that a program is made of."""
    assert found is not None and nnx.graphdef(found) == nnx.graphdef(expected)
    found, expected = arrays(found), arrays(expected)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].tobytes()) == (array.dtype, array.tobytes()), name


def through_file(tmp_path, model):
    save_weights(tmp_path / "weights.pack", model, "x")
    return load_weights(tmp_path / "weights.pack", model.config, "x")


def as_type(model, dtype):
    if dtype in ("q8_0", "q4_0"):
        return pjax.quantize(model, dtype)
    floats = jax.tree.map(lambda a: a.astype(dtype) if a.ndim == 2 else a, nnx.state(model))
    return nnx.merge(nnx.graphdef(model), floats)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_type_comes_back(kind, dtype, tmp_path):
    model = as_type(tiny_decoder(**KINDS[kind]), dtype)
    found = through_file(tmp_path, model)
    assert_same(found, model)
    ids = np.arange(6)[None]
    np.testing.assert_array_equal(found(ids), model(ids))


def test_mixed_types_come_back(tmp_path):
    model = tiny_decoder(**WIDE)
    model.layers[0].ffn.set_weights(ops.pack_ffn(model.layers[0].ffn.weights, "q4_0"))
    model.layers[1].attention.q.set_weight(ops.pack_matrix(model.layers[1].attention.q.matrix, "q8_0"))
    model.embed.set_weight(model.embed.matrix.astype("bfloat16"))
    found = through_file(tmp_path, model)
    assert_same(found, model)
    kinds = found.embed.matrix.dtype, found.layers[0].ffn.format, found.layers[1].attention.q.format
    assert (kinds, found.layers[1].ffn.format) == (("bfloat16", "q4_0", "q8_0"), None)


def test_arrays_begin_at_lines_of_the_cache_and_other_tools_read_them(tmp_path):
    model = pjax.quantize(tiny_decoder(**WIDE, neurons=(24, 41)), "q4_0")
    save_weights(tmp_path / "w", model, "x")
    content = (tmp_path / "w").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    begins = [start + e["data_offsets"][0] for n, e in header.items() if n != "__metadata__"]
    even = [array.nbytes % 64 == 0 for array in arrays(model).values()]
    assert sum(begin % 64 == 0 for begin in begins) >= sum(even) > 0
    found = load_file(tmp_path / "w")
    assert all((found[name] == array).all() for name, array in arrays(model).items())
    with safe_open(tmp_path / "w", "np") as file:
        assert json.loads(file.metadata()["formats"])["layers.0.ffn"] == "q4_0"


def test_it_is_used_for_the_weights_it_was_made_from_only(tmp_path):
    """A changed number, a changed type; but not the activation, nor when files were written."""
    folder = tmp_path / "folder"
    tiny_llama(folder, dtype=np.float16)
    checkpoint = read_checkpoint(folder)
    origin = weights_origin(checkpoint, None)
    save_weights(tmp_path / "w", load_checkpoint(checkpoint), origin)
    shutil.copytree(folder, tmp_path / "copy")
    assert weights_origin(read_checkpoint(tmp_path / "copy"), None) == origin
    assert weights_origin(read_checkpoint(folder, activation="silu"), None) == origin
    assert weights_origin(checkpoint, "float32") != origin
    shutil.rmtree(folder)
    tiny_llama(folder, seed=1, dtype=np.float16)
    changed = weights_origin(read_checkpoint(folder), None)
    assert changed != origin and load_weights(tmp_path / "w", checkpoint.config, changed) is None
    assert load_weights(tmp_path / "w", checkpoint.config, origin) is not None


@pytest.mark.parametrize("kind", ["gguf", "pickle"])
def test_origins_in_other_files(kind, tmp_path):
    """A changed last byte, that of a tensor, is another origin; reading twice is not."""
    tensors = tiny_llama(tmp_path / "m")
    if kind == "gguf":
        file = path = write_gguf(
            tmp_path / "m.gguf", read_checkpoint(tmp_path / "m"), kind=GGMLQuantizationType.F16
        )
        place = len(path.read_bytes()) - 1
    else:
        path, file = tmp_path / "m", tmp_path / "m" / "pytorch_model.bin"
        (path / "model.safetensors").unlink()
        save_tensors(file, tensors)
        place = file.read_bytes().index(tensors["model.norm.weight"].tobytes())
    origin = weights_origin(read_checkpoint(path, activation="relu"), None)
    assert weights_origin(read_checkpoint(path, activation="relu"), None) == origin
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert weights_origin(read_checkpoint(path, activation="relu"), None) != origin


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_change_in_one_tensor_is_another_origin(name, tmp_path):
    """As a tool leaves it that tunes a part of a model: names, sizes and perhaps the date stay."""
    tiny_llama(tmp_path / "m")
    origin = weights_origin(read_checkpoint(tmp_path / "m"), None)
    file = tmp_path / "m" / "model.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])[name]["data_offsets"]
    content[start + begin : start + end] = (
        np.frombuffer(content[start + begin : start + end], "<f4") * 2
    ).tobytes()
    file.write_bytes(content)
    assert weights_origin(read_checkpoint(tmp_path / "m"), None) != origin


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """(model, bytes of its file)."""
    file = tmp_path_factory.mktemp("sound") / "weights.pack"
    model = pjax.quantize(tiny_decoder(**WIDE), "q4_0")
    save_weights(file, model, "x")
    return model, file.read_bytes()


def test_any_damage_is_seen(sound, tmp_path, caplog):
    """Cut, one bit turned, pages of zeros, header and all: refused by name, or the same model."""
    model, content = sound
    rng = random.Random(0)
    file = tmp_path / "weights.pack"
    damaged = [content[:cut] for cut in (0, 7, 8, 100, len(content) - 1)] + [content + b"\0"]
    for place in [*rng.sample(range(len(content)), 150), *range(0, 8)]:
        damaged.append(
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        )
    damaged.append(content[:-4096] + bytes(4096))
    for case in damaged:
        file.write_bytes(case)
        caplog.clear()
        found = load_weights(file, model.config, "x")
        assert found is None, "damage is not seen"
        assert not caplog.records or str(file) in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"formats": "{}"},
        {"formats": '{"embed": "q8_0"}'},
        {"formats": '{"embed": 3}'},
        {"formats": "[]"},
        {"formats": "[" * 100_000},
        {"checksum": "0"},
        {"formats": None},
        {"checksum": None},
    ],
)
def test_a_header_that_lies_is_refused(changes, sound, tmp_path, caplog):
    model, content = sound
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = {k: v for k, v in (header["__metadata__"] | changes).items() if v is not None}
    text = json.dumps(header | {"__metadata__": metadata}).encode()
    (tmp_path / "w").write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    assert load_weights(tmp_path / "w", model.config, "x") is None
    assert f"{tmp_path / 'w'} is damaged" in caplog.text


def test_the_weights_of_another_shape_are_refused(sound, tmp_path, caplog):
    (tmp_path / "w").write_bytes(sound[1])
    assert load_weights(tmp_path / "w", sound[0].config.replace(vocab=51), "x") is None
    assert "embed.weight: expected uint8 [51, 18], found uint8 [50, 18]" in caplog.text


def test_a_full_disk_is_a_warning(tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pjax.workdir.os.fsync", full)
    save_weights(tmp_path / "w", tiny_decoder(), "x")
    assert not list(tmp_path.iterdir()) and "No space left" in caplog.text


def _save(file, seed):
    logging.disable()
    save_weights(file, tiny_decoder(seed), "x")


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    file = tmp_path / "w"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_save, args=(file, seed)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = load_weights(file, tiny_decoder().config, "x")
    assert any(
        arrays(found)["embed.weight"].tobytes() == arrays(tiny_decoder(s))["embed.weight"].tobytes()
        for s in (1, 2)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
