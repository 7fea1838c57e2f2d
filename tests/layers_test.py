"""The importable sparse layer inside other people's models, against plain formulas."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pjax

MODEL, NEURONS = 24, 56


def kernels(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    gate, up = (jax.random.normal(key, (MODEL, NEURONS)) for key in keys[:2])
    return gate, up, jax.random.normal(keys[2], (NEURONS, MODEL))


def formula(x, gate, up, down):
    return (jax.nn.relu(x @ gate) * (x @ up)) @ down


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_from_kernels_equals_the_formula(layout):
    gate, up, down = kernels()
    parts = (gate, up, down) if layout == "in_out" else (gate.T, up.T, down.T)
    layer = pjax.SparseFfn.from_kernels(*parts, layout=layout)
    x = jax.random.normal(jax.random.key(1), (2, 3, MODEL))
    np.testing.assert_allclose(layer(x), formula(x, gate, up, down), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer.dense(x), formula(x, gate, up, down), rtol=1e-4, atol=1e-4)


def test_from_kernels_refuses_what_does_not_belong_together():
    gate, up, down = kernels()
    with pytest.raises(
        ValueError, match=r"down: expected shape \(56, 24\).*got \(24, 56\); is it transposed"
    ):
        pjax.SparseFfn.from_kernels(gate, up, down.T)
    with pytest.raises(ValueError, match="layout: expected .* got 'sideways'"):
        pjax.SparseFfn.from_kernels(gate, up, down, layout="sideways")


def test_a_mask_leaves_neurons_out_per_token():
    gate, up, down = kernels()
    layer = pjax.SparseFfn.from_kernels(gate, up, down)
    x = jax.random.normal(jax.random.key(1), (2, 3, MODEL))
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (2, 3, NEURONS))
    expected = (jax.nn.relu(x @ gate) * (x @ up) * mask) @ down
    np.testing.assert_allclose(layer(x, mask), expected, rtol=1e-4, atol=1e-4)


def test_gradients_in_an_nnx_model_equal_those_of_the_formula():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(MODEL, rngs=rngs)
            self.ffn = pjax.SparseFfn(MODEL, NEURONS, activation="relu", gated=True, rngs=rngs)

        def __call__(self, x):
            return x + self.ffn(self.norm(x))

    block = Block(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, MODEL))

    def with_formula(block, x):
        ffn = block.ffn.weights
        return x + formula(block.norm(x), ffn.gate.T, ffn.up.T, ffn.down)

    grads, expected = (
        nnx.grad(lambda block, fn=fn: (fn(block, x) ** 2).sum())(block)
        for fn in (lambda block, x: block(x), with_formula)
    )
    leaves = list(zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True))
    assert len(leaves) == 5
    for ours, theirs in leaves:
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_in_a_linen_model():
    class Mlp(linen.Module):
        sparse: bool

        @linen.compact
        def __call__(self, x):
            init = linen.initializers.lecun_normal()
            gate, up = (self.param(name, init, (MODEL, NEURONS)) for name in ("gate", "up"))
            down = self.param("down", init, (NEURONS, MODEL))
            if self.sparse:
                return pjax.SparseFfn.from_kernels(gate, up, down)(x)
            return formula(x, gate, up, down)

    x = jax.random.normal(jax.random.key(1), (4, MODEL))
    params = Mlp(sparse=False).init(jax.random.key(0), x)
    sparse = jax.jit(Mlp(sparse=True).apply)(params, x)
    np.testing.assert_allclose(sparse, Mlp(sparse=False).apply(params, x), rtol=1e-4, atol=1e-5)
    grads = jax.grad(lambda p: Mlp(sparse=True).apply(p, x).sum())(params)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads))


def test_biases_count():
    layer = pjax.SparseFfn(MODEL, NEURONS, activation="relu", gated=False, bias=True, rngs=nnx.Rngs(0))
    layer.up_bias.set_value(jax.random.normal(jax.random.key(3), (NEURONS,)))
    layer.down_bias.set_value(jax.random.normal(jax.random.key(4), (MODEL,)))
    x = jax.random.normal(jax.random.key(1), (5, MODEL))
    hidden = jax.nn.relu(x @ layer.up[...].T + layer.up_bias[...][None])
    expected = hidden @ layer.down[...] + layer.down_bias[...][None]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_set_weights_refuses_another_structure():
    layer = pjax.SparseFfn(MODEL, NEURONS, activation="relu", gated=True, rngs=nnx.Rngs(0))
    weights = layer.weights
    with pytest.raises(ValueError, match="ffn.up_bias: this layer has none, but one came"):
        layer.set_weights(pjax.Ffn(weights.gate, weights.up, weights.down, up_bias=jnp.ones(NEURONS)))
    with pytest.raises(ValueError, match="ffn.gate: this layer has one, but none came"):
        layer.set_weights(pjax.Ffn(None, weights.up, weights.down))


def test_a_mask_must_lead_as_x_does():
    layer = pjax.SparseFfn.from_kernels(*kernels())
    x = jax.random.normal(jax.random.key(1), (2, 3, MODEL))
    with pytest.raises(ValueError, match=r"active_mask: expected shape \[2, 3, 56\].*got \[3, 2, 56\]"):
        layer(x, jnp.ones((3, 2, NEURONS), bool))
    one_for_all = jnp.arange(NEURONS) % 2 == 0
    repeated = jnp.broadcast_to(one_for_all, (2, 3, NEURONS))
    np.testing.assert_array_equal(layer(x, one_for_all), layer(x, repeated))
