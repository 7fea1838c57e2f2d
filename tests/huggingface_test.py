"""Checkpoints: every weight arrives under its name, and every fault is named before anything is read."""

import json
import logging
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pjax.formats import read_checkpoint, write_checkpoint
from pjax.model_config import Rope
from tests.cases import find_case
from tests.tiny import (
    CONTEXT,
    MODEL,
    VOCAB,
    assert_same,
    by_file_name,
    edit_config,
    read_all,
    tiny_llama,
    tiny_opt,
)

LINEAR = {"rope_type": "linear", "factor": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"bias": True}, {"kv_heads": 4}, {"kv_heads": 1}])
def test_llama_weights(tmp_path, options, dtype):
    """Every tensor of the file is found once, in its stored type."""
    tensors = tiny_llama(tmp_path / "m", dtype=dtype, **options)
    checkpoint = read_checkpoint(tmp_path / "m")
    assert_same(by_file_name(checkpoint), tensors)
    names = checkpoint.tensors
    assert names["layers.1.ffn.down"].name == "model.layers.1.mlp.down_proj.weight"
    assert names["layers.1.ffn.down"].shape == (40, MODEL)
    assert names["layers.0.attention_norm.scale"].name == "model.layers.0.input_layernorm.weight"
    assert names["layers.0.ffn_norm.scale"].name == "model.layers.0.post_attention_layernorm.weight"
    assert ("head.weight" in names) == (not options.get("tied"))
    assert ("layers.0.ffn.gate_bias" in names) == bool(options.get("bias"))


@pytest.mark.parametrize("bias", [True, False])
def test_opt_weights(tmp_path, bias):
    """OPT has a position table with two extra rows, no gate, a tied head, and norm biases always."""
    tensors = tiny_opt(tmp_path / "m", bias=bias)
    checkpoint = read_checkpoint(tmp_path / "m")
    assert_same(by_file_name(checkpoint), tensors)
    names = checkpoint.tensors
    assert names["positions"].shape == (CONTEXT + 2, MODEL)
    assert names["layers.0.attention_norm.scale"].name.endswith("layers.0.self_attn_layer_norm.weight")
    assert names["layers.0.ffn_norm.bias"].name.endswith("layers.0.final_layer_norm.bias")
    assert names["layers.0.ffn.up"].name.endswith("layers.0.fc1.weight")
    assert "head.weight" not in names and "layers.0.ffn.gate" not in names
    assert ("layers.1.ffn.down_bias" in names) == bias
    config = checkpoint.config
    assert (config.family, config.position_offset, config.norm_eps, config.tied) == ("opt", 2, 1e-5, True)


def test_names_without_the_outer_module(tmp_path):
    """A checkpoint saved from the bare model has `decoder.` in place of `model.decoder.`."""
    tensors = tiny_opt(tmp_path / "m")
    bare = {name.removeprefix("model."): array for name, array in tensors.items()}
    save_file(bare, tmp_path / "m" / "model.safetensors")
    assert_same(by_file_name(read_checkpoint(tmp_path / "m")), bare)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, 10000.0),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_parameters": ..., "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_parameters": None, "rope_scaling": {"type": "default"}}, 10000.0),
        ({"rope_scaling": {"rope_type": None, "type": "default"}}, 10000.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 20000}, 20000.0),
    ],
)
def test_rope_theta_old_and_new(tmp_path, changes, expected):
    """The base of the rotary frequencies is found wherever a version of the format puts it."""
    tiny_llama(tmp_path / "m")
    edit_config(tmp_path / "m", **changes)
    assert read_checkpoint(tmp_path / "m").config.rope == Rope(expected, 4)


