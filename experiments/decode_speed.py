"""How many tokens a second does a whole model decode, and what is the memory's limit?

    python -m experiments.decode_speed --shape=llama-1b-mha --dtype=q4_0 --context=512
    python -m experiments.decode_speed --shape=llama-1b-mha --dtype=bfloat16 --peer=llama_cpp

Weights are synthetic, in the published shape (see experiments/synthetic.py for how sparsity is set and
how the predictors come to find it); in mode "predicted" the predictors run, and their bytes and time
count. The caches are filled to the context with zeros: decoding reads them as any others. The peer comes
with the extra `bench`. Modes and the peer take turns, `--repeats` rounds of `--tokens` tokens each;
medians are reported, beside the rate at which this machine streamed memory in the same rounds. Prints a
Markdown table; --json prints one object a line instead.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from experiments.synthetic import SHAPES, make_model
from pjax import ops
from pjax.base import MODES, DecodeState, Predictors
from pjax.executor import OneProgram
from pjax.generate import cache_capacity
from pjax.model import Decoder
from pjax.sampling import greedy
from pjax.speed import WARM_UP_TOKENS, bytes_per_token

_SHAPE = flags.DEFINE_enum("shape", "llama-1b-mha", list(SHAPES), "Published shape.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["float32", "bfloat16", "float16", "q8_0", "q4_0"], "Type of all matrices."
)
_MODES = flags.DEFINE_list("modes", list(MODES), "Modes to decode in.")
_DENSITY = flags.DEFINE_float("density", None, "Share of active neurons; default the published one.")
_CONTEXT = flags.DEFINE_integer("context", 64, "Tokens in the cache.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 2, "Of the peer; ours are PJAX_NUM_THREADS or all CPUs.")
_PEER = flags.DEFINE_enum("peer", None, ["llama_cpp"], "Decode the same shape and type with a peer, too.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds; medians count.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 16, "Tokens a round.", lower_bound=1)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object a line instead of the table.")
_QUICK = flags.DEFINE_bool("quick", False, "A tiny shape, to see that it runs.")

STREAM_BYTES = 1 << 30
"""More than the last cache of the machines this was run on, so that memory is measured, not the cache."""


def decoder(
    executor: OneProgram, context: int, tokens: int
) -> tuple[Callable[[int], None], Callable[[], np.ndarray]]:
    """A function that decodes some tokens from `context` on, and one that tells the rows per token."""
    prompt = np.zeros((1, 8), np.int32)
    capacity = cache_capacity(context + max(tokens, WARM_UP_TOKENS))
    state = executor.prefill(
        prompt, np.array([8], np.int32), capacity=capacity, sample_fn=greedy, sampler=None
    )
    start = jnp.asarray([context], jnp.int32)
    total = [state._replace(lengths=start), 0]

    def decode(tokens: int) -> None:
        step: DecodeState = total[0]._replace(lengths=jnp.copy(start))
        for _ in range(tokens):
            step = executor.step(step, sample_fn=greedy)
            np.asarray(step.ids)
        total[0], total[1] = step, total[1] + tokens

    return decode, lambda: np.asarray(total[0].rows) / max(total[1], 1)


def stream_rate(data: jax.Array) -> float:
    """Bytes a second of one pass over `data`."""
    start = time.perf_counter()
    jax.block_until_ready(ops.stream_sum(data))
    return data.nbytes / (time.perf_counter() - start)


def measure(runs: dict[str, Callable[[int], None]], repeats: int, tokens: int) -> Iterator[tuple[str, list]]:
    """Seconds a token of each run, and bytes a second of memory, round by round."""
    data = jnp.ones(STREAM_BYTES // 4, jnp.uint32)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    rates = []
    for run in runs.values():
        run(WARM_UP_TOKENS)  # compiles, and fills what can be filled
    stream_rate(data)
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run(tokens)
            seconds[name].append((time.perf_counter() - start) / tokens)
            rates.append(stream_rate(data))
    yield from seconds.items()
    yield "stream", rates


def main(argv):
    """Measures and prints."""
    del argv
    shape = SHAPES["tiny" if _QUICK.value else _SHAPE.value]
    if _DENSITY.value is not None:
        shape = dataclasses.replace(shape, density=_DENSITY.value)
    print(f"{shape.config.name} in {_DTYPE.value}: synthetic weights", file=sys.stderr)
    model, predictors = make_model(shape, _DTYPE.value)
    runs, rows = {}, {}
    for mode in _MODES.value:
        executor = OneProgram(model, mode=mode, predictors=predictors)
        runs[mode], rows[mode] = decoder(executor, _CONTEXT.value, _TOKENS.value)
    if _PEER.value == "llama_cpp":
        from experiments.peers import llama_cpp_decoder  # needs what only the extra `bench` installs

        runs["llama.cpp"] = llama_cpp_decoder(
            shape.config, _DTYPE.value, context=_CONTEXT.value, threads=_THREADS.value
        )
    times = dict(measure(runs, _REPEATS.value, _TOKENS.value))
    stream = statistics.median(times.pop("stream"))
    peer_s = statistics.median(times["llama.cpp"]) if "llama.cpp" in times else None
    if not _JSON.value:
        print("| model | size | type | mode | density | context | t/s | GB/token | % of stream | vs peer |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    for name, samples in times.items():
        counted = rows[name]() if name in rows else None
        record = {
            "shape": shape.config.name,
            "gib": sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / 2**30,
            "dtype": _DTYPE.value,
            "mode": name,
            "context": _CONTEXT.value,
            "stream_gb_per_s": stream / 1e9,
            "peer_tokens_per_s": peer_s and 1 / peer_s,
            **_figures(name, statistics.median(samples), counted, model, predictors),
        }
        record["ratio"] = peer_s and peer_s * record["tokens_per_s"]
        print(json.dumps(record) if _JSON.value else _line(record))
    print(f"stream {stream / 1e9:.1f} GB/s", file=sys.stderr)


def _figures(
    name: str, seconds: float, counted: np.ndarray | None, model: Decoder, predictors: Predictors
) -> dict[str, float | None]:
    """What a run read; unknown of a peer."""
    if counted is None:
        return {"tokens_per_s": 1 / seconds, "density": 1.0, "gb_per_token": None, "gb_per_s": None}
    neurons = sum(model.config.neurons)
    predicted, computed, _ = (neurons,) * 3 if name == "dense" else counted
    used = predictors if name == "predicted" else None
    num_bytes = bytes_per_token(model, (predicted, computed, 0), used, _CONTEXT.value)
    return {
        "tokens_per_s": 1 / seconds,
        "density": float(computed) / neurons,
        "gb_per_token": num_bytes / 1e9,
        "gb_per_s": num_bytes / seconds / 1e9,
    }


def _line(record: dict) -> str:
    read = "- | -"
    if record["gb_per_token"] is not None:
        share = record["gb_per_s"] / record["stream_gb_per_s"]
        read = f"{record['gb_per_token']:.3f} | {share:.0%}"
    ratio = f"{record['ratio']:.2f}x" if record["ratio"] else "-"
    return (
        f"| {record['shape']} | {record['gib']:.2f} GiB | {record['dtype']} | {record['mode']} "
        f"| {record['density']:.1%} | {record['context']} | {record['tokens_per_s']:.1f} | {read} | {ratio} |"
    )


if __name__ == "__main__":
    app.run(main)
