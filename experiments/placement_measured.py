"""Is the order of the policies the predicted one, when a split model really runs?

    PJAX_NUM_THREADS=1 python -m experiments.placement_measured --workdir=runs/quickstart [--slower=200]

The demo model, with its own statistics and predictors, over two emulated CPU devices of one thread each. The
host is slowed by a declared factor: a test implementation reads (and computes) every cold row so many times.
From steps without and with all neurons on the host, and at half the factor, come what a row costs on either
side and what a join costs; `solve_placement` gets these, and each policy's predicted step stands beside the
measured one. Both have the same constant, the step with all neurons on the device, since attention runs in
every policy.
"""

import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import pjax
from experiments.placement_compare import POLICIES, Case, place
from pjax import ops
from pjax.base import HardwareSpec
from pjax.executor import TwoPrograms
from pjax.executor.two_programs import ASYNC_FLOPS
from pjax.placement import neuron_bytes, step_seconds
from pjax.sampling import greedy
from pjax.split import unpack_mask
from pjax.workdir import load, unpack_stats

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Prepared by pjax.run.")
_SLOWER = flags.DEFINE_integer("slower", 200, "How many times the host reads each row.", lower_bound=2)
_SHARE = flags.DEFINE_float("share", 0.4, "Of the neurons that fit on the device.")
_STEPS = flags.DEFINE_integer("steps", 60, "Timed steps of each policy, in turns.")

PROMPT = 'class Stack:\n    """A stack of items."""\n\n    def push(self'


@partial(jax.jit, static_argnames=("times", "activation"))
def slow_cold(cold, x, cold_bits, *, times: int, activation: str):
    """The cold half, `times` times; each reads its input from the one before, so that none is left out."""
    ballast = jnp.sin(jnp.arange(ASYNC_FLOPS, dtype=jnp.float32) * x.reshape(-1)[:1]).sum()
    flat, mask = x.reshape(-1, x.shape[-1]), unpack_mask(cold_bits, cold.neurons).reshape(-1, cold.neurons)

    def again(_, y):
        return ops.sparse_ffn(flat + 0.0 * y, cold, mask, activation=activation)

    y = jax.lax.fori_loop(0, times, again, jnp.zeros_like(flat))
    return y.reshape(x.shape), ballast


class SlowHost(TwoPrograms):
    """`TwoPrograms` whose host reads every row several times."""

    def __init__(self, *args, times: int, **options):
        super().__init__(*args, **options)
        self._times = times

    def _cold(self, layer, x, cold_bits, mode):
        if mode == "dense":  # the prompt
            return super()._cold(layer, x, cold_bits, mode)
        options = {"times": self._times, "activation": self.config.activation}
        return slow_cold(layer.cold, x, cold_bits, **options)[0], None


def step_times(executors: dict[str, SlowHost], ids: np.ndarray, steps: int) -> dict[str, float]:
    """Median seconds of a step of each, in turns."""
    lengths = np.array([len(ids)], np.int32)
    states = {
        name: executor.prefill(ids[None], lengths, capacity=256, sample_fn=greedy, sampler=None)
        for name, executor in executors.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in executors}
    for _ in range(steps + 1):
        for name, executor in executors.items():
            start = time.perf_counter()
            states[name] = executor.step(states[name], sample_fn=greedy)
            np.asarray(states[name].ids)
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in samples.items()}  # the first compiles


def main(argv: list[str]) -> None:
    """Calibrates, places, measures and prints."""
    del argv
    jax.config.update("jax_num_cpu_devices", 2)
    if os.environ.get("PJAX_NUM_THREADS") != "1":
        sys.exit("set PJAX_NUM_THREADS=1: each of the two emulated devices is to have one thread")
    llm, profile = pjax.LLM(_WORKDIR.value), load(Path(_WORKDIR.value), "profile", None)
    if profile is None or llm.tokenizer is None:
        sys.exit(f"--workdir: {_WORKDIR.value} lacks a profile or a tokenizer; prepare it with pjax.run")
    stats = unpack_stats(profile)
    config, (host, device) = llm.model.config, jax.devices()[:2]
    ids = np.asarray(llm.tokenizer.encode(PROMPT), np.int32)

    def split(masks, times: int) -> SlowHost:
        options = {"mode": "predicted", "predictors": llm.predictors, "device": device, "host": host}
        return SlowHost(llm.model, masks, times=times, **options)

    slower, dtype = _SLOWER.value, llm.model.layers[0].ffn.weights.format
    whole = tuple(np.ones(width, bool) for width in config.neurons)
    cold = tuple(~mask for mask in whole)
    ends = {"hot": split(whole, 1), "cold": split(cold, slower), "half": split(cold, slower // 2)}
    measured = step_times(ends, ids, _STEPS.value)
    size, rows = neuron_bytes(config, dtype), sum(float(f.sum()) for f in stats.frequencies)
    read_s = (measured["cold"] - measured["half"]) / (slower - slower // 2) / rows
    join_s = (measured["cold"] - slower * read_s * rows - measured["hot"]) / config.layers
    machine = HardwareSpec(
        name=f"host {slower} times as slow", source="measured", device_bytes=2**40, host_bytes=2**40,
        device_bytes_per_s=size / read_s, host_bytes_per_s=size / read_s / slower,
        host_gather_bytes_per_s=size / read_s / slower, launch_s=0.0, sync_s=max(0.0, join_s),
    )  # fmt: skip
    print(
        f"a row: {1e6 * read_s:.3f} us on the device, {slower} times that on the host; "
        f"a join: {1e6 * join_s:.0f} us"
    )
    case = Case("measured", stats, config, machine, dtype, int(_SHARE.value * size * sum(config.neurons)))
    placed = {policy: place(policy, case)[0] for policy in POLICIES}
    times = step_times({policy: split(masks, slower) for policy, masks in placed.items()}, ids, _STEPS.value)
    constant = measured["hot"] - step_seconds(stats.frequencies, whole, [size] * config.layers, machine)
    print("| policy | predicted ms | measured ms |\n|---|---|---|")
    for policy, masks in placed.items():
        expected = constant + step_seconds(stats.frequencies, masks, [size] * config.layers, machine)
        print(f"| {policy} | {1e3 * expected:.2f} | {1e3 * times[policy]:.2f} |")


if __name__ == "__main__":
    app.run(main)
