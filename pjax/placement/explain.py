"""Says what a placement does, layer by layer."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pjax.base import ActivationStats, HardwareSpec, Placement
from pjax.model_config import ModelConfig
from pjax.placement.place import step_seconds
from pjax.placement.problem import layer_neuron_bytes, layer_times


class LayerExplanation(NamedTuple):
    """One layer under a placement.

    Attributes:
        hot: number of hot neurons.
        neurons: of the layer.
        share: of the layer's activations that the device serves, 0..1.
        device_s: expected seconds of the hot half in a decode step, starting its program included.
        host_s: of the cold half.
        join_s: of sending the input to the host and its half back.
        limit: why no further neuron is hot, see `Placement.limits`; None of an imported placement.
    """

    hot: int
    neurons: int
    share: float
    device_s: float
    host_s: float
    join_s: float
    limit: str | None


class Explanation(NamedTuple):
    """A placement under the model of `layer_times`.

    Attributes:
        layers: one entry each.
        step_s: expected seconds of all FFNs in a decode step.
        all_cold_s: the same without a hot neuron.
    """

    layers: tuple[LayerExplanation, ...]
    step_s: float
    all_cold_s: float


def explain_placement(
    placement: Placement,
    stats: ActivationStats,
    config: ModelConfig,
    hardware: HardwareSpec,
    *,
    dtype: str | Sequence[str],
) -> Explanation:
    """What each layer's neurons do under a placement, and why no more of them are hot.

    Args:
        placement: of this model.
        stats: its activation counts.
        config: the model.
        hardware: speeds of device and host.
        dtype: storage type of the rows, see `neuron_bytes`; one for all layers or one each.
    """
    sizes, frequencies = layer_neuron_bytes(config, dtype), stats.frequencies
    limits = placement.limits or (None,) * config.layers
    layers = []
    for frequency, mask, size, limit in zip(frequencies, placement.hot_mask, sizes, limits, strict=True):
        share = float(frequency[mask].sum()) / max(float(frequency.sum()), math.ulp(0.0))
        times = layer_times(frequency, mask, size, hardware)
        layers.append(LayerExplanation(int(mask.sum()), len(mask), min(share, 1.0), *times, limit))
    cold = [np.zeros(len(mask), bool) for mask in placement.hot_mask]
    return Explanation(
        tuple(layers),
        step_seconds(frequencies, placement.hot_mask, sizes, hardware),
        step_seconds(frequencies, cold, sizes, hardware),
    )