def test_absent_keys_mean_their_defaults(tmp_path):
    """Old configs leave out what later became an option."""
    tiny_llama(tmp_path / "m", kv_heads=4)
    absent = ("num_key_value_heads", "tie_word_embeddings", "attention_bias", "bos_token_id", "architectures")
    edit_config(tmp_path / "m", head_dim=None, **dict.fromkeys(absent, ...))
    config = read_checkpoint(tmp_path / "m").config
    assert (config.kv_heads, config.head_dim, config.tied, config.attention_bias) == (4, 4, False, False)
    assert (config.bos_id, config.eos_ids, config.layers, config.vocab) == (1, (2,), 2, VOCAB)


@pytest.mark.parametrize(
    "eos, generation, expected",
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [2, 7]}, (2, 7)),
        ([3, 4], {"eos_token_id": 5}, (3, 4, 5)),
        (None, {"eos_token_id": None}, ()),
        (..., {"eos_token_id": 9}, (9,)),
        (..., {}, (2,)),
    ],
)
def test_eos_ids_are_united(tmp_path, eos, generation, expected):
    """A text ends at an id that either file names."""
    tiny_llama(tmp_path / "m")
    edit_config(tmp_path / "m", eos_token_id=eos)
    if generation is not None:
        (tmp_path / "m" / "generation_config.json").write_text(json.dumps(generation))
    assert read_checkpoint(tmp_path / "m").config.eos_ids == expected


@pytest.mark.parametrize("name", ["<|end|>", {"content": "<|end|>"}])
def test_the_tokenizers_end_counts_too(tmp_path, name):
    tiny_llama(tmp_path / "m")
    added = {"9": {"content": "<|end|>", "special": True}, "10": {"content": "<|other|>"}}
    settings = {"eos_token": name, "added_tokens_decoder": added}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_checkpoint(tmp_path / "m").config.eos_ids == (2, 9)


def test_activation_names(tmp_path):
    """The file's name is normalised; the caller may replace it; an unknown one is refused."""
    tiny_llama(tmp_path / "m", hidden_act="swish")
    assert read_checkpoint(tmp_path / "m").config.activation == "silu"
    assert read_checkpoint(tmp_path / "m", activation="relu").config.activation == "relu"
    with pytest.raises(ValueError, match="activation: 'swoosh'.*expected one of relu"):
        read_checkpoint(tmp_path / "m", activation="swoosh")


