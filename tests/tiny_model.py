"""Tiny random decoders in memory, and what their FFNs do, computed by numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax.base import LowRankPredictor, PredictorReport, Predictors
from pjax.model import Decoder, prompt_positions
from pjax.model_config import ModelConfig, Rope

ALL, NONE = -1e9, 1e9
"""Thresholds below and above every score."""


def tiny_config(**changes) -> ModelConfig:
    """A LLaMA of two layers that differ in width."""
    values = dict(
        name="tiny", family="llama", vocab=50, model=16, neurons=(24, 40), heads=4, kv_heads=2, head_dim=4,
        context=32, activation="relu", gated=True, norm="rms", norm_eps=1e-5,
        rope=Rope(1e4, 4),
        tied=False, bos_id=1, eos_ids=(2,),
    )  # fmt: skip
    return ModelConfig(**(values | changes))


def tiny_decoder(seed: int = 0, **changes) -> Decoder:
    """A random decoder, norms and biases too."""
    model = nnx.eval_shape(lambda: Decoder(tiny_config(**changes), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        noise = rng.normal(size=variable.shape) * (
            variable.shape[-1] ** -0.5 if len(variable.shape) == 2 else 0.3
        )
        variable.set_value(jnp.asarray(noise + ("scale" in path), jnp.float32))
    return model


def tiny_ids(batch: int, seq: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (batch, seq)).astype(np.int32)


def tiny_predictors(model: Decoder, threshold: float, seed: int = 0) -> Predictors:
    """Random predictors of rank 3; scores are of both signs."""
    rng = np.random.default_rng(seed)

    def array(*shape: int):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    width = model.config.model
    layers = tuple(
        LowRankPredictor(array(3, width), array(n, 3), array(n), jnp.float32(threshold))
        for n in model.config.neurons
    )
    report = PredictorReport(3, 0.9, 0.8, 0.2, 0.1, threshold, 100, 0.95, "lowrank")
    return Predictors(layers, tuple(report._replace(bytes=100 + i) for i in range(len(layers))))


def ffn_inputs(model: Decoder, ids: np.ndarray) -> list[np.ndarray]:
    """float64 [batch, seq, model] per layer: what the FFNs of the dense model read."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, ids: jax.Array) -> list[jax.Array]:
        model = nnx.merge(graphdef, state)
        return model.run(ids, prompt_positions(ids), ffn_fn=lambda layer, x, _: (layer.ffn.dense(x), x))[2]

    return [np.asarray(x, np.float64) for x in run(state, ids)]


def ffn_values(layer, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what multiplies the down rows, what the activation reads), for x [..., model], with relu."""
    ffn = layer.ffn.weights

    def product(weight, bias) -> np.ndarray:
        y = x @ np.asarray(weight, np.float64).T
        return y if bias is None else y + np.asarray(bias, np.float64).reshape((1,) * (x.ndim - 1) + (-1,))

    up = product(ffn.up, ffn.up_bias)
    opener = up if ffn.gate is None else product(ffn.gate, ffn.gate_bias)
    return np.maximum(opener, 0) * (1 if ffn.gate is None else up), opener
