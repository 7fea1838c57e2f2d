"""GGUF files as models, against Hugging Face folders of the same weights and the `gguf` package."""

import dataclasses
import json
import struct

import gguf
import numpy as np
import pytest

import pjax
from pjax.attention import rotary_frequencies
from pjax.formats import read_checkpoint
from pjax.formats.gguf_config import read_gguf_config
from pjax.formats.gguf_file import open_gguf
from pjax.ops import unpack_matrix
from tests.cases import PLACES, find_case
from tests.gguf_files import tensors as gguf_tensors
from tests.gguf_files import write_gguf
from tests.tiny import read_all

Kind = gguf.GGMLQuantizationType
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")

EXPECTED = {
    name: expected
    for place in reversed(PLACES)
    if (place / "gguf" / "expect.json").exists()
    for name, expected in json.loads((place / "gguf" / "expect.json").read_text()).items()
}
"""What each file of the collection must do."""


def error_of_logits(model, case: str) -> float:
    golden = np.load(find_case(case) / "golden.npz")
    return float(np.abs(np.asarray(model(golden["ids"])) - golden["logits"]).max())


@pytest.mark.parametrize("name", sorted(EXPECTED) or [pytest.param("", marks=pytest.mark.skip("no cases"))])
def test_collected_files(name):
    """Every file of the collection does what its expect.json says."""
    path, expected = find_case("gguf") / name, EXPECTED[name]
    if expected.startswith("error") or name == "v1.gguf":
        with pytest.raises(ValueError, match=name) as caught:
            pjax.load_model(path, activation="relu")
        for part in ("ggml",) if name == "magic_ggml.gguf" else ():
            assert part in str(caught.value)
        if name.startswith("no_"):
            assert f"llama.{name[3:-5]}".replace("llama.head", "llama.attention.head") in str(caught.value)
        return
    model = pjax.load_model(path, activation="relu")
    error = error_of_logits(model, "llama_gqa")
    if expected.startswith("same"):
        assert error < 2e-5
    else:  # tied.gguf has another head; unpermuted.gguf is there to show that the order matters
        assert error > 0.1
        assert model.config.tied == (name == "tied.gguf")


@pytest.mark.parametrize(
    ("case", "powerinfer", "activation"),
    [
        ("llama_mha", False, "relu"),
        ("llama_gqa", True, None),
        ("llama_mqa", False, "relu"),
        ("llama_head_dim16", True, None),
        ("llama_tied", False, "relu"),
        ("llama_attn_mlp_bias", False, "relu"),
        ("llama_rope_theta5e5", False, "relu"),
        ("q_llama_legacy_linear", False, "relu"),
        ("llama_relu2_gated", False, "relu2"),
        ("prosparse_fatrelu", False, "fatrelu:0.2"),
        ("mistral_window6", False, "relu"),
        ("bamboo_drelu", False, None),
        ("bamboo_drelu", True, None),
        ("minicpm_s", False, "fatrelu:0.2"),
        ("nemotron", False, None),
        ("falcon_40b_groups", False, "relu"),
        ("falcon_40b_groups", True, None),
        ("opt_base", True, None),
        ("opt_ffn_odd", True, None),
    ],
)
def test_same_logits_as_the_folder(tmp_path, case, powerinfer, activation):
    """A GGUF file of a folder's weights is the same model."""
    folder = read_checkpoint(find_case(case))
    path = write_gguf(tmp_path / "m.gguf", folder, powerinfer=powerinfer)
    found = read_checkpoint(path, activation=activation)
    expected = read_all(folder)
    for name, array in read_all(found).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert found.tensors.keys() == folder.tensors.keys()
    for field in dataclasses.fields(folder.config):
        if field.name not in ("name", "norm_eps", "rope", "embed_scale", "residual_scale", "logit_scale"):
            assert getattr(found.config, field.name) == getattr(folder.config, field.name), field.name
    assert error_of_logits(pjax.load_model(path, activation=activation), case) < 2e-5


