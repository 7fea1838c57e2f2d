"""Measures whether the two halves of a split step really run at the same time."""

import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pjax.base import DecodeState, SampleFn
from pjax.executor.two_programs import Joined, LayerArrays, TwoPrograms, embed_program

REPEATS = 15
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
    timeline, arrays = _watch(executor, _copy(state))
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
        jax.block_until_ready(_host_half(executor, arrays))
        times["host"].append(time.perf_counter() - start)
    medians = {name: float(np.median(samples)) for name, samples in times.items()}
    return Overlap(medians["step"], medians["device"], medians["host"], timeline)


def _copy(tree: Any) -> Any:
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def _device_half(executor: TwoPrograms, state: DecodeState, caches) -> Any:
    ids, positions = state.ids[:, None], state.lengths[:, None]
    residual, joined = embed_program(executor._graphdef, executor._state, ids, positions), None
    for layer, cache in zip(executor._layers, caches, strict=True):
        x, residual, _, hot_mask, _ = executor._attend(
            layer, residual, joined, positions, cache, executor.mode
        )
        hot, _ = executor._hot(layer, x, hot_mask, executor.mode)
        joined = Joined(hot, jnp.zeros_like(hot))
    return joined


def _host_half(executor: TwoPrograms, arrays: list[LayerArrays]) -> Any:
    return [
        executor._cold(layer, known.x_host, known.cold_bits, executor.mode)
        for layer, known in zip(executor._layers, arrays, strict=True)
    ]


def _watch(executor: TwoPrograms, state: DecodeState) -> tuple[tuple[LayerTimes, ...], list[LayerArrays]]:
    """Runs one step's layers while two threads note when each array becomes ready."""
    arrays: list[LayerArrays] = []
    ends: dict[str, list[float]] = {}
    start = time.perf_counter()

    def note(name: str) -> None:
        ends[name] = []
        for i in range(len(executor._layers)):
            while len(arrays) <= i:
                time.sleep(0)
            jax.block_until_ready(getattr(arrays[i], name))
            ends[name].append(time.perf_counter() - start)

    threads = [threading.Thread(target=note, args=(name,)) for name in ("x", "hot", "cold")]
    for thread in threads:
        thread.start()
    executor._run(state.ids[:, None], state.lengths[:, None], state.caches, executor.mode, arrays)
    for thread in threads:
        thread.join()
    return tuple(
        LayerTimes(*moments) for moments in zip(ends["x"], ends["hot"], ends["cold"], strict=True)
    ), arrays
