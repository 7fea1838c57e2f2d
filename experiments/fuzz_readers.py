"""For `experiments.fuzz_formats`: each reader of foreign files, sound files to damage, and what must hold."""

import functools
import json
import math
import pickle
import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import numpy as np

from experiments.fuzz_inputs import (
    GgufPieces,
    damage_archive,
    damage_bytes,
    damage_gguf,
    damage_json,
    damage_pickle,
)
from pjax.formats import load_tokenizer, read_checkpoint
from pjax.formats.canonical import weight_shapes
from pjax.model import Decoder
from pjax.model_config import ModelConfig, Rope
from pjax.storage import quantize
from pjax.weights_file import load_weights, save_weights
from tests.gguf_files import write_gguf
from tests.tiny import tiny_llama, tiny_opt
from tests.tiny_model import tiny_decoder
from tests.tiny_pickle import save_tensors
from tests.tiny_tokenizer import LIBRARIES

_COLLECTED = Path(__file__).parents[1] / "tests" / "data"
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


class Reader(NamedTuple):
    """One reader of foreign files.

    Attributes:
        name: for people.
        prepare_fn: (empty folder) -> sound inputs, of any kind; all that is not damaged lies in the folder.
        damage_fn: (random, inputs) -> file, relative to that folder, to its damaged content; and the path to
            open.
        open_fn: opens that path, and raises AssertionError if what it then has is not consistent.
    """

    name: str
    prepare_fn: Callable[[Path], Sequence[Any]]
    damage_fn: Callable[[random.Random, Sequence[Any]], tuple[dict[str, bytes], str]]
    open_fn: Callable[[Path], None]


def open_model(path: Path) -> None:
    """Opens a model; its weights must be those that its config calls for, and its config make sense."""
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    assert {name: t.shape for name, t in checkpoint.tensors.items()} == weight_shapes(config), "shapes"
    assert all(math.isfinite(number) for number in _numbers(config)), f"not finite: {config}"
    counts = (config.vocab, config.model, config.heads, config.kv_heads, config.head_dim, config.context)
    assert all(count > 0 for count in (*counts, *config.neurons)), f"not positive: {config}"
    assert config.bos_id is None or config.bos_id < config.vocab, f"bos_id: {config}"
    for tensor in checkpoint.tensors.values():
        array = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), tensor.name
    for neurons, (first, second) in zip(
        config.neurons, checkpoint.predictors.layers if checkpoint.predictors else (), strict=False
    ):
        found = first.read().shape, second.read().shape
        assert found == ((found[0][0], config.model), (neurons, found[0][0])), "predictors"


def open_tokenizer(path: Path) -> None:
    """Loads a tokenizer; it must write what it has read, in ids that exist."""
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("a quick fox, naïve 日本")
    assert all(tokenizer.codec.has(i) for i in ids), ids
    assert isinstance(tokenizer.decode(ids), str)
    assert tokenizer.bos_id is None or tokenizer.codec.has(tokenizer.bos_id), tokenizer.bos_id


def _numbers(config: ModelConfig) -> list[float]:
    values = [*vars(config).values(), *(vars(config.rope).values() if config.rope else ())]
    return [value for value in values if isinstance(value, float)]


def _prepare_gguf(folder: Path) -> list[GgufPieces]:
    found = []
    rope = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    for number, (write_fn, more) in enumerate(
        ((tiny_llama, {}), (tiny_llama, {"powerinfer": True}), (tiny_llama, {"keys": rope}), (tiny_opt, {}))
    ):
        write_fn(folder / "seed", neurons=8)
        checkpoint = read_checkpoint(folder / "seed")
        keys = {"general.name": "prosparse", "split.count": 1} | more.pop("keys", {})
        predictors = {
            f"blk.{n}.{part}.weight": np.ones(shape, np.float32)
            for n in range(2)
            for part, shape in (("fc1", (3, 16)), ("fc2", (8, 3)))
        }
        file = folder / f"{number}.gguf"
        write_gguf(file, checkpoint, keys=keys, extra=predictors if "powerinfer" in more else None, **more)
        found.append(GgufPieces.of(file))
        shutil.rmtree(folder / "seed")
    return found