def with_neurons(checkpoint, neurons: int):
    """The first of a model's neurons only."""
    config = checkpoint.config.replace(neurons=(neurons,) * checkpoint.config.layers)
    tensors = {
        name: tensor._replace(
            read=lambda tensor=tensor: tensor.read()[:neurons], shape=(neurons, *tensor.shape[1:])
        )
        if ".ffn." in name
        else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return dataclasses.replace(checkpoint, config=config, tensors=tensors)


@pytest.mark.parametrize("kind", [Kind[name] for name in TYPES])
@pytest.mark.parametrize("powerinfer", [False, True])
def test_types(tmp_path, kind, powerinfer):
    """Matrices are what the gguf package reads from the file; floats keep their type, others are float32."""
    folder = with_neurons(read_checkpoint(find_case("llama_gqa")), 64)  # a whole number of blocks
    path = write_gguf(tmp_path / "m.gguf", folder, kind=kind, powerinfer=powerinfer)
    arrays = read_all(read_checkpoint(path, activation="relu"))
    expected = {
        name: gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(a), kind), kind)
        for name, a in gguf_tensors(read_all(folder), folder.config, powerinfer).items()
        if a.ndim == 2
    }
    kept = {"F16": "float16", "BF16": "bfloat16"}
    assert arrays["embed.weight"].dtype.name == kept.get(kind.name, "float32")
    np.testing.assert_array_equal(arrays["embed.weight"].astype(np.float32), expected["token_embd.weight"])
    down = expected["blk.1.ffn_down_t.weight"] if powerinfer else expected["blk.1.ffn_down.weight"].T
    np.testing.assert_array_equal(arrays["layers.1.ffn.down"].astype(np.float32), down)
    assert arrays["layers.1.ffn_norm.scale"].dtype == np.float32


@pytest.mark.parametrize(("kind", "format"), [(Kind.Q8_0, "q8_0"), (Kind.Q4_0, "q4_0"), (Kind.Q5_1, "q8_0")])
def test_quantised_files_stay_quantised(tmp_path, kind, format):
    """Without loss where pjax has the type and the rows are ours: all of PowerInfer's, its down too."""
    folder = with_neurons(read_checkpoint(find_case("llama_gqa")), 64)
    path = write_gguf(tmp_path / "m.gguf", folder, kind=kind, powerinfer=True)
    arrays = read_all(read_checkpoint(path))
    model = pjax.load_model(path)
    layer = model.layers[1]
    assert {model.embed.format, layer.attention.q.format, layer.ffn.format} == {format}
    ffn = pjax.unpack_ffn(layer.ffn.weights)
    for found, name in (
        (unpack_matrix(model.embed.matrix), "embed.weight"),
        (unpack_matrix(layer.attention.q.matrix), "layers.1.attention.q.weight"),
        (ffn.gate, "layers.1.ffn.gate"),
        (ffn.down, "layers.1.ffn.down"),
    ):
        step = np.abs(arrays[name]).max() / 127 if kind == Kind.Q5_1 else 0
        np.testing.assert_allclose(found, arrays[name], rtol=0, atol=0.6 * step, err_msg=name)
    assert pjax.load_model(path, dtype="float32").embed.format is None


def test_mixed_types_become_float32(tmp_path):
    """An Ffn's matrices have one type, whatever the file mixes."""
    folder = read_checkpoint(find_case("llama_gqa"))
    path = write_gguf(tmp_path / "m.gguf", folder, kind=Kind.F16)
    whole = pjax.load_model(path, activation="relu")
    raw = bytearray(path.read_bytes())
    info = open_gguf(path).tensors["blk.0.ffn_up.weight"]
    place = raw.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    raw[place : place + 4] = struct.pack("<I", Kind.BF16)  # as wide: only the meaning of the bits changes
    path.write_bytes(raw)
    tensors = read_checkpoint(path, activation="relu").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    bits = np.frombuffer(raw, "<u2", 88 * 32, info.offset).astype(np.uint32) << 16
    np.testing.assert_array_equal(tensors["layers.0.ffn.up"].read().ravel(), bits.view(np.float32))
    assert whole.embed.weight[...].dtype == np.float16
    assert pjax.load_model(path, activation="relu", dtype="bfloat16").embed.weight[...].dtype == "bfloat16"


def test_activation_is_asked_for(tmp_path):
    """Only what is certain is taken: an architecture's own, PowerInfer's, a model known by name."""
    folder = read_checkpoint(find_case("llama_gqa"))

    def activation_of(**keys):
        return read_checkpoint(write_gguf(tmp_path / "m.gguf", folder, keys=keys)).config.activation

    for name, expected in {
        "Smollm2 135M 8k Lc100K Mix1 Ep2": "silu",
        "tinyllama_tinyllama-1.1b-chat-v1.0": "silu",
        "Meta Llama 3 8B Instruct": "silu",
        "ReluLLaMA 7B": "relu",
        "prosparse-llama-2-7b": "fatrelu:0.01",
        "TurboSparse-Mistral-Instruct": "drelu",
    }.items():
        assert activation_of(**{"general.name": name}) == expected
    for name in ("LLaMA v2", "my model", "Llama 2 7B ReGLU", "llama-2-7b-relu", "SparseLlama-3-8B"):
        with pytest.raises(ValueError, match=r'm.gguf: .*does not say.*Give activation="silu"'):
            activation_of(**{"general.name": name})
    with pytest.raises(ValueError, match="does not say"):
        activation_of()
    with pytest.raises(ValueError, match="'swoosh' is not supported"):
        read_checkpoint(tmp_path / "m.gguf", activation="swoosh")


