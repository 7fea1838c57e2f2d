"""How fast are the CPU operators, measured against the memory's own speed and against XLA's dense FFN?

Weights and masks are random (synthetic): only time is measured.

    python -m experiments.kernel_speed [--quick] [--output=kernel_speed.json]

Every call reads other weights, and between two calls more memory than the last cache holds is streamed:
that empties the cache, and its own time is the machine's bandwidth at that moment. A share is the median
of the ratios of each call to the streams right before and after it. `vs XLA` is the time of the dense
float32 FFN in XLA divided by the row's time, for the rows that compute a whole FFN.
"""

import csv
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pjax import ops
from pjax.weights import Ffn

_QUICK = flags.DEFINE_bool("quick", False, "A smaller shape and fewer repeats: seconds instead of minutes.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the table to this .csv or .json file too.")
_REPEATS = flags.DEFINE_integer("repeats", 15, "Timed calls for each row.", lower_bound=3)

# Larger than the last cache of the machines this was run on (300 MB): a stream of it empties the cache.
FLUSH_BYTES = 512 << 20

# Weights of which no call finds anything in the cache even without the flush.
ROTATED_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what ran.
        time_us: median wall time of a call.
        bytes_per_s: weights read divided by the time.
        stream_share: that rate divided by the stream's, median over the calls.
        vs_xla: XLA's dense float32 FFN time divided by this one's; None where the row is no FFN.
    """

    name: str
    time_us: float
    bytes_per_s: float
    stream_share: float
    vs_xla: float | None = None


def time_call(fn: Callable[[], Any]) -> float:
    """Wall seconds of one call, until its result is there."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def measure(
    name: str, calls: list[Callable[[], Any]], num_bytes: list[float], flush: jax.Array, repeats: int
) -> Row:
    """Times `calls` in turn, each between two streams.

    Args:
        name: for the table.
        calls: the same computation on different data.
        num_bytes: weights that each call reads.
        flush: what is streamed in between.
        repeats: number of timed calls.
    """
    stream = functools.partial(ops.stream_sum, flush)
    for call in calls:
        jax.block_until_ready(call())
    streams = [time_call(stream), time_call(stream)]
    times, shares, rates = [], [], []
    for i in range(repeats):
        times.append(time_call(calls[i % len(calls)]))
        streams.append(time_call(stream))
        rates.append(num_bytes[i % len(calls)] / times[-1])
        shares.append(rates[-1] / (2 * flush.nbytes / (streams[-2] + streams[-1])))
    median = statistics.median
    return Row(name, median(times) * 1e6, median(rates), median(shares))


def make_ffn(seed: int, neurons: int, model: int, dtype: Any, open_bias: float) -> Ffn:
    """Random weights whose gate products have mean `open_bias` and deviation 1 for a normal x."""
    bits = np.random.default_rng(seed).standard_normal((neurons, model), np.float32) / np.float32(model**0.5)
    # One random matrix, rotated, is as good as three: no row meets itself.
    parts = [jnp.asarray(np.roll(bits, shift, axis=0)).astype(dtype) for shift in (0, 1, 2)]
    return Ffn(*parts, gate_bias=jnp.full((neurons,), open_bias, jnp.float32))


