"""Decides which neurons live on the device: an integer program, solved once per model and machine.

The program is that of PowerInfer (Song et al., SOSP 2024, section 6.3, equations 1-8), in bytes and
for every layer: the device serves as much activation frequency as fits its budget, and a layer has
either no hot neuron or enough of them to pay for joining two partial sums. This module knows nothing
of devices, files or models that run: numbers in, masks out.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from pjax.base import ActivationStats, HardwareSpec, Placement
from pjax.model_config import ModelConfig
from pjax.weights import DTYPES, row_bytes

_BIAS_BYTES = 4  # biases stay float32 whatever the type of the rows
_ID_BYTES = 4  # the neuron's number in the neuron table, int32

# At the solver's default, 1e-4, "optimal" is visibly not; 1e-6 is below the noise of any profile.
_MIP_GAP = 1e-6
# Any fixed number: the solver breaks ties by it.
_SEED = 1


class _Item(NamedTuple):
    """Neurons decided together: places `first` to `last` of a layer sorted by falling frequency.

    The item at place 0 leads its layer: it holds the fewest neurons that pay for a join, and no
    other item of the layer is hot without it.
    """

    layer: int
    first: int
    last: int
    value: float

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def leads(self) -> bool:
        return self.first == 0


class _Choice(NamedTuple):
    """Which items are hot, and what is known of how good that is."""

    hot: np.ndarray
    status: Literal["optimal", "feasible", "greedy"]
    bound: float


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


def min_hot_neurons(num_bytes: int, hardware: HardwareSpec) -> int | None:
    """The fewest hot neurons of a layer that pay for one join of host and device.

    `C = ceil(T_sync / (T_host - T_device))` with `T = bytes / bandwidth` for one neuron (equations
    4 and 5 of the paper). The host reads scattered rows, hence its gather bandwidth.

    Args:
        num_bytes: bytes of one neuron.
        hardware: speeds of device and host.

    Returns:
        The number of neurons, at least 1, or None when the device reads no faster than the host.
    """
    host_s = num_bytes / hardware.host_gather_bytes_per_s
    device_s = num_bytes / hardware.device_bytes_per_s
    if device_s >= host_s:
        return None
    return max(1, math.ceil(hardware.sync_s / (host_s - device_s)))


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


def solve_placement(
    stats: ActivationStats,
    config: ModelConfig,
    hardware: HardwareSpec,
    *,
    device_bytes: int,
    dtype: str,
    group_size: int = 64,
    time_limit_s: float = 30.0,
) -> Placement:
    """Chooses the hot neurons of every layer so that the device serves the most activations.

        maximise    sum of f_n over hot n           f_n: activation frequency
        subject to  bytes of the hot neurons <= device_bytes
                    hot neurons of a layer = 0 or >= C    (`min_hot_neurons`)

    As in the paper, neurons of similar frequency in a layer are decided together. A device that
    reads no faster than the host gets nothing. A device that can hold every neuron gets them all:
    nothing is joined then, so C does not apply.

    Args:
        stats: activation counts of this model.
        config: the model that is placed.
        hardware: speeds and sizes of device and host.
        device_bytes: device memory that hot neurons may take, 0 to `hardware.device_bytes`.
        dtype: storage type of the rows, see `neuron_bytes`.
        group_size: neurons decided together, >= 1; the last group of a layer may be smaller.
        time_limit_s: seconds the solver may take, > 0.

    Returns:
        The placement. Its status is "greedy" when the solver is missing, or had nothing better than
        frequency per byte in time. The bound, over placements of whole groups, is always proven.

    Raises:
        ValueError: if the statistics are empty or not of this model, a number makes no sense, or
            the cold neurons do not fit in the host's memory.
        RuntimeError: if the solver's answer breaks a constraint.
    """
    check_hardware(hardware)
    _check_settings(hardware, device_bytes, group_size, time_limit_s)
    _check_stats(stats, config)
    start_s = time.perf_counter()
    per_neuron_bytes = neuron_bytes(config, dtype)
    total_bytes = per_neuron_bytes * sum(config.neurons)
    capacity = device_bytes // per_neuron_bytes
    minimum = min_hot_neurons(per_neuron_bytes, hardware)
    if minimum is not None and total_bytes <= device_bytes:
        minimum = 0

    orders = [np.argsort(-f, kind="stable") for f in stats.frequencies]
    items = [] if minimum is None else _make_items(stats, orders, minimum, capacity, group_size)
    choice = _choose(items, capacity, time_limit_s)
    hot_mask = _make_masks(items, choice.hot, orders)

    hot_bytes = per_neuron_bytes * sum(int(m.sum()) for m in hot_mask)
    _check_answer(hot_mask, minimum or 0, hot_bytes, device_bytes)
    _check_host(total_bytes - hot_bytes, hardware, device_bytes)
    objective = math.fsum(float(f[m].sum()) for f, m in zip(stats.frequencies, hot_mask, strict=True))
    return Placement(
        hot_mask=hot_mask,
        status=choice.status,
        objective=objective,
        bound=max(choice.bound, objective),  # equal ones differ in the order of summation
        device_bytes=hot_bytes,
        budget_bytes=device_bytes,
        solve_s=time.perf_counter() - start_s,
    )


def _make_items(
    stats: ActivationStats, orders: Sequence[np.ndarray], minimum: int, capacity: int, group_size: int
) -> list[_Item]:
    """The decisions: per layer one leading item of at least `minimum` neurons, then single groups.

    A layer that can never be hot, being narrower than the minimum or its leading item larger than
    the capacity, has none. Within a layer the items fall in frequency per neuron.
    """
    items = []
    for layer, (frequency, order) in enumerate(zip(stats.frequencies, orders, strict=True)):
        lead = min(max(1, math.ceil(minimum / group_size)) * group_size, order.size)
        if order.size == 0 or order.size < minimum or lead > capacity:
            continue
        edges = [0, *range(lead, order.size, group_size), order.size]
        values = np.add.reduceat(frequency[order], edges[:-1])
        items += [_Item(layer, a, b, float(v)) for a, b, v in zip(edges, edges[1:], values, strict=False)]
    return items


def _choose(items: Sequence[_Item], capacity: int, time_limit_s: float) -> _Choice:
    """The solver's choice, or the greedy one where the solver fails or has nothing better in time."""
    greedy = _choose_greedily(items, capacity)
    if greedy.hot.all():
        return greedy._replace(status="optimal")
    try:
        import mip

        program = mip.Model("placement", sense=mip.MAXIMIZE, solver_name=mip.CBC)
    # mip answers a missing or unloadable library with whatever comes first: ImportError, OSError,
    # NameError, AttributeError. None of them is a reason to have no placement.
    except Exception as error:
        warnings.warn(
            f"the solver python-mip cannot be used ({type(error).__name__}: {error}); neurons are placed "
            "greedily instead. To get the best placement: pip install mip",
            stacklevel=3,
        )
        return greedy
    solved = _choose_optimally(program, items, capacity, time_limit_s)
    if solved is None:
        return greedy
    values = np.array([item.value for item in items])
    bound = min(solved.bound, greedy.bound)
    if solved.status == "feasible" and values @ solved.hot < values @ greedy.hot:
        return greedy._replace(bound=bound)
    return solved._replace(bound=bound)


