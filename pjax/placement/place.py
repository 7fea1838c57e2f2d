"""Solves a placement: numbers in, masks out, re-checked in integers."""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np

from pjax.base import ActivationStats, HardwareSpec, Placement
from pjax.model_config import ModelConfig
from pjax.placement.problem import (
    LayerCurve,
    Minimum,
    check_hardware,
    check_stats,
    impact_curve,
    latency_curve,
    layer_neuron_bytes,
    layer_times,
    saved_per_row,
)
from pjax.placement.solver import Choice, Formulation, choose, choose_by_price

GIB = 2**30  # whose worth is part of the answer

Objective = Literal["impact", "latency"]
"""What a placement is to be best in, see `solve_placement`."""


def solve_placement(
    stats: ActivationStats,
    config: ModelConfig,
    hardware: HardwareSpec,
    *,
    device_bytes: int,
    dtype: str | Sequence[str],
    objective: Objective = "latency",
    minimum: Minimum = "paper",
    group_size: int = 64,
    time_limit_s: float = 30.0,
    formulation: Formulation = "block",
) -> Placement:
    """Chooses the hot neurons of every layer.

        impact      maximise the sum of f_n over hot n, with none or at least C hot neurons in a layer
        latency     minimise the sum over layers of max(device, host) + join, see `layer_times`

    subject to the bytes of the hot neurons <= device_bytes, f_n being the activation frequency. `impact` is
    the program of the paper; its C is counted as `min_hot_neurons` says. `latency`, which measured faster
    (`experiments/placement_measured.py`), needs no C: it knows what a join costs, that a layer without cold
    neurons has none, and that a device with too much to do is the slower half. A device that reads no faster
    than the host gets nothing. A device that can hold every neuron gets them all under `impact`: nothing is
    joined then, so C does not apply.

    Groups of neurons of similar frequency are what the solver chooses layers by; the masks are of single
    neurons, and so is the bound. Memory comes first: cold neurons that the host cannot hold are moved to the
    device, least frequent first, whatever the objective and C say.

    Args:
        stats: activation counts of this model.
        config: the model that is placed.
        hardware: speeds and sizes of device and host.
        device_bytes: device memory that hot neurons may take, 0 to `hardware.device_bytes`.
        dtype: storage type of the rows, see `neuron_bytes`; one for all layers or one each.
        objective: what to optimise.
        minimum: form of C, for `impact`.
        group_size: neurons that the solver decides together, >= 1; the last group of a layer may be smaller.
        time_limit_s: seconds the solver may take, > 0.
        formulation: "block", or "literal" for the program as the paper writes it (`impact` only, slow).

    Returns:
        The placement. Its status is "greedy" when the solver is missing, or had nothing better than the
        Lagrangian choice in time. The bound is always proven.

    Raises:
        ValueError: if the statistics are empty or not of this model, a number makes no sense, or
            both memories together cannot hold the neurons.
        RuntimeError: if the solver's answer breaks a constraint.
    """
    check_hardware(hardware)
    _check_settings(hardware, device_bytes, group_size, time_limit_s)
    _check_choices(objective, minimum, formulation)
    check_stats(stats, config)
    start_s = time.perf_counter()
    sizes = layer_neuron_bytes(config, dtype)
    frequencies = stats.frequencies
    orders = [np.argsort(-f, kind="stable") for f in frequencies]
    falling = [f[order] for f, order in zip(frequencies, orders, strict=True)]
    curves = partial(_make_curves, falling, sizes, hardware, objective, minimum)

    layers = curves(device_bytes)
    choice = choose(
        layers, device_bytes, group_size=group_size, time_limit_s=time_limit_s, formulation=formulation
    )
    _check_choice(layers, choice, device_bytes)
    num_moved = _spill(config.neurons, choice.num_hot, sizes, hardware.host_bytes, device_bytes)
    hot_mask = tuple(map(_make_mask, orders, choice.num_hot, num_moved))
    value, bound = _value_and_bound(objective, choice, frequencies, hot_mask, sizes, hardware)
    richer = choose_by_price(curves(device_bytes + GIB), device_bytes + GIB)
    return Placement(
        hot_mask=hot_mask,
        status="feasible" if any(num_moved) and choice.status == "optimal" else choice.status,
        objective=value,
        bound=bound,
        device_bytes=sum(size * int(mask.sum()) for size, mask in zip(sizes, hot_mask, strict=True)),
        budget_bytes=device_bytes,
        solve_s=time.perf_counter() - start_s,
        goal=objective,
        limits=_limits(
            layers, choice.num_hot, device_bytes, objective, is_faster=saved_per_row(1, hardware) > 0
        ),
        next_gib=max(0.0, richer.value - choice.value),
    )


def _make_curves(
    falling: Sequence[np.ndarray],
    sizes: Sequence[int],
    hardware: HardwareSpec,
    objective: Objective,
    minimum: Minimum,
    device_bytes: int,
) -> list[LayerCurve]:
    """Each layer for the solver; `falling` has the sorted frequencies."""
    if objective == "latency":
        return [latency_curve(f, size, hardware) for f, size in zip(falling, sizes, strict=True)]
    total_bytes = sum(size * len(f) for size, f in zip(sizes, falling, strict=True))
    form = None if total_bytes <= device_bytes else minimum
    return [impact_curve(f, size, hardware, form) for f, size in zip(falling, sizes, strict=True)]