def _prepare_gguf_tokenizers(folder: Path) -> list[GgufPieces]:
    found = []
    for kind, library in LIBRARIES.items():
        state = json.loads(library.to_str())
        vocabulary = state["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        special = {token["content"] for token in state["added_tokens"]}
        writer = gguf.GGUFWriter(folder / f"{kind}.gguf", "llama")
        writer.add_tokenizer_model("gpt2" if kind == "byte_level" else "llama")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [3 if token in special else 6 if token[:3] == "<0x" else 1 for token in tokens]
        )
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        if kind == "byte_level":
            writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
        writer.add_bos_token_id(vocabulary["<s>"])
        writer.add_eos_token_id(vocabulary["</s>"])
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ bos_token }}")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(GgufPieces.of(folder / f"{kind}.gguf"))
    return found


def _damage_gguf(rng: random.Random, seeds: Sequence[GgufPieces]) -> tuple[dict[str, bytes], str]:
    return {"m.gguf": damage_gguf(rng, rng.choice(seeds), rng.choice(seeds))}, "m.gguf"


def _prepare_configs(folder: Path) -> list[Path]:
    found = []
    for source in sorted(_COLLECTED.iterdir()):
        if (source / "model.safetensors").is_file():
            shutil.copytree(source, folder / source.name)
            found.append(folder / source.name)
    for name, rope in (("yarn", _YARN), ("dynamic", _DYNAMIC)):
        tiny_llama(folder / name, rope_parameters=rope)
        found.append(folder / name)
    return [path for path in found if _is_sound(path)]


def _is_sound(path: Path) -> bool:
    """Some of the collected configs are there because they must be refused."""
    try:
        read_checkpoint(path)
    except ValueError:
        return False
    return True


def _load_configs(folder: Path) -> list[Any]:
    """(folder's name, config.json, generation_config.json, keys of all configs)."""
    texts = {path.name: (path / "config.json").read_bytes() for path in _prepare_configs(folder)}
    keys = sorted({key for text in texts.values() for key in json.loads(text)})
    return [
        (name, text, b'{"bos_token_id": 1, "eos_token_id": [2, 3]}', keys) for name, text in texts.items()
    ]


def _damage_config(rng: random.Random, seeds: Sequence[Any]) -> tuple[dict[str, bytes], str]:
    name, config, generation, keys = rng.choice(seeds)
    if rng.random() < 0.85:
        config = damage_json(rng, config, keys)
    else:
        generation = damage_json(rng, generation)
    return {f"{name}/config.json": config, f"{name}/generation_config.json": generation}, name


def _prepare_safetensors(folder: Path) -> list[tuple[str, bytes]]:
    for name, write_fn in (("llama", tiny_llama), ("opt", tiny_opt)):
        write_fn(folder / name, neurons=8)
    return [(name, (folder / name / "model.safetensors").read_bytes()) for name in ("llama", "opt")]


def _damage_safetensors(
    rng: random.Random, seeds: Sequence[tuple[str, bytes]]
) -> tuple[dict[str, bytes], str]:
    name, raw = rng.choice(seeds)
    return {f"{name}/model.safetensors": _with_damage(rng, raw)}, name


def _with_damage(rng: random.Random, raw: bytes) -> bytes:
    """A safetensors file with another header, or other bytes."""
    end = 8 + struct.unpack_from("<Q", raw)[0]
    if rng.random() < 0.8:
        header = damage_json(rng, raw[8:end])
        return struct.pack("<Q", len(header)) + header + raw[end:]
    return damage_bytes(rng, raw, end)


@functools.cache
def _packed_model() -> Decoder:
    return quantize(tiny_decoder(model=32, head_dim=8, rope=Rope(1e4, 8)), "q4_0")


def _prepare_weights(folder: Path) -> list[bytes]:
    save_weights(folder / "weights.pack", _packed_model(), "origin")
    return [(folder / "weights.pack").read_bytes()]


def _damage_weights(rng: random.Random, seeds: Sequence[bytes]) -> tuple[dict[str, bytes], str]:
    return {"weights.pack": _with_damage(rng, seeds[0])}, "weights.pack"


def open_weights_file(path: Path) -> None:
    """Reads a workdir's weights: those that were written, or none."""
    expected = _packed_model()
    found = load_weights(path, expected.config, "origin")
    if found is None:
        raise ValueError(f"{path} is not used")
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def _prepare_index(folder: Path) -> list[bytes]:
    tensors = tiny_llama(folder / "m", neurons=8)
    (folder / "m" / "model.safetensors").rename(folder / "m" / "a.safetensors")
    shutil.copy(folder / "m" / "a.safetensors", folder / "m" / "b.safetensors")
    shards = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(tensors)}
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}).encode()]