def _choose_greedily(items: Sequence[_Item], capacity: int) -> _Choice:
    """Takes items by frequency per neuron while they fit; bounded by the program without C.

    Leaders come first: no item of their layer is denser, and the sort is stable. With fractions of
    items, and without C, this order is optimal, so its value bounds the program.
    """
    hot = np.zeros(len(items), bool)
    led = set()
    left = fraction_left = capacity
    bound = 0.0
    for i in sorted(range(len(items)), key=lambda i: -items[i].value / items[i].size):
        item = items[i]
        bound += item.value * min(1.0, fraction_left / item.size)
        fraction_left = max(0, fraction_left - item.size)
        if item.size <= left and (item.leads or item.layer in led):
            hot[i] = True
            led.add(item.layer)
            left -= item.size
    return _Choice(hot, "greedy", bound)


def _choose_optimally(
    program: Any, items: Sequence[_Item], capacity: int, time_limit_s: float
) -> _Choice | None:
    """Solves the integer program; None when no solution was found in time.

    The leading item's variable is the paper's y_l, so that equation 7 is in its size, and equation 8
    becomes: the other hot items of the layer <= their number * y_l.
    """
    import mip

    program.verbose = 0
    program.threads = 1  # more threads make the answer depend on timing
    program.seed = _SEED
    program.max_mip_gap = _MIP_GAP
    is_hot = [program.add_var(var_type=mip.BINARY, obj=item.value) for item in items]
    # In units of the groups: a left-over part of a group would loosen the bound and stall the search.
    unit = math.gcd(*(item.size for item in items))
    used: Any = mip.xsum(item.size // unit * x for item, x in zip(items, is_hot, strict=True))
    program += used <= capacity // unit
    starts = [i for i, item in enumerate(items) if item.leads]
    for start, stop in zip(starts, [*starts[1:], len(items)], strict=True):
        program += mip.xsum(is_hot[start + 1 : stop]) <= (stop - start - 1) * is_hot[start]

    outcome = program.optimize(max_seconds=time_limit_s)
    if outcome not in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
        return None
    hot = np.array([x.x > 0.5 for x in is_hot])
    status = "optimal" if outcome == mip.OptimizationStatus.OPTIMAL else "feasible"
    return _Choice(hot, status, program.objective_bound)


def _make_masks(
    items: Sequence[_Item], hot: np.ndarray, orders: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    masks = tuple(np.zeros(order.size, bool) for order in orders)
    for item, is_hot in zip(items, hot, strict=True):
        masks[item.layer][orders[item.layer][item.first : item.last]] = is_hot
    return masks


def _check_answer(hot_mask: Sequence[np.ndarray], minimum: int, hot_bytes: int, device_bytes: int) -> None:
    """Re-checks the constraints in integers: solvers work with tolerances, and have bugs."""
    if hot_bytes > device_bytes:
        raise RuntimeError(f"the placement takes {hot_bytes} bytes of {device_bytes}; please report this")
    for layer, mask in enumerate(hot_mask):
        num_hot = int(mask.sum())
        if 0 < num_hot < minimum:
            raise RuntimeError(
                f"the placement gives layer {layer} {num_hot} hot neurons, fewer than the {minimum} that pay "
                "for a join; please report this"
            )


def _check_host(cold_bytes: int, hardware: HardwareSpec, device_bytes: int) -> None:
    if cold_bytes > hardware.host_bytes:
        raise ValueError(
            f"hardware {hardware.name!r}: host_bytes: the cold neurons need {cold_bytes} bytes, the host has "
            f"{hardware.host_bytes}; raise device_bytes ({device_bytes}) or use a smaller dtype"
        )


def _check_settings(hardware: HardwareSpec, device_bytes: int, group_size: int, time_limit_s: float) -> None:
    if not 0 <= device_bytes <= hardware.device_bytes or device_bytes != int(device_bytes):
        raise ValueError(
            f"device_bytes: expected whole bytes from 0 to the {hardware.device_bytes} of hardware "
            f"{hardware.name!r}, got {device_bytes!r}; leave room for the rest of the model"
        )
    if group_size < 1 or group_size != int(group_size):
        raise ValueError(f"group_size: expected a whole number >= 1, got {group_size!r}; the default is 64")
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise ValueError(f"time_limit_s: expected a finite number of seconds > 0, got {time_limit_s!r}")


def _check_stats(stats: ActivationStats, config: ModelConfig) -> None:
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
