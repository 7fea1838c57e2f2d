"""Activation statistics of published models that are not here: power laws fitted to the paper's figures.

Synthetic. Of each model PowerInfer publishes how many neurons are active (its Tables 1 and 3) and which share
of the neurons makes 80 % of the activations, in one layer and in the whole model (Fig. 4). The n-th neuron of
a layer is active with frequency min(1, c * (n / neurons)**-a); a is fitted to the layer's share, and layers
differ in density by factors evenly spread in their logarithm, fitted to the model's share. Which layers are
the dense ones is not published: they come in random order.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from experiments.synthetic import SHAPES
from pjax.base import ActivationStats
from pjax.model_config import ModelConfig
from pjax.profiler import hot_share

NUM_TOKENS = 10**6  # as many as the paper counts for its Fig. 4
_GRID = 4096  # neurons of a layer while fitting; the law has no scale


@dataclasses.dataclass(frozen=True)
class Published:
    """A model whose statistics are known in outline.

    Attributes:
        config: its shape.
        density: share of neurons that are active for a token.
        layer_share: share of a layer's neurons that makes 80 % of its activations.
        model_share: the same for all layers together.
    """

    config: ModelConfig
    density: float
    layer_share: float
    model_share: float


def _shape(
    like: str, name: str, layers: int, model: int, neurons: int, heads: int, kv_heads: int
) -> ModelConfig:
    return SHAPES[like].config.replace(
        name=name, model=model, embed_width=model, neurons=(neurons,) * layers, heads=heads,
        kv_heads=kv_heads, head_dim=model // heads,
    )  # fmt: skip


PUBLISHED = {
    entry.config.name: entry
    for entry in (
        Published(_shape("opt-1.3b", "opt-13b", 40, 5120, 20480, 40, 40), 0.03, 0.26, 0.17),
        Published(_shape("opt-1.3b", "opt-30b", 48, 7168, 28672, 56, 56), 0.03, 0.26, 0.17),
        Published(_shape("opt-1.3b", "opt-66b", 64, 9216, 36864, 72, 72), 0.03, 0.26, 0.17),
        Published(_shape("opt-1.3b", "opt-175b", 96, 12288, 49152, 96, 96), 0.03, 0.26, 0.17),
        Published(_shape("opt-1.3b", "falcon-40b", 60, 8192, 32768, 128, 8), 0.05, 0.26, 0.17),
        Published(_shape("prosparse-7b", "llama-70b", 80, 8192, 28672, 64, 8), 0.18, 0.43, 0.26),
    )
}
"""Shares are those of OPT-30B and LLaMA2-70B (ReGLU); the paper has none for other models, of which Falcon
gets OPT's."""


def make_stats(published: Published) -> ActivationStats:
    """Counts of a published model, hottest neurons first in every layer."""
    exponent = _bisect(
        lambda a: -_share([_layer(_GRID, published.density, a)]), -published.layer_share, 0.0, 3.0
    )
    layers = published.config.layers

    def frequencies(spread: float, neurons: int) -> list[np.ndarray]:
        heat = np.exp(np.random.default_rng(0).permutation(np.linspace(-spread, spread, layers)))
        densities = np.minimum(published.density * heat / heat.mean(), 0.95)
        return [_layer(neurons, density, exponent) for density in densities]

    spread = _bisect(lambda s: -_share(frequencies(s, _GRID // 4)), -published.model_share, 0.0, 4.0)
    counts = frequencies(spread, published.config.neurons[0])
    return ActivationStats(tuple(np.rint(f * NUM_TOKENS).astype(np.int64) for f in counts), NUM_TOKENS)


def _share(frequencies: list[np.ndarray]) -> float:
    return hot_share(np.concatenate(frequencies))


def _layer(neurons: int, density: float, exponent: float) -> np.ndarray:
    law = ((np.arange(neurons) + 0.5) / neurons) ** -exponent
    # The exponent of e, since c spans many orders of magnitude.
    log_c = _bisect(lambda x: float(np.minimum(1.0, np.exp(x) * law).mean()), density, -40.0, 5.0)
    return np.minimum(1.0, np.exp(log_c) * law)


def _bisect(rising_fn: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rising_fn(middle) < target else (low, middle)
    return (low + high) / 2