def test_powerinfer_predictors(tmp_path):
    """They come along, each of its own rank; one that is missing or of a wrong shape is an error."""
    folder, rng = read_checkpoint(find_case("llama_gqa")), np.random.default_rng(0)
    extra = {}
    for n in range(3):
        extra[f"blk.{n}.fc1.weight"] = rng.standard_normal((4 + n, 32), np.float32)
        extra[f"blk.{n}.fc2.weight"] = rng.standard_normal((88, 4 + n), np.float32)
    keys = {"powerinfer.sparse_threshold": 0.25}
    path = write_gguf(tmp_path / "m.gguf", folder, powerinfer=True, extra=extra, keys=keys)
    predictors = read_checkpoint(path).predictors
    assert predictors is not None and predictors.threshold == 0.25
    for n, (fc1, fc2) in enumerate(predictors.layers):
        np.testing.assert_array_equal(fc1.read(), extra[f"blk.{n}.fc1.weight"])
        np.testing.assert_array_equal(fc2.read(), extra[f"blk.{n}.fc2.weight"])
    path = write_gguf(tmp_path / "a.gguf", folder, powerinfer=True, extra=dict(list(extra.items())[:-1]))
    with pytest.raises(ValueError, match="lacks the tensor blk.2.fc2.weight"):
        read_checkpoint(path)
    extra["blk.1.fc2.weight"] = extra["blk.1.fc2.weight"][:, 1:]
    path = write_gguf(tmp_path / "b.gguf", folder, powerinfer=True, extra=extra)
    with pytest.raises(ValueError, match=r"blk.1.fc2.weight: .*\[88, 5\], found \[88, 4\]"):
        read_checkpoint(path)


