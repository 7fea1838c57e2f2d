"""Speeds and sizes of a device and its host: measured on this machine, or named presets.

The placement weighs a neuron's bytes against these numbers, so each is a rate that pjax itself gets,
not a rate from a data sheet, where the machine is at hand.
"""

import dataclasses
import os
import statistics
import time
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pjax import ops
from pjax.base import HardwareSpec
from pjax.formats import expand_path
from pjax.placement import check_hardware
from pjax.weights import Ffn

_GB = 10**9  # as in data sheets; a card has a little more

# Rows of 2 to 8 KB are read at 0.87 to 0.94 of the streaming rate by pjax's kernels.
_GATHER_SHARE = 0.9

# The paper profiles T_sync and does not print it. These are estimates for CUDA over PCIe: a launch
# takes some 5 us; a join is two small copies and waking a host thread, some 20 us together.
_CUDA_LAUNCH_S = 5e-6
_PCIE_SYNC_S = 20e-6

_PRESETS = {
    spec.name: spec
    for spec in (
        # PC-High of the paper (section 8.1): 67.2 GB/s host memory; RTX 4090: 24 GB at 1008 GB/s.
        HardwareSpec(
            name="rtx4090-i9-13900k",
            source="preset",
            device_bytes=24 * _GB,
            host_bytes=192 * _GB,
            device_bytes_per_s=1008e9,
            host_bytes_per_s=67.2e9,
            host_gather_bytes_per_s=_GATHER_SHARE * 67.2e9,
            launch_s=_CUDA_LAUNCH_S,
            sync_s=_PCIE_SYNC_S,
        ),
        # PC-Low of the paper: 38.4 GB/s host memory; RTX 2080 Ti: 11 GB at 616 GB/s.
        HardwareSpec(
            name="rtx2080ti-i7-12700k",
            source="preset",
            device_bytes=11 * _GB,
            host_bytes=64 * _GB,
            device_bytes_per_s=616e9,
            host_bytes_per_s=38.4e9,
            host_gather_bytes_per_s=_GATHER_SHARE * 38.4e9,
            launch_s=_CUDA_LAUNCH_S,
            sync_s=_PCIE_SYNC_S,
        ),
        # NVIDIA's data sheets: H200 with 141 GB at 4.8 TB/s; DGX H200 with 2 TB of host memory, of
        # which one socket reads its half over eight channels of DDR5-4800, 307.2 GB/s.
        HardwareSpec(
            name="h200",
            source="preset",
            device_bytes=141 * _GB,
            host_bytes=1000 * _GB,
            device_bytes_per_s=4.8e12,
            host_bytes_per_s=307.2e9,
            host_gather_bytes_per_s=_GATHER_SHARE * 307.2e9,
            launch_s=_CUDA_LAUNCH_S,
            sync_s=_PCIE_SYNC_S,
        ),
        # A two-core machine and an imagined device ten times as fast, so near that a join is cheap:
        # small models, on which real join costs would leave every layer cold, get both kinds of
        # neurons.
        HardwareSpec(
            name="demo",
            source="simulated",
            device_bytes=8 * _GB,
            host_bytes=16 * _GB,
            device_bytes_per_s=300e9,
            host_bytes_per_s=30e9,
            host_gather_bytes_per_s=_GATHER_SHARE * 30e9,
            launch_s=1e-6,
            sync_s=2e-6,
        ),
    )
}

# Larger than the last-level cache of nearly every machine, and read in well under a second.
_STREAM_BYTES = 512 * 2**20
# A layer of such rows is 256 MB; each pass reads another tenth of it, so that no pass finds in the
# cache what an earlier one left there.
_GATHER_NEURONS, _GATHER_MODEL, _GATHER_PASSES = 32768, 2048, 10
_JOIN_WIDTH = 4096  # residual width of a 7B model; the cost is latency, whatever the width
_STREAM_REPEATS, _LATENCY_REPEATS = 5, 50


def hardware_preset(name: str) -> HardwareSpec:
    """A machine by name: "rtx4090-i9-13900k", "rtx2080ti-i7-12700k", "h200" or "demo".

    The first two are PC-High and PC-Low of PowerInfer (Song et al., SOSP 2024, section 8.1); their
    memories and bandwidths are published, their costs of launching and joining are estimates.
    "demo" is a simulated device ten times as fast as a small host.

    Raises:
        ValueError: if there is no such preset.
    """
    if name not in _PRESETS:
        raise ValueError(
            f"name: expected one of {', '.join(_PRESETS)}, got {name!r}; or measure this machine with "
            "measure_hardware(), or describe one in a .toml file"
        )
    return _PRESETS[name]


