"""Measures whether the two halves of a split step really run at the same time."""

import queue
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pjax.base import DecodeState, SampleFn
from pjax.executor.two_programs import Joined, TwoPrograms, embed_program

REPEATS = 31
"""Of each half and of the whole step, in turn; the medians count."""


class LayerTimes(NamedTuple):
    """When a layer's halves worked, in seconds from the start of the step.

    Attributes:
        start_s: the FFN input was ready on the device.
        device_end_s: the hot half was ready.
        host_end_s: the cold half was ready.
    """

    start_s: float
    device_end_s: float
    host_end_s: float


class Overlap(NamedTuple):
    """How a split step compares with its halves.

    Attributes:
        step_s: the whole step.
        device_s: the device's programs alone, attention included.
        host_s: the host's programs alone.
        timeline: one entry a layer, of one step.
    """

    step_s: float
    device_s: float
    host_s: float
    timeline: tuple[LayerTimes, ...]


def measure_overlap(executor: TwoPrograms, state: DecodeState, sample_fn: SampleFn) -> Overlap:
    """Times steps that continue `state` (which is used up), and their halves alone.

    Args:
        executor: the split decoder.
        state: after a prefill, with room for `2 * REPEATS + 2` more tokens.
        sample_fn: as for the steps before.
    """
    state = jax.block_until_ready(executor.step(state, sample_fn=sample_fn))
    times: dict[str, list[float]] = {"step": [], "device": [], "host": []}
    timeline, inputs = _watch(executor, _copy(state))
    for _ in range(REPEATS):
        start = time.perf_counter()
        state = executor.step(state, sample_fn=sample_fn)
        np.asarray(state.ids)
        times["step"].append(time.perf_counter() - start)
        caches = _copy(state.caches)
        start = time.perf_counter()
        jax.block_until_ready(_device_half(executor, state, caches))
        times["device"].append(time.perf_counter() - start)
        start = time.perf_counter()
        jax.block_until_ready(_host_half(executor, inputs))
        times["host"].append(time.perf_counter() - start)
    medians = {name: float(np.median(samples)) for name, samples in times.items()}
    return Overlap(medians["step"], medians["device"], medians["host"], timeline)


def _copy(tree: Any) -> Any:
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def _device_half(executor: TwoPrograms, state: DecodeState, caches) -> Any:
    residual, positions = embed_program(executor._spec, executor._leaves, state.ids, state.lengths)
    joined = None
    for layer, cache in zip(executor._layers, caches, strict=True):
        x, residual, _, hot_mask, _ = executor._attend(
            layer, residual, joined, positions, cache, executor.mode
        )
        hot, _ = executor._hot(layer, x, hot_mask, executor.mode)
        # Any array of that shape, in the place of what the host would send.
        joined = Joined(hot, hot if layer.cold.neurons else None)
    return joined


def _host_half(executor: TwoPrograms, inputs: list[Any]) -> Any:
    return [
        executor._cold(layer, host_input[0], host_input[1], executor.mode)
        for layer, host_input in zip(executor._layers, inputs, strict=True)
        if host_input is not None
    ]


def _watch(executor: TwoPrograms, state: DecodeState) -> tuple[tuple[LayerTimes, ...], list[Any]]:
    """Runs one step's layers while three threads note when each array becomes ready.

    Returns:
        (the times, what the host got in each layer, None where it has no neurons)
    """
    queues: dict[str, queue.SimpleQueue] = {name: queue.SimpleQueue() for name in ("input", "hot", "cold")}
    ready: dict[str, list[float]] = {name: [] for name in queues}
    inputs: list[Any] = []
    start = time.perf_counter()

    def note(name: str) -> None:
        for _ in executor._layers:
            jax.block_until_ready(queues[name].get())
            ready[name].append(time.perf_counter() - start)

    def watch_fn(name: str, arrays: Any) -> None:
        (inputs.append if name == "host_input" else queues[name].put)(arrays)

    threads = [threading.Thread(target=note, args=(name,)) for name in queues]
    for thread in threads:
        thread.start()
    executor._run(state.ids, state.lengths, state.caches, executor.mode, watch_fn)
    for thread in threads:
        thread.join()
    return tuple(map(LayerTimes, ready["input"], ready["hot"], ready["cold"])), inputs
