"""What hot neurons are worth: their bytes, the time they save, and each layer as a curve for the solver."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from pjax.base import ActivationStats, HardwareSpec
from pjax.model_config import ModelConfig
from pjax.weights import DTYPES, row_bytes

_BIAS_BYTES = 4  # biases stay float32 whatever the type of the rows
_ID_BYTES = 4  # the neuron's number in the neuron table, int32

Minimum = Literal["paper", "expected"]
"""How the fewest hot neurons that pay for a join are counted, see `min_hot_neurons`."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCurve:
    """One layer as the solver sees it: what its k most frequent neurons are worth on the device.

    A layer is closed (nothing hot, worth 0), open (k from `least` to `most`, worth the sum of the first k
    gains) or whole (all neurons, worth `whole`).

    Attributes:
        neurons: of the layer.
        neuron_bytes: of each of them.
        gains: float64 [most], falling from `least` on.
        least: the fewest that may be hot in an open layer; 0 leaves it no reason to be closed.
        whole: worth of a layer without a cold neuron where that differs from an open one's, or None.
    """

    neurons: int
    neuron_bytes: int
    gains: np.ndarray
    least: int = 0
    whole: float | None = None

    @property
    def most(self) -> int:
        """The most that may be hot in an open layer; 0 if it can never be open."""
        return len(self.gains)

    @functools.cached_property
    def worth(self) -> np.ndarray:
        """float64 [most + 1]: the sum of the first k gains."""
        return np.concatenate([[0.0], np.cumsum(self.gains)])

    def num_worth(self, price: float) -> int:
        """How many neurons of an open layer are worth more than their bytes at a price, at least `least`."""
        return self.least + int(np.searchsorted(self._losses, -price * self.neuron_bytes))

    def num_equal(self, first: int) -> int:
        """How many neurons from the one at place `first` on have its gain; `first` is at least `least`."""
        return int(np.searchsorted(self._losses, -self.gains[first], side="right")) + self.least - first

    @functools.cached_property
    def _losses(self) -> np.ndarray:
        return -self.gains[self.least :]


class ExpectedTimes(NamedTuple):
    """Expected seconds of one layer's FFN in a decode step.

    Attributes:
        device_s: the hot half, with starting its program.
        host_s: the cold half.
        join_s: sending the input to the host and its half back; 0 if the host has nothing to do.
    """

    device_s: float
    host_s: float
    join_s: float

    @property
    def layer_s(self) -> float:
        """Both halves, which run at the same time, and the join."""
        return max(self.device_s, self.host_s) + self.join_s