def read_hardware(path: str | os.PathLike) -> HardwareSpec:
    """A machine described by hand in a TOML file: every field of `HardwareSpec`, and nothing else.

        name = "laptop"
        source = "simulated"                # or "measured", elsewhere; "preset" for a data sheet
        device_bytes = 8_000_000_000
        host_bytes = 16_000_000_000
        device_bytes_per_s = 300e9
        host_bytes_per_s = 30e9
        host_gather_bytes_per_s = 27e9
        launch_s = 5e-6
        sync_s = 20e-6

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder or not TOML, or a field is missing, unknown, of the wrong type or makes no
            sense.
    """
    path = expand_path(path)
    try:
        values = tomllib.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"hardware: there is no file {path}") from error
    except OSError as error:
        raise ValueError(f"{path}: expected a TOML file, cannot read it: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: expected a TOML file, {error}") from error
    hints = typing.get_type_hints(HardwareSpec)
    if values.keys() != hints.keys():
        odd = ", ".join(sorted(values.keys() ^ hints.keys()))
        raise ValueError(
            f"{path}: expected the fields {', '.join(hints)}, each once; missing or unknown: {odd}"
        )
    for name, kind in hints.items():
        value, sources = values[name], typing.get_args(kind)
        if kind in (int, float):
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        else:
            fits = value in sources if sources else isinstance(value, str)
        if not fits:
            expected = " or ".join(sources) if sources else "text" if kind is str else "a number"
            raise ValueError(f"{path}: {name}: expected {expected}, got {value!r}")
    hardware = HardwareSpec(**values)
    check_hardware(hardware)
    return dataclasses.replace(
        hardware, device_bytes=int(hardware.device_bytes), host_bytes=int(hardware.host_bytes)
    )


def find_hardware(name: str) -> HardwareSpec:
    """A machine by the name of its preset or of its .toml file.

    Raises:
        ValueError, FileNotFoundError: as of `hardware_preset` and `read_hardware`.
    """
    return read_hardware(name) if name.endswith(".toml") else hardware_preset(name)


def measure_hardware() -> HardwareSpec:
    """Measures JAX's default device and the host, in a few seconds; every rate and time is a median.

    Memory is what is free now. Without an accelerator the device is the host: it then has the host's memory
    and reads rows as fast as the host does, so that a placement finds nothing worth moving.

    Raises:
        ValueError: if JAX has no CPU backend, or a measured number makes no sense.
    """
    device, host = jax.devices()[0], _host_device()
    has_accelerator = device.platform != "cpu"
    host_bytes = _free_host_bytes()
    gather_bytes_per_s = _measure_gather(host)
    memory = (device.memory_stats() or {}) if has_accelerator else {}
    hardware = HardwareSpec(
        name=f"{device.device_kind}, {os.cpu_count()} host cores",
        source="measured",
        device_bytes=memory["bytes_limit"] - memory["bytes_in_use"] if memory else host_bytes,
        host_bytes=host_bytes,
        device_bytes_per_s=_measure_stream(device) if has_accelerator else gather_bytes_per_s,
        host_bytes_per_s=_measure_stream(host),
        host_gather_bytes_per_s=gather_bytes_per_s,
        launch_s=_measure_launch(device),
        sync_s=_measure_sync(device, host),
    )
    check_hardware(hardware)
    return hardware


def _host_device() -> jax.Device:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "JAX_PLATFORMS: expected the CPU among JAX's platforms, since it computes the cold neurons; "
            f"set JAX_PLATFORMS=cuda,cpu ({error})"
        ) from error


def _free_host_bytes() -> int:
    """Memory that programs can still get, caches that the system would give up included."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _measure_stream(device: jax.Device) -> float:
    """Bytes per second of reading one large array in order."""
    array = jnp.ones(_STREAM_BYTES // 4, jnp.float32, device=device)
    stream_sum = jax.jit(ops.stream_sum)
    return array.nbytes / _median_s(lambda _: stream_sum(array), _STREAM_REPEATS)


def _measure_gather(host: jax.Device) -> float:
    """Bytes per second of the rows of a tenth of a layer's neurons, read by the sparse FFN."""
    rows = jnp.ones((_GATHER_NEURONS, _GATHER_MODEL), jnp.bfloat16, device=host)
    ffn = Ffn(gate=None, up=rows, down=rows + 1, gate_bias=None, up_bias=None)  # + 1: other memory
    x = jnp.ones(_GATHER_MODEL, jnp.float32, device=host)
    turns = np.random.default_rng(0).permutation(_GATHER_NEURONS) % _GATHER_PASSES
    masks = [jax.device_put(turns == turn, host) for turn in range(_GATHER_PASSES)]
    sparse_ffn = jax.jit(lambda x, ffn, mask: ops.sparse_ffn(x, ffn, mask, activation="relu"))
    # Both rows of every masked neuron are read: with all weights positive none stays closed.
    num_bytes = ffn.neuron_bytes * _GATHER_NEURONS / _GATHER_PASSES
    return num_bytes / _median_s(lambda i: sparse_ffn(x, ffn, masks[i]), _GATHER_PASSES)


def _measure_launch(device: jax.Device) -> float:
    """Seconds from starting one trivial program to its end."""
    x = jnp.zeros((), jnp.float32, device=device)
    increment = jax.jit(lambda x: x + 1.0)
    return _median_s(lambda _: increment(x), _LATENCY_REPEATS)


def _measure_sync(device: jax.Device, host: jax.Device) -> float:
    """Seconds of sending a residual to the host, receiving one back, and adding it."""
    x = jnp.zeros(_JOIN_WIDTH, jnp.float32, device=device)
    add = jax.jit(jnp.add)

    def join(_):
        return add(x, jax.device_put(jax.device_put(x, host), device))

    return _median_s(join, _LATENCY_REPEATS)


def _median_s(run: Callable[[int], jax.Array], repeats: int) -> float:
    """Median seconds of `run(i)` for i below `repeats`, after one call that compiles."""
    run(0).block_until_ready()
    samples_s = []
    for i in range(repeats):
        start_s = time.perf_counter()
        run(i).block_until_ready()
        samples_s.append(time.perf_counter() - start_s)
    return statistics.median(samples_s)
