"""What the modes promise: exact is dense on every ReLU family, and predicted is exact within its mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pjax import ops
from pjax.base import Predictors, SignPredictor
from pjax.executor.common import mode_ffn_fn
from pjax.model import prompt_positions
from pjax.storage import quantize
from tests.tiny_model import ALL, NONE, tiny_decoder, tiny_ids, tiny_predictors

FAMILIES = {
    "llama": {},
    "llama, relu2": dict(activation="relu2"),
    "prosparse": dict(activation="fatrelu:0.01"),
    "bamboo": dict(activation="drelu"),
    "minicpm": dict(activation="fatrelu:0.01", residual_scale=0.4, embed_scale=12.0, logit_scale=0.5),
    "opt": dict(norm="layer", norm_bias=True, gated=False, mlp_bias=True, rope=None, learned_positions=True,
                position_offset=2, attention_bias=True),
    "opt-350m": dict(block="post_norm", embed_width=8, final_norm=False, gated=False, mlp_bias=True),
    "falcon": dict(block="parallel", norm="layer", norm_bias=True, gated=False),
    "nemotron": dict(norm="layer", norm_bias=True, gated=False, activation="relu2"),
}  # fmt: skip
"""The ReLU families of the README, by what is special in each."""


def outputs(model, mode, predictors=None):
    """(logits, what the first layer's FFN gave) of a prompt in a mode."""
    graphdef, state = nnx.split(model)
    ids = tiny_ids(2, 9)

    @jax.jit
    def run(state, layers):
        model = nnx.merge(graphdef, state)
        ffn_fn = mode_ffn_fn(mode, Predictors(layers, ()))

        def kept(layer, x, residual):
            y, _ = ffn_fn(layer, x, residual)
            return y, y

        residual, _, aux = model.run(ids, prompt_positions(ids), ffn_fn=kept)
        return model.logits(residual), aux[0]

    return [np.asarray(a) for a in run(state, predictors.layers if predictors else ())]


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_gives_the_dense_logits(family):
    model = tiny_decoder(**FAMILIES[family])
    dense, exact = outputs(model, "dense")[0], outputs(model, "exact")[0]
    # Up to the order of sums of some dozen terms of about 1.
    np.testing.assert_allclose(exact, dense, rtol=1e-5, atol=2e-5 * np.abs(dense).max())
    assert np.abs(dense).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["llama", "bamboo", "opt"])
def test_a_mask_of_all_neurons_is_exact_to_the_bit(family, dtype):
    widths = dict(model=32, neurons=(64, 32), heads=4, head_dim=8) if dtype != "float32" else {}
    model = tiny_decoder(**(FAMILIES[family] | widths))
    model = model if dtype == "float32" else quantize(model, dtype)
    exact = outputs(model, "exact")
    for predictors in (tiny_predictors(model, ALL), Predictors((None, None), ())):
        for ours, expected in zip(outputs(model, "predicted", predictors), exact, strict=True):
            np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_of_no_neuron_leaves_the_down_bias(family):
    model = tiny_decoder(**FAMILIES[family])
    logits, y = outputs(model, "predicted", tiny_predictors(model, NONE))
    bias = model.layers[0].ffn.down_bias
    expected = np.zeros(16) if bias is None else np.asarray(bias[...])
    np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape).astype(y.dtype))
    assert not np.allclose(logits, outputs(model, "dense")[0], rtol=1e-3, atol=1e-3)


def test_signs_and_layers_without_a_predictor_run_side_by_side():
    model = tiny_decoder()
    gate = model.layers[1].ffn.weights.gate
    signs = SignPredictor(ops.pack_signs(gate), jnp.float32(1), jnp.zeros(40), jnp.float32(ALL))
    exact = outputs(model, "exact")[0]
    np.testing.assert_array_equal(outputs(model, "predicted", Predictors((None, signs), ()))[0], exact)
    some = dataclasses.replace(signs, threshold=jnp.float32(2))
    assert not np.array_equal(outputs(model, "predicted", Predictors((None, some), ()))[0], exact)