def sparse_rows(neurons: int, model: int, density: float, flush: jax.Array, repeats: int) -> list[Row]:
    """The sparse, exact and dense modes of the bfloat16 kernel, and the mat-vec."""
    row_bytes = 2 * model
    copies = max(2, -(-ROTATED_BYTES // (3 * neurons * row_bytes)))
    ffns = [make_ffn(i, neurons, model, jnp.bfloat16, 0.0) for i in range(copies)]
    rng = np.random.default_rng(0)
    num_calls = 4 * copies
    xs = [jnp.asarray(rng.standard_normal(model), jnp.float32) for _ in range(num_calls)]
    masks = [jnp.asarray(rng.random(neurons) < density) for _ in range(num_calls)]
    # Opens the gates of `density` of the neurons in exact mode.
    closing = statistics.NormalDist().inv_cdf(density)
    sparse = jax.jit(functools.partial(ops.sparse_ffn_counted, activation="relu"))
    dense = jax.jit(functools.partial(ops.dense_ffn, activation="relu"))
    matvec = jax.jit(ops.matvec)

    def case(name: str, bias: float, masked: bool) -> Row:
        biased = [dataclasses.replace(f, gate_bias=jnp.full((neurons,), bias, jnp.float32)) for f in ffns]
        args = [(xs[i], biased[i % copies], masks[i] if masked else None) for i in range(num_calls)]
        counts = [sparse(*arg)[1] for arg in args]
        num_bytes = [(int(c.predicted) + 2 * int(c.computed)) * row_bytes for c in counts]
        return measure(name, [functools.partial(sparse, *arg) for arg in args], num_bytes, flush, repeats)

    percent = f"{density:.0%}"
    ffn_bytes = 3 * neurons * row_bytes
    dense_calls = [functools.partial(dense, xs[i], ffns[i % copies]) for i in range(num_calls)]
    matvec_calls = [functools.partial(matvec, xs[i], ffns[i % copies].up) for i in range(num_calls)]
    return [
        case(f"sparse_ffn bf16, mask {percent}, all open", 10.0, True),
        case(f"sparse_ffn bf16, mask {percent}, half open", 0.0, True),
        case(f"sparse_ffn bf16, exact, {percent} open", closing, False),
        measure("dense_ffn bf16, kernel", dense_calls, [ffn_bytes] * num_calls, flush, repeats),
        measure("matvec bf16 [neurons, model]", matvec_calls, [ffn_bytes / 3] * num_calls, flush, repeats),
    ]


def xla_row(neurons: int, model: int, flush: jax.Array, repeats: int) -> Row:
    """XLA's own dense FFN in float32."""
    ffns = [make_ffn(i, neurons, model, jnp.float32, 0.0) for i in range(2)]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, model)), jnp.float32)
    dense = jax.jit(functools.partial(ops.dense_ffn, activation="relu", implementation="reference"))
    calls = [functools.partial(dense, x, ffn) for ffn in ffns]
    return measure("dense FFN f32, XLA", calls, [3 * neurons * 4 * model] * 2, flush, repeats)


def stream_row(flush: jax.Array, repeats: int) -> Row:
    """The denominator: one array, read once by all threads."""
    times = [time_call(lambda: ops.stream_sum(flush)) for _ in range(repeats + 1)][1:]
    median = statistics.median(times)
    return Row("stream_sum", median * 1e6, flush.nbytes / median, 1.0)


def print_table(rows: list[Row]) -> None:
    """Writes the table to stdout."""
    print(f"{'':42}{'us':>10}{'GB/s':>8}{'stream':>8}{'vs XLA':>8}")
    for row in rows:
        versus = "" if row.vs_xla is None else f"{row.vs_xla:.1f}x"
        print(
            f"{row.name:42}{row.time_us:10.1f}{row.bytes_per_s / 1e9:8.1f}{row.stream_share:8.0%}{versus:>8}"
        )


def write_table(rows: list[Row], path: str) -> None:
    """Writes the table to a .csv or .json file."""
    records = [dataclasses.asdict(row) for row in rows]
    with open(path, "w", newline="") as file:
        if path.endswith(".csv"):
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)
        else:
            json.dump(records, file, indent=1)


def main(_: list[str]) -> None:
    """Measures and prints."""
    if _OUTPUT.value is not None and not _OUTPUT.value.endswith((".csv", ".json")):
        raise app.UsageError(f"--output: expected a name ending in .csv or .json, got {_OUTPUT.value!r}.")
    model, neurons = (2048, 5632) if _QUICK.value else (4096, 11008)
    repeats = 5 if _QUICK.value else _REPEATS.value
    print(f"FFN [neurons {neurons}, model {model}], synthetic, {repeats} calls a row", file=sys.stderr)
    flush = jnp.asarray(np.random.default_rng(0).integers(0, 1 << 32, FLUSH_BYTES // 4, np.uint32))
    stream = stream_row(flush, repeats)
    xla = xla_row(neurons, model, flush, repeats)
    rows = sparse_rows(neurons, model, 0.1, flush, repeats)
    ffn_rows = [dataclasses.replace(r, vs_xla=xla.time_us / r.time_us) for r in (xla, *rows[:-1])]
    table = [stream, *ffn_rows, rows[-1]]
    print_table(table)
    if _OUTPUT.value is not None:
        write_table(table, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
