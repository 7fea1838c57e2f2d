"""A saved model is the model: bit for bit, for every family and type; and nothing is half-written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import pjax
from pjax.model_config import Rope
from pjax.storage import weight_name
from tests.cases import checkpoint_names, find_case
from tests.tiny import tiny_llama
from tests.tiny_model import tiny_decoder

CASES = [name for name in checkpoint_names() if not (find_case(name) / "expect.json").exists()]
LLAMA = dict(family="llama", neurons=(40, 40))
YARN = Rope(1e4, 4, "yarn", factor=4.0, original_context=8, beta_fast=20.0, attention_factor=1.25)
LLAMA3 = Rope(5e5, 4, "llama3", factor=8.0, original_context=8)
UNGATED = LLAMA | dict(gated=False, activation="relu2")
LAYER_NORM = dict(norm="layer", norm_bias=True)
SCALES = dict(residual_scale=0.7, logit_scale=0.3)
RANDOM = {
    "linear rope": LLAMA | dict(rope=Rope(1e4, 4, "linear", factor=3.0)),
    "dynamic rope": LLAMA | dict(rope=Rope(1e4, 4, "dynamic", factor=2.0, original_context=32)),
    "llama3 rope": LLAMA | dict(rope=LLAMA3),
    "yarn": LLAMA | dict(rope=YARN, attention_bias=True, mlp_bias=True, eos_ids=(2, 7), bos_id=None),
    "arcee": UNGATED | dict(family="arcee", rope=YARN),
    "nemotron": UNGATED | dict(family="nemotron", rope=Rope(1e4, 2), **LAYER_NORM),
    "minicpm": LLAMA | dict(family="minicpm", activation="fatrelu:0.01", tied=True, **SCALES),
}


def arrays(model):
    state = nnx.to_flat_state(nnx.state(model))
    return {weight_name(path): np.asarray(variable[...]) for path, variable in state}


def assert_same(found, expected):
    assert found.config == expected.config
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_a_saved_case_reads_back(name, dtype, tmp_path):
    model = pjax.load_model(find_case(name), dtype=dtype)
    pjax.save_model(model, tmp_path / "saved" / name)
    assert_same(pjax.load_model(tmp_path / "saved" / name), model)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [name]


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_model_reads_back(name, tmp_path):
    model = tiny_decoder(**RANDOM[name])
    pjax.save_model(model, tmp_path / "tiny")
    assert_same(pjax.load_model(tmp_path / "tiny"), model)


def test_nothing_is_overwritten_or_half_written(tmp_path, monkeypatch):
    model = tiny_decoder(**LLAMA)
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there already exists"):
        pjax.save_model(model, tmp_path / "there")
    with pytest.raises(ValueError, match="a Hugging Face llama cannot express neurons="):
        pjax.save_model(tiny_decoder(neurons=(24, 40)), tmp_path / "new")

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("pjax.formats.huggingface.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        pjax.save_model(model, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_quantised_weights_are_refused(tmp_path):
    model = tiny_decoder(**LLAMA, model=32, head_dim=8, rope=Rope(1e4, 8))
    model.layers[1].ffn.set_weights(pjax.ops.pack_ffn(model.layers[1].ffn.weights, "q8_0"))
    with pytest.raises(ValueError, match="layers.1.ffn.packed is quantised.*load the model with dtype"):
        pjax.save_model(model, tmp_path / "new")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orbax_restores_the_state(dtype, tmp_path):
    """A decoder is a Flax module like any other."""
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint saves Flax states")
    model = pjax.load_model(find_case("opt_350m"), dtype=dtype)
    graphdef, state = nnx.split(model)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        # The shapes say where each weight belongs, and none is made to learn them.
        like = nnx.state(nnx.eval_shape(lambda: pjax.Decoder(model.config, rngs=nnx.Rngs(0))))
        like = jax.tree.map(lambda found, kept: jax.ShapeDtypeStruct(found.shape, kept.dtype), like, state)
        restored = checkpointer.restore(tmp_path / "state", like)
    assert_same(nnx.merge(graphdef, restored), model)
    ids = jnp.arange(6)[None]
    np.testing.assert_array_equal(nnx.merge(graphdef, restored)(ids), model(ids))


def test_mixed_types_of_one_ffn_become_float32(tmp_path):
    tensors = tiny_llama(tmp_path / "m", dtype=np.float16)
    name = "model.layers.0.mlp.gate_proj.weight"
    mixed = tensors | {name: tensors[name].astype(np.float32)}
    save_file(mixed, tmp_path / "m" / "model.safetensors")
    model = pjax.load_model(tmp_path / "m")
    assert (model.layers[0].ffn.weights.format, model.layers[1].ffn.weights.format) == ("float32", "float16")
    assert np.isfinite(model(np.zeros((1, 3), np.int32))).all()


@pytest.mark.parametrize("call", [lambda m: pjax.quantize(m, "q8_0"), lambda m: pjax.save_model(m, "never")])
@pytest.mark.parametrize("wrong", ["a-path", None, 3])
def test_what_is_no_decoder_is_refused(call, wrong):
    with pytest.raises(ValueError, match="model: expected a Decoder, as load_model gives, got "):
        call(wrong)