def test_code_of_the_models_own_is_not_trusted_silently(tmp_path, caplog):
    """Such code may compute another FFN than the config names, as Bamboo's does."""
    tiny_llama(tmp_path / "m", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with caplog.at_level(logging.WARNING):
        read_checkpoint(tmp_path / "m", activation="drelu")
        assert not caplog.records
        assert read_checkpoint(tmp_path / "m").config.activation == "relu"
    assert "auto_map names code of the model's own" in caplog.text and 'activation="drelu"' in caplog.text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": ...}, "hidden_size: expected a positive integer, found no such key"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer, found 0"),
        ({"vocab_size": "64"}, "vocab_size: expected a positive integer, found '64'"),
        ({"intermediate_size": True}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads = 4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size: expected a multiple"),
        ({"head_dim": 3}, "head_dim: expected an even number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a positive number"),
        ({"rope_parameters": [1]}, "rope_parameters: expected an object or null"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "su"}}, 'rope_scaling.rope_type: "su" is not'),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "factor: expected a positive number",
        ),
        (
            {"partial_rotary_factor": 0.25},
            "partial_rotary_factor: expected an even number",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4}}}, "rope_parameters: "),
        ({"rope_parameters": ..., "rope_scaling": {"factor": 4}}, "rope_scaling: expected a rope_type"),
        (
            {"rope_parameters": LINEAR, "rope_scaling": LINEAR | {"factor": 9.0}},
            "factor: expected 4 in rope_scaling, as in rope_parameters, found 9.0",
        ),
        (
            {"rope_scaling": LINEAR},
            "rope_type, type: expected one kind of positions, found 'default' in rope_p",
        ),
        ({"rope_parameters": LINEAR | {"type": "default"}}, "rope_type, type: expected one kind"),
        (
            {"rope_parameters": LINEAR | {"rope_type": "yarn", "rope_theta": 1}},
            "rope_theta: expected more th",
        ),
        (
            {"activation_function": "silu"},
            "activation_function: expected 'relu', which hidden_act means here",
        ),
        ({"hidden_act": ..., "activation": "relu"}, "activation: expected 'silu', which hidden_act means"),
        ({"hidden_act": "fatrelu"}, "hidden_act_param: expected fatrelu's threshold"),
        ({"hidden_act": "fatrelu", "hidden_act_param": -1}, "hidden_act_param: expected fatrelu's threshold"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4}}, "high_freq_factor: expected more than"),
        ({"rope_parameters": LLAMA3 | {"factor": 0}}, "factor: expected a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ({"eos_token_id": "2"}, "eos_token_id: expected a token id"),
        ({"bos_token_id": 64}, "bos_token_id: expected one id of the vocabulary"),
        ({"architectures": ["GPTForAll"]}, 'architectures: "GPTForAll" is not supported yet'),
        ({"architectures": ..., "model_type": ...}, "model_type: null is not supported yet"),
        ({"model_type": "mistral"}, 'model_type: "mistral" is not supported yet'),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_wrong_config_names_file_and_key(tmp_path, changes, message):
    """A value that is missing, wrong or beyond us is an error that a person can act on."""
    tiny_llama(tmp_path / "m")
    edit_config(tmp_path / "m", **changes)
    with pytest.raises(ValueError, match=re.escape("config.json: " + message.split(":")[0])) as caught:
        read_checkpoint(tmp_path / "m")
    assert message in str(caught.value)


def test_wrong_tensors(tmp_path, caplog):
    """A tensor that is missing, of another shape or no float is named; an unknown one is reported once."""
    folder = tmp_path / "m"
    good = tiny_llama(folder)
    name = "model.layers.1.mlp.down_proj.weight"

    def write(**changes):
        tensors = {n: a for n, a in (good | changes).items() if a is not ...}
        save_file(tensors, folder / "model.safetensors")

    write(**{name: ...})
    with pytest.raises(ValueError, match=re.escape(name)):
        read_checkpoint(folder)
    write(**{name: good[name].T.copy()})
    with pytest.raises(
        ValueError, match=re.escape(f"{name}: config.json calls for shape [16, 40], found [40")
    ):
        read_checkpoint(folder)
    write(**{name: good[name].astype(np.int8)})
    with pytest.raises(ValueError, match=re.escape(name) + ".*expected one of the types F32"):
        read_checkpoint(folder)
    write(**{"lm_head.weight": ...})
    with pytest.raises(ValueError, match=r"lm_head.weight \(tie_word_embeddings is false\)"):
        read_checkpoint(folder)
    with caplog.at_level(logging.WARNING):
        write(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)})
        assert_same(by_file_name(read_checkpoint(folder)), good)
        assert not caplog.records
        write(extra=np.ones(2, np.float32))
        read_checkpoint(folder)
    assert len(caplog.records) == 1 and "ignored 1 tensors: extra" in caplog.text