def _damage_index(rng: random.Random, seeds: Sequence[bytes]) -> tuple[dict[str, bytes], str]:
    return {"m/model.safetensors.index.json": damage_json(rng, seeds[0])}, "m"


def _prepare_pickles(folder: Path) -> list[tuple[bytes, ...]]:
    """An archive, and what a file of before the archives is made of: pickles, and the storages."""
    tensors = tiny_opt(folder / "m", neurons=8)
    (folder / "m" / "model.safetensors").unlink()
    save_tensors(folder / "seed.bin", tensors)
    archive = (folder / "seed.bin").read_bytes()
    with zipfile.ZipFile(folder / "seed.bin") as opened:
        pickled = next(opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))
    machine = {"protocol_version": 1001, "little_endian": True}
    keys = [str(i) for i in range(len(tensors))]
    before = (pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, machine))
    storages = b"".join(struct.pack("<q", a.size) + a.tobytes() for a in tensors.values())
    return [(archive,), (*before, pickled, pickle.dumps(keys, 2), storages)]


def _damage_pickles(rng: random.Random, seeds: Sequence[tuple[bytes, ...]]) -> tuple[dict[str, bytes], str]:
    parts = list(rng.choice(seeds))
    if len(parts) == 1:
        raw = damage_archive(rng, parts[0])
    elif rng.random() < 0.8:
        at = rng.choice((2, 3, 3, 3, 4))
        parts[at] = damage_pickle(rng, parts[at])
        raw = b"".join(parts)
    else:
        raw = damage_bytes(rng, b"".join(parts), len(b"".join(parts)))
    return {"m/pytorch_model.bin": raw}, "m"


def _prepare_tokenizers(folder: Path) -> list[dict[str, bytes]]:
    del folder
    found = []
    settings = {
        "add_bos_token": True, "bos_token": "<s>", "eos_token": {"content": "</s>"}, "legacy": False,
        "chat_template": [{"name": "default", "template": "{{ bos_token }}"}, {"name": "a", "template": "x"}],
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
    }  # fmt: skip
    config = {"tokenizer_config.json": settings, "config.json": {"bos_token_id": 0}}
    for library in LIBRARIES.values():
        found.append(config | {"tokenizer.json": json.loads(library.to_str())})
    model = json.loads(LIBRARIES["byte_level"].to_str())["model"]
    old = {"vocab.json": model["vocab"], "added_tokens.json": {"<extra>": len(model["vocab"])}}
    found.append(config | old | {"special_tokens_map.json": {"bos_token": "<s>"}})
    merges = "\n".join(" ".join(merge) for merge in model["merges"]).encode()
    return [
        {name: json.dumps(value).encode() for name, value in files.items()} | {"merges.txt": merges}
        for files in found
    ]


def _damage_tokenizer(rng: random.Random, seeds: Sequence[dict[str, bytes]]) -> tuple[dict[str, bytes], str]:
    number = rng.randrange(len(seeds))
    files = dict(seeds[number])
    name = rng.choice([*files, *(name for name in files if re.search("tokenizer", name))])
    is_json = name.endswith(".json")
    files[name] = (
        damage_json(rng, files[name]) if is_json else damage_bytes(rng, files[name], len(files[name]))
    )
    return {f"{number}/{name}": raw for name, raw in files.items()}, str(number)


READERS = (
    Reader("GGUF model", _prepare_gguf, _damage_gguf, open_model),
    Reader("GGUF tokenizer", _prepare_gguf_tokenizers, _damage_gguf, open_tokenizer),
    Reader("config.json", _load_configs, _damage_config, open_model),
    Reader("safetensors", _prepare_safetensors, _damage_safetensors, open_model),
    Reader("weights.pack", _prepare_weights, _damage_weights, open_weights_file),
    Reader("index of shards", _prepare_index, _damage_index, open_model),
    Reader("pickle", _prepare_pickles, _damage_pickles, open_model),
    Reader("tokenizer folder", _prepare_tokenizers, _damage_tokenizer, open_tokenizer),
)