def test_rope_keys(tmp_path):
    """Scaling by keys, and the divisors that Llama 3 files carry."""
    folder = read_checkpoint(find_case("llama_gqa"))

    def rope_of(extra=None, **keys):
        keys = {f"llama.rope.{key}": value for key, value in keys.items()}
        path = write_gguf(tmp_path / "m.gguf", folder, keys=keys, extra=extra)
        return read_checkpoint(path, activation="relu").config.rope

    divisors = np.array([1, 1.5, 4, 8], np.float32)
    assert rope_of({"rope_freqs.weight": divisors}).divisors == (1, 1.5, 4, 8)
    assert rope_of(scale_linear=4.0).factor == 4.0
    yarn = rope_of(**{"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 16})
    assert (yarn.kind, yarn.factor, yarn.original_context) == ("yarn", 4.0, 16)
    assert abs(yarn.attention_factor - (0.1 * np.log(4) + 1)) < 1e-6
    assert rope_of(**{"scaling.type": "none", "scaling.factor": 4.0}).kind == "default"
    for extra, kind in ((None, "none"), (None, "linear"), ({"rope_freqs.weight": divisors}, "none")):
        keys = {"scaling.type": kind, "scaling.factor": 4.0, "scaling.attn_factor": 0.5}
        assert rope_of(extra, **keys).attention_factor == 0.5
    with pytest.raises(ValueError, match="longrope.*not supported yet; supported: none, linear, yarn"):
        rope_of(**{"scaling.type": "longrope"})
    with pytest.raises(ValueError, match=r"rope_freqs.weight: expected F32 \[4\], found F32 \[3\]"):
        rope_of({"rope_freqs.weight": divisors[1:]})


def test_unsupported_files_say_why(tmp_path):
    """Other architectures, experts, adapters, and keys of a wrong type."""
    folder = read_checkpoint(find_case("llama_gqa"))
    for keys, message in (
        ({"llama.expert_count": 8}, "llama.expert_count: 8 is not supported"),
        ({"llama.logit_scale": 8.0}, "llama.logit_scale: 8.0 is not supported"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping: 30.0 is not supported"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.freq_base": 1.0}, "freq_base: expected more than 1"),
        ({"general.architecture": "qwen2"}, 'general.architecture: "qwen2" is not supported'),
        ({"general.architecture": "generic.gpu_index"}, "a PowerInfer split"),
        ({"general.type": "adapter"}, 'general.type: "adapter" is not supported'),
        ({"llama.block_count": 2**32 - 1}, "no more than the file has tensors"),
        ({"llama.block_count": "3"}, "llama.block_count: expected a positive integer, found '3'"),
        ({"llama.embedding_length": 3.5}, "llama.embedding_length: expected a positive integer"),
        ({"llama.embedding_length": 64}, r"token_embd.weight: .*shape \[128, 64\], found \[128, 32\]"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: .*no such key"),
        ({"llama.context_length": None}, "llama.context_length: .*no such key"),
        ({"tokenizer.ggml.eos_token_id": 128}, "eos_token_id: expected an id of the vocabulary, below 128"),
    ):
        path = tmp_path / "m.gguf"
        write_gguf(path, folder, keys={k: v for k, v in keys.items() if k != "general.architecture"})
        if "general.architecture" in keys:
            path = write_architecture(path, keys["general.architecture"])
        with pytest.raises(ValueError, match=message):
            read_checkpoint(path, activation="relu")
    read_checkpoint(write_gguf(path, folder, keys={"llama.logit_scale": 1.0}), activation="relu")


def write_architecture(path, name: str):
    """Replaces the architecture's name by another, of any length; a shorter file is then cut short."""
    writer = gguf.GGUFWriter(path, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_parts(tmp_path):
    """A model that was split is read from any of its parts, and not without one of them."""
    folder = read_checkpoint(find_case("llama_gqa"))
    write_parts(tmp_path, folder)
    parts, whole = sorted(tmp_path.glob("m-*.gguf")), read_all(folder)
    for part in parts:
        found = read_all(read_checkpoint(part, activation="relu"))
        assert all(np.array_equal(found[name], whole[name]) for name in whole)
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match="the parts m-00002-of-00002.gguf are missing"):
        read_checkpoint(parts[0], activation="relu")


def write_parts(folder, checkpoint):
    one = write_gguf(folder / "one.gguf", checkpoint)
    file = open_gguf(one)
    for number in (0, 1):
        writer = gguf.GGUFWriter(folder / f"m-{number + 1:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for key, value in file.metadata.items() if number == 0 else ():
            if isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
        for name, tensor in list(file.tensors.items())[number::2]:
            writer.add_tensor(name, tensor.read_rows(0, tensor.num_rows).view("<f4").reshape(tensor.shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_arcee(tmp_path):
    """No gate, relu2, and rows of q and k in llama.cpp's order."""
    folder = read_checkpoint(find_case("llama_gqa"))
    config = folder.config.replace(family="arcee", gated=False, activation="relu2")
    tensors = {name: tensor for name, tensor in folder.tensors.items() if not name.endswith(".gate")}
    path = write_gguf(tmp_path / "m.gguf", dataclasses.replace(folder, config=config, tensors=tensors))
    found = read_checkpoint(path)
    assert (found.config.family, found.config.gated, found.config.activation) == ("arcee", False, "relu2")
    for name, array in read_all(found).items():
        np.testing.assert_array_equal(array, tensors[name].read(), err_msg=name)


def test_llama3_frequencies(tmp_path):
    """Llama 3's scaling is in the file as divisors of the frequencies; the logits are transformers' own."""
    folder = read_checkpoint(find_case("q_llama_legacy_llama3"))
    rope = folder.config.rope
    unscaled = rope.theta ** (-np.arange(rope.width // 2) / (rope.width // 2))
    divisors = (unscaled / rotary_frequencies(rope)).astype(np.float32)
    assert (divisors > 1).any()
    path = write_gguf(tmp_path / "m.gguf", folder, extra={"rope_freqs.weight": divisors})
    assert error_of_logits(pjax.load_model(path, activation="relu"), "q_llama_legacy_llama3") < 2e-5


def test_end_of_turn(tmp_path):
    """A chat model stops at its end-of-turn token, whatever the file gives as its end of text."""
    folder = read_checkpoint(find_case("llama_gqa"))
    path = write_gguf(tmp_path / "m.gguf", folder, keys={"tokenizer.ggml.eot_token_id": 7})
    assert read_checkpoint(path, activation="relu").config.eos_ids == (2, 7)
    tokens = ("a", "<|eot_id|>", "<|im_end|>")
    types = np.array([3, 3, 1], np.int32)  # the last is ordinary text
    file = open_gguf(path)
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    config = read_gguf_config(dataclasses.replace(file, metadata=file.metadata | keys), "relu")
    assert config.eos_ids == (2, 7, 1)
