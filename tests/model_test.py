"""The decoder against formulas in NumPy, and against itself run in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax.attention import attend, attend_prompt
from pjax.executor.common import empty_cache
from pjax.model import prompt_positions
from pjax.storage import load_model, model_fingerprint
from tests.tiny import edit_config, tiny_llama, tiny_opt


def numpy_llama_layer(tensors, x):
    """One LLaMA layer (2 heads of keys, 4 of queries) in float64, written from the paper's formulas."""

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * tensors[name]

    seq, width = x.shape
    prefix = "model.layers.0."
    normed = norm(x, prefix + "input_layernorm.weight")
    q, k, v = (
        (normed @ tensors[f"{prefix}self_attn.{part}_proj.weight"].T).reshape(seq, -1, width // 4)
        for part in "qkv"
    )
    half = width // 8
    angles = np.arange(seq)[:, None] * 10000.0 ** (-np.arange(half) / half)
    turn = np.cos(angles)[:, None] + 1j * np.sin(angles)[:, None]

    def rotate(part):
        turned = (part[..., :half] + 1j * part[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    q, k = rotate(q), rotate(k)
    out = np.zeros_like(q)
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].T / np.sqrt(width // 4)
        scores = np.where(np.tril(np.ones((seq, seq))) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // 2]
    x = x + out.reshape(seq, width) @ tensors[prefix + "self_attn.o_proj.weight"].T
    normed = norm(x, prefix + "post_attention_layernorm.weight")
    gate, up, down = (tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return x + (np.maximum(normed @ gate.T, 0) * (normed @ up.T)) @ down.T


def test_a_llama_layer_equals_numpy(tmp_path):
    tensors = tiny_llama(tmp_path / "model", seed=3)
    tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    model = load_model(tmp_path / "model")
    ids = np.random.default_rng(0).integers(0, model.config.vocab, 11)
    expected = numpy_llama_layer(tensors, tensors["model.embed_tokens.weight"][ids])
    model.layers = nnx.List([model.layers[0]])
    ids = jnp.asarray(ids, jnp.int32)[None]
    residual, _, _ = model.run(ids, prompt_positions(ids))
    np.testing.assert_allclose(residual[0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("write", [tiny_llama, tiny_opt])
def test_token_by_token_equals_the_whole_text(tmp_path, write):
    write(tmp_path / "model")
    model = load_model(tmp_path / "model")
    ids = np.random.default_rng(0).integers(0, model.config.vocab, (2, 9)).astype(np.int32)
    whole = model(ids)
    cache = empty_cache(model.config, jnp.float32, 2 * model.config.layers, 16)
    run = nnx.jit(lambda model, ids, positions, cache: model.run(ids, positions, cache)[:2])
    residual, cache = run(model, ids[:, :4], prompt_positions(ids[:, :4]), cache)
    np.testing.assert_allclose(model.logits(residual), whole[:, :4], rtol=1e-4, atol=1e-5)
    for i in range(4, 9):
        residual, cache = run(model, ids[:, i : i + 1], jnp.full((2, 1), i, jnp.int32), cache)
        np.testing.assert_allclose(model.logits(residual)[:, 0], whole[:, i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seq", [1, 63, 64, 65, 200])
def test_blocks_of_queries_change_nothing(seq):
    keys = jax.random.split(jax.random.key(seq), 3)
    q = jax.random.normal(keys[0], (2, seq, 4, 8))
    k, v = (jax.random.normal(key, (2, 2, seq, 8)) for key in keys[1:])
    positions = jnp.broadcast_to(jnp.arange(seq)[None], (2, seq))
    expected = attend(q, k, v, positions)
    np.testing.assert_allclose(attend_prompt(q, k, v, positions), expected, rtol=1e-5, atol=1e-6)


def test_dtype_converts_matrices_and_keeps_vectors(tmp_path):
    tiny_opt(tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="bfloat16")
    assert model.embed.weight[...].dtype == model.layers[0].ffn.down[...].dtype == jnp.bfloat16
    assert model.layers[0].ffn.up_bias[...].dtype == model.final_norm.scale[...].dtype == jnp.float32
    assert model.cache_dtype == jnp.uint16  # the bits of bfloat16
    with pytest.raises(ValueError, match="dtype: expected .* got 'int3'"):
        load_model(tmp_path / "model", dtype="int3")


def test_fingerprint_sees_one_changed_weight_and_the_config(tmp_path):
    tiny_llama(tmp_path / "a")
    tiny_llama(tmp_path / "b")
    edit_config(tmp_path / "b", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    model = load_model(tmp_path / "a")
    before = model_fingerprint(model)
    assert before == model_fingerprint(load_model(tmp_path / "a"))
    assert before != model_fingerprint(load_model(tmp_path / "b"))
    up = model.layers[1].ffn.up
    up.set_value(up[...].at[-1, -1].add(1.0))
    assert model_fingerprint(model, full=True) != before