def test_tied_head_in_the_file_is_ignored(tmp_path, caplog):
    """Some exports repeat the embedding as lm_head."""
    tensors = tiny_llama(tmp_path / "m")
    edit_config(tmp_path / "m", tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    del tensors["lm_head.weight"]
    with caplog.at_level(logging.WARNING):
        assert_same(by_file_name(read_checkpoint(tmp_path / "m")), tensors)
    assert not caplog.records


@pytest.mark.parametrize("make", [tiny_llama, tiny_opt])
def test_a_head_of_its_own_is_believed(tmp_path, make, caplog):
    """Weights that were trained untied, beside a config that says tied, or as OPT's says nothing."""
    tensors = make(tmp_path / "m")
    edit_config(tmp_path / "m", tie_word_embeddings=None if make is tiny_opt else True)
    head = np.random.default_rng(9).normal(size=(VOCAB, MODEL)).astype(np.float32)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "m" / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        checkpoint = read_checkpoint(tmp_path / "m")
    assert "lm_head.weight is not the embedding, so it is used" in caplog.text
    assert not checkpoint.config.tied
    np.testing.assert_array_equal(checkpoint.tensors["head.weight"].read(), head)


def test_wrong_paths(tmp_path, monkeypatch):
    """A path that is no model folder says what it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_llama(tmp_path / "m")
    assert read_checkpoint("~/m").config == read_checkpoint(tmp_path / "m").config
    with pytest.raises(FileNotFoundError, match="nope does not exist"):
        read_checkpoint(tmp_path / "nope")
    with pytest.raises(ValueError, match="config.json: a part of a Hugging Face model; give the folder"):
        read_checkpoint(tmp_path / "m" / "config.json")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        FileNotFoundError, match="has no config.json.*it holds: m, x.gguf; give a GGUF file itself"
    ):
        read_checkpoint(tmp_path)
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        read_checkpoint(tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match="pytorch_model.bin is not a file saved by PyTorch: it begins"):
        read_checkpoint(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"a": 1,\n "b": }')
    with pytest.raises(ValueError, match=r"config.json:2:7: not JSON"):
        read_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"bias": True, "dtype": ml_dtypes.bfloat16}])
def test_write_then_read(tmp_path, options):
    """What is written reads back bit for bit, by us and by the file format's own names."""
    tensors = tiny_llama(tmp_path / "m", **options)
    checkpoint = read_checkpoint(tmp_path / "m")
    write_checkpoint(tmp_path / "made" / "m", checkpoint.config, read_all(checkpoint))
    again = read_checkpoint(tmp_path / "made" / "m")
    assert again.config == checkpoint.config
    assert_same(read_all(again), read_all(checkpoint))
    assert_same(load_file(tmp_path / "made" / "m" / "model.safetensors"), tensors)
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["m"]


def test_write_refuses(tmp_path, monkeypatch):
    """Nothing is overwritten, nothing half-written is left, and only what reads back the same is written."""
    tiny_llama(tmp_path / "m")
    checkpoint = read_checkpoint(tmp_path / "m")
    arrays = read_all(checkpoint)
    with pytest.raises(FileExistsError, match="already exists"):
        write_checkpoint(tmp_path / "m", checkpoint.config, arrays)
    with pytest.raises(
        ValueError, match=r"2 do not fit .* embed.weight: .*found None; head.weight: .*\(2,\)"
    ):
        wrong = {n: a for n, a in arrays.items() if n != "embed.weight"} | {"head.weight": np.ones(2)}
        write_checkpoint(tmp_path / "new", checkpoint.config, wrong)
    with pytest.raises(ValueError, match="Hugging Face llama cannot express gated=False, alibi=True"):
        write_checkpoint(tmp_path / "new", checkpoint.config.replace(gated=False, alibi=True), arrays)
    with pytest.raises(ValueError, match="family: expected one of .*got 'gpt'"):
        write_checkpoint(tmp_path / "new", checkpoint.config.replace(family="gpt"), arrays)
    monkeypatch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "new", checkpoint.config, arrays)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_hub_cache_links(tmp_path):
    """The files of a download cache are links into a folder of blobs."""
    cache = shutil.copytree(find_case("q_llama_hub_cache"), tmp_path / "cache")
    tmp_path.joinpath("cache", "snapshots", "0123abcd").chmod(0o755)
    for file in (cache / "snapshots" / "0123abcd").iterdir():
        if not file.is_symlink():  # A copy of the cases may have turned links into small files.
            target = file.read_text()
            file.unlink()
            file.symlink_to(target)
    parent = read_checkpoint(find_case("llama_gqa"))
    assert_same(by_file_name(read_checkpoint(cache / "snapshots" / "0123abcd")), by_file_name(parent))
    with pytest.raises(FileNotFoundError, match="give .*0123abcd instead"):
        read_checkpoint(cache)
