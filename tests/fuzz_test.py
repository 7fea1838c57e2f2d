"""Damaged files of every kind, a few hundred of them; `experiments.fuzz_formats` opens as many as wanted."""

import json
import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from experiments.fuzz_formats import fuzz
from experiments.fuzz_inputs import GgufPieces
from experiments.fuzz_readers import READERS, Reader
from pjax.formats import load_tokenizer, read_checkpoint
from pjax.formats.gguf_config import find_architecture
from pjax.formats.gguf_file import GgufFile
from tests.gguf_files import write_gguf
from tests.tiny import edit_config, tiny_llama


def run(readers, num_inputs: int, keep: Path):
    return list(fuzz(readers, num_inputs, 0, time.monotonic() + 60, keep))


def test_all_readers(tmp_path):
    """Each damaged file is loaded as what it says, or refused by name; the same seed gives the same."""
    outcomes = run(READERS, 420, tmp_path / "kept")
    assert [outcome.number for outcome in outcomes] == list(range(420))
    assert not [outcome for outcome in outcomes if outcome.kind == "FAULT"]
    for which, reader in enumerate(READERS):
        kinds = {outcome.kind for outcome in outcomes[which :: len(READERS)]}
        assert kinds == {"loaded", "refused"}, reader.name


def _prepare(folder):
    return [b"sound"]


def _damage(rng, seeds):
    return {"file": seeds[0] + rng.randbytes(1)}, "file"


def _refuse(path):
    raise ValueError(f"{path} is wrong")


def _name_no_file(path):
    raise ValueError("some file is wrong")


def _raise(path):
    raise KeyError("some key")


def _die(path):
    os.abort()


def _allocate(path):
    np.empty(1 << 40, np.uint8)


def _hide_allocation(path):
    try:
        _allocate(path)
    except MemoryError as error:
        raise ValueError(f"{path} is wrong") from error


def _contradict(path):
    raise AssertionError("not consistent")


def test_faults_are_seen_and_kept(tmp_path):
    """Every way to fail is told from the others, and the input is kept, a dead process's too."""
    expected = {
        _refuse: "is wrong",
        _name_no_file: "names no file",
        _raise: "KeyError at fuzz_test.py",
        _die: "killed by SIGABRT",
        _allocate: "MemoryError",
        _hide_allocation: "memory: ",
        _contradict: "not consistent",
    }
    readers = [Reader(open_fn.__name__, _prepare, _damage, open_fn) for open_fn in expected]
    outcomes = run(readers, len(readers), tmp_path)
    assert [outcome.number for outcome in outcomes] == list(range(len(readers)))
    for outcome, (open_fn, detail) in zip(outcomes, expected.items(), strict=True):
        assert detail in outcome.detail
        assert outcome.kind == ("refused" if open_fn is _refuse else "FAULT")
        kept = tmp_path / f"{open_fn.__name__}-0-{outcome.number}" / "file"
        assert kept.exists() == (outcome.kind == "FAULT")


def test_pieces_make_the_file_again(tmp_path):
    """Cutting a GGUF file and joining it changes nothing, so that what damage does is only what it says."""
    tiny_llama(tmp_path / "m")
    file = write_gguf(tmp_path / "m.gguf", read_checkpoint(tmp_path / "m"))
    whole = file.read_bytes()
    assert GgufPieces.of(file).joined() == whole


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_beyond_python(tmp_path, name, value):
    """JSON that is right by its grammar, and more than Python takes."""
    tiny_llama(tmp_path / "m")
    if "index" in name:
        (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "m" / name).write_text(f'{{"x": {value}}}')
    with pytest.raises(ValueError, match=f"{name}: cannot be read as JSON"):
        read_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected at most 10000"),
        ({"hidden_size": 10**400}, "hidden_size: expected at most"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected a positive number"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor: expected a share of at most 1"),
        ({"hidden_act": "fatrelu", "hidden_act_param": 10**400}, "hidden_act_param: expected"),
    ],
)
def test_numbers_beyond_reason(tmp_path, changes, message):
    """Numbers that take all memory, or that no float can be."""
    tiny_llama(tmp_path / "m")
    edit_config(tmp_path / "m", **changes)
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("count", ["two", -1, 2.5])
def test_number_of_parts(tmp_path, count):
    """Whatever type a GGUF file gives it."""
    tiny_llama(tmp_path / "m")
    keys = {"split.count": count} if count != -1 else {"split.count": -1.0}
    file = write_gguf(tmp_path / "m.gguf", read_checkpoint(tmp_path / "m"), keys=keys)
    with pytest.raises(ValueError, match="m.gguf: split.count: expected a number of parts"):
        read_checkpoint(file)


def test_template_names(tmp_path):
    """A list of chat templates whose names are no texts."""
    write = READERS[-1].prepare_fn(tmp_path)[0] | {
        "tokenizer_config.json": b'{"chat_template": [{"name": 1, "template": "x"}]}'
    }
    for name, content in write.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template: expected"):
        load_tokenizer(tmp_path)


def test_panics_are_errors(tmp_path):
    """The library ends with a panic on merges whose first part is shorter than the prefix it is to have."""
    files = READERS[-1].prepare_fn(tmp_path)[0]
    values = json.loads(files["tokenizer.json"])
    values["model"]["continuing_subword_prefix"] = "x" * 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_half_a_surrogate_pair(tmp_path):
    """JSON can write what no text has, even as a key; a whole pair is a character."""
    tiny_llama(tmp_path / "m")
    edit_config(tmp_path / "m", whole="\U0001f600")
    read_checkpoint(tmp_path / "m")
    edit_config(tmp_path / "m", inner=[{"\ud83d": 1}])
    with pytest.raises(ValueError, match="config.json: .* is half of a surrogate pair"):
        read_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("architecture", [np.arange(3), np.arange(0), ("llama",), 1.0])
def test_architecture_of_any_type(architecture):
    file = GgufFile(Path("m.gguf"), 3, b"GGUF", {"general.architecture": architecture}, {})
    with pytest.raises(ValueError, match="m.gguf: general.architecture: expected the name"):
        find_architecture(file)


def test_endless_tokens(tmp_path):
    """A token as long as a book, whose merges would take hours to find."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "aa" * 1_000_000])
    writer.add_token_scores([0.0, 0.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="m.gguf: tokenizer.ggml.tokens: expected tokens of at most 4096"):
        load_tokenizer(tmp_path / "m.gguf")


def test_shard_names_beyond_the_system(tmp_path):
    """A name that is longer than any file's."""
    tiny_llama(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "model.safetensors.index.json")
    (tmp_path / "m" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "' + "x" * 300 + '"}}')
    with pytest.raises(FileNotFoundError, match="is missing, and model.safetensors.index.json needs it"):
        read_checkpoint(tmp_path / "m")