def _value_and_bound(
    objective: Objective,
    choice: Choice,
    frequencies: Sequence[np.ndarray],
    hot_mask: Sequence[np.ndarray],
    sizes: Sequence[int],
    hardware: HardwareSpec,
) -> tuple[float, float]:
    """The objective of the masks, whatever the solver says, and the bound; equal ones differ by rounding."""
    if objective == "impact":
        value = math.fsum(float(f[mask].sum()) for f, mask in zip(frequencies, hot_mask, strict=True))
        return value, max(choice.bound, value)
    value = step_seconds(frequencies, hot_mask, sizes, hardware)
    all_cold = [np.zeros(len(mask), bool) for mask in hot_mask]
    return value, min(step_seconds(frequencies, all_cold, sizes, hardware) - choice.bound, value)


def step_seconds(
    frequencies: Sequence[np.ndarray],
    hot_mask: Sequence[np.ndarray],
    sizes: Sequence[int],
    hardware: HardwareSpec,
) -> float:
    """Expected seconds of all FFNs in a decode step, see `layer_times`."""
    return math.fsum(
        layer_times(f, mask, size, hardware).layer_s
        for f, mask, size in zip(frequencies, hot_mask, sizes, strict=True)
    )


def _make_mask(order: np.ndarray, num_hot: int, num_moved: int) -> np.ndarray:
    """The most frequent neurons, and some of the least frequent ones."""
    mask = np.zeros(order.size, bool)
    mask[order[:num_hot]] = mask[order[order.size - num_moved :]] = True
    return mask


def _spill(
    neurons: Sequence[int], num_hot: Sequence[int], sizes: Sequence[int], host_bytes: int, device_bytes: int
) -> list[int]:
    """How many of each layer's least frequent neurons the host cannot hold; first where some are hot."""
    excess = sum(size * (n - hot) for size, n, hot in zip(sizes, neurons, num_hot, strict=True)) - host_bytes
    left = device_bytes - sum(size * hot for size, hot in zip(sizes, num_hot, strict=True))
    num_moved = [0] * len(neurons)
    for i in sorted(range(len(neurons)), key=lambda i: num_hot[i] == 0):
        wanted = min(neurons[i] - num_hot[i], math.ceil(max(0, excess) / sizes[i]), left // sizes[i])
        num_moved[i] = wanted
        excess -= wanted * sizes[i]
        left -= wanted * sizes[i]
    if excess > 0:
        raise ValueError(
            f"hardware: host_bytes: the cold neurons need {host_bytes + excess} bytes, the host has "
            f"{host_bytes}; raise device_bytes ({device_bytes}) or use a smaller dtype"
        )
    return num_moved


def _limits(
    layers: Sequence[LayerCurve],
    num_hot: Sequence[int],
    device_bytes: int,
    objective: Objective,
    *,
    is_faster: bool,
) -> tuple[str, ...]:
    """Why no further neuron of each layer is hot, see `Placement.limits`."""
    left = device_bytes - sum(layer.neuron_bytes * num for layer, num in zip(layers, num_hot, strict=True))
    limits = []
    for layer, num in zip(layers, num_hot, strict=True):
        if num == layer.neurons:
            limits.append("all hot")
        elif layer.whole is not None and layer.whole > layer.worth[num]:
            limits.append("budget")  # with more of it the whole layer would be hot
        elif not is_faster:
            limits.append("no gain")
        elif num == layer.most:
            limits.append("no gain" if objective == "latency" else "minimum")
        elif layer.neuron_bytes > left:
            limits.append("budget")
        else:
            limits.append("minimum")
    return tuple(limits)


def _check_choice(layers: Sequence[LayerCurve], choice: Choice, device_bytes: int) -> None:
    """Re-checks the constraints in integers: solvers work with tolerances, and have bugs."""
    used = sum(layer.neuron_bytes * num for layer, num in zip(layers, choice.num_hot, strict=True))
    if used > device_bytes:
        raise RuntimeError(f"the placement takes {used} bytes of {device_bytes}; please report this")
    for i, (layer, num) in enumerate(zip(layers, choice.num_hot, strict=True)):
        if 0 < num < layer.least:
            raise RuntimeError(
                f"the placement gives layer {i} {num} hot neurons, fewer than the {layer.least} that pay "
                "for a join; please report this"
            )


def _check_settings(hardware: HardwareSpec, device_bytes: int, group_size: int, time_limit_s: float) -> None:
    if not 0 <= device_bytes <= hardware.device_bytes or device_bytes != int(device_bytes):
        raise ValueError(
            f"device_bytes: expected whole bytes from 0 to the {hardware.device_bytes} of hardware "
            f"{hardware.name!r}, got {device_bytes!r}; leave room for the rest of the model"
        )
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size: expected a whole number >= 1, got {group_size!r}; the default is 64")
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise ValueError(f"time_limit_s: expected a finite number of seconds > 0, got {time_limit_s!r}")


def _check_choices(objective: str, minimum: str, formulation: str) -> None:
    for name, value, kind in (
        ("objective", objective, Objective),
        ("minimum", minimum, Minimum),
        ("formulation", formulation, Formulation),
    ):
        if value not in get_args(kind):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(kind))}, got {value!r}")
    if formulation == "literal" and objective != "impact":
        raise ValueError(f"formulation: the paper's is of impact, got objective {objective!r}")