def neuron_bytes(config: ModelConfig, dtype: str) -> int:
    """Device memory of one neuron: its rows, its biases and its number.

    Args:
        config: the model; its width, gate and biases count.
        dtype: storage type of the rows: "float32", "bfloat16", "float16", "q8_0" or "q4_0".

    Raises:
        ValueError: if dtype is none of these.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    num_inputs = 2 if config.gated else 1
    num_biases = num_inputs if config.mlp_bias else 0
    return (num_inputs + 1) * row_bytes(dtype, config.model) + num_biases * _BIAS_BYTES + _ID_BYTES


def layer_neuron_bytes(config: ModelConfig, dtype: str | Sequence[str]) -> tuple[int, ...]:
    """`neuron_bytes` of every layer.

    Args:
        config: the model.
        dtype: of all layers, or one entry a layer.

    Raises:
        ValueError: an unknown type, or another number of them than of layers.
    """
    dtypes = (dtype,) * config.layers if isinstance(dtype, str) else tuple(dtype)
    if len(dtypes) != config.layers:
        raise ValueError(
            f"dtype: expected one type, or one for each of {config.layers} layers, got {len(dtypes)}"
        )
    return tuple(neuron_bytes(config, entry) for entry in dtypes)


def saved_per_row(num_bytes: int, hardware: HardwareSpec) -> float:
    """Seconds by which the device reads one neuron faster than the host; 0 or less if it does not.

    `T = bytes / bandwidth` (equation 5 of the paper); the host reads scattered rows, hence its gather rate.
    """
    return num_bytes / hardware.host_gather_bytes_per_s - num_bytes / hardware.device_bytes_per_s


def min_hot_neurons(
    num_bytes: int, hardware: HardwareSpec, frequency: np.ndarray | None = None
) -> int | None:
    """The fewest hot neurons of a layer that pay for one join of host and device.

        paper       C = ceil(T_sync / (T_host - T_device))           (equation 4)
        expected    C = min k: (f_1 + ... + f_k) * (T_host - T_device) >= T_sync

    The paper counts every hot neuron as read for every token. The second form counts the rows that are
    read on average, which are fewer, so that C is larger.

    Args:
        num_bytes: bytes of one neuron.
        hardware: speeds of device and host.
        frequency: falling activation frequencies of the layer for the second form; None for the first.

    Returns:
        The number of neurons, at least 1, or None when no number pays.
    """
    saved_s = saved_per_row(num_bytes, hardware)
    if saved_s <= 0:
        return None
    if frequency is None:
        return max(1, math.ceil(hardware.sync_s / saved_s))
    running = np.cumsum(frequency)
    fewest = int(np.searchsorted(running, hardware.sync_s / saved_s)) + 1
    return fewest if fewest <= len(running) else None


def layer_times(
    frequency: np.ndarray, hot_mask: np.ndarray, num_bytes: int, hardware: HardwareSpec
) -> ExpectedTimes:
    """Expected times of one layer under a placement, every neuron being read as often as it is active.

    The mean of the larger half is taken for the larger of the halves' means, which it is not less than.

    Args:
        frequency: float64 [neurons], activation frequency.
        hot_mask: bool [neurons].
        num_bytes: bytes of one neuron.
        hardware: speeds of device and host.
    """
    hot_rows, cold_rows = float(frequency[hot_mask].sum()), float(frequency[~hot_mask].sum())
    return ExpectedTimes(
        device_s=hardware.launch_s + hot_rows * num_bytes / hardware.device_bytes_per_s,
        host_s=cold_rows * num_bytes / hardware.host_gather_bytes_per_s,
        join_s=0.0 if hot_mask.all() else hardware.sync_s,
    )


def impact_curve(
    frequency: np.ndarray, num_bytes: int, hardware: HardwareSpec, minimum: Minimum | None
) -> LayerCurve:
    """A layer's worth in activations that the device serves (equations 1 and 2 of the paper).

    Args:
        frequency: float64 [neurons], falling.
        num_bytes: bytes of one neuron.
        hardware: speeds of device and host.
        minimum: how C is counted; None if nothing has to be joined.
    """
    neurons = len(frequency)
    fewest = 0 if minimum is None else None
    if minimum is not None:
        fewest = min_hot_neurons(num_bytes, hardware, frequency if minimum == "expected" else None)
    if fewest is None or fewest > neurons or saved_per_row(num_bytes, hardware) <= 0:
        return LayerCurve(neurons, num_bytes, np.zeros(0))
    # One neuron is no constraint: it is the next that would be hot.
    return LayerCurve(neurons, num_bytes, frequency, fewest if fewest > 1 else 0)


def latency_curve(frequency: np.ndarray, num_bytes: int, hardware: HardwareSpec) -> LayerCurve:
    """A layer's worth in seconds saved over leaving it to the host (see `layer_times`).

    Up to the point where both halves take equally long, each hot neuron saves what the host needs for
    it; beyond, the device would be the slower one. A whole layer saves the join, too. (A set that skips
    frequent neurons could balance the halves better, by less than the time of one neuron.)

    Args:
        frequency: float64 [neurons], falling.
        num_bytes: bytes of one neuron.
        hardware: speeds of device and host.
    """
    neurons = len(frequency)
    if saved_per_row(num_bytes, hardware) <= 0 or not neurons:
        return LayerCurve(neurons, num_bytes, np.zeros(0))
    served = np.concatenate([[0.0], np.cumsum(frequency)])
    device_s = hardware.launch_s + served * num_bytes / hardware.device_bytes_per_s
    host_s = (served[-1] - served) * num_bytes / hardware.host_gather_bytes_per_s
    layer_s = np.maximum(device_s, host_s)
    best = int(np.argmin(layer_s[:neurons]))
    gains = frequency[:best] * num_bytes / hardware.host_gather_bytes_per_s
    if best:  # the last one may be where the device becomes the slower half
        gains[-1] = min(gains[-1], layer_s[best - 1] - layer_s[best])
    whole = float(layer_s[0] + hardware.sync_s - device_s[-1])
    return LayerCurve(neurons, num_bytes, gains, 0, whole if whole > 0 else None)


def check_hardware(hardware: HardwareSpec) -> None:
    """Refuses a description of hardware that no machine can have.

    Raises:
        ValueError: naming the field, if a size or bandwidth is not a positive finite number, or a
            cost is negative or not finite.
    """
    numbers = {k: v for k, v in dataclasses.asdict(hardware).items() if not isinstance(v, str)}
    for name, value in numbers.items():
        is_cost = name in ("launch_s", "sync_s")
        if not math.isfinite(value) or value < 0 or (value == 0 and not is_cost):
            expected = "a finite number >= 0" if is_cost else "a positive finite number"
            raise ValueError(
                f"hardware {hardware.name!r}: {name}: expected {expected}, got {value!r}; "
                "measure the machine with measure_hardware() or start from hardware_preset(name)"
            )


def check_stats(stats: ActivationStats, config: ModelConfig) -> None:
    """Refuses statistics that are empty, or not of this model.

    Raises:
        ValueError: naming the layer.
    """
    again = f"run collect_stats on model {config.name!r} with a text that is not empty"
    if stats.num_tokens < 1 or not stats.counts:
        raise ValueError(
            f"stats: expected counts over at least one token, got {len(stats.counts)} layers and "
            f"num_tokens {stats.num_tokens}; {again}"
        )
    if len(stats.counts) != config.layers:
        raise ValueError(
            f"stats: {len(stats.counts)} layers of counts, but config {config.name!r} has {config.layers} "
            f"layers; these are the statistics of another model: {again}"
        )
    for layer, (counts, neurons) in enumerate(zip(stats.counts, config.neurons, strict=True)):
        if counts.shape != (neurons,):
            raise ValueError(
                f"stats: layer {layer} has counts of shape {counts.shape}, but config {config.name!r} has "
                f"{neurons} neurons there; these are the statistics of another model: {again}"
            )
        # Written so that NaN fails too.
        if not np.all((counts >= 0) & (counts <= stats.num_tokens)):
            raise ValueError(
                f"stats: layer {layer} has counts outside 0 to num_tokens {stats.num_tokens}; {again}"
            )
