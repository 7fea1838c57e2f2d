"""How many tokens a second does a whole model decode, and what is the memory's limit?

    python -m experiments.decode_speed --shape=llama-1b-mha --dtype=q4_0 --context=512
    python -m experiments.decode_speed --shape=llama-1b-mha --dtype=bfloat16 --peer=llama_cpp
    python -m experiments.decode_speed --shape=opt-1.3b --dtype=q8_0 --peer=ctranslate2

Weights are synthetic, in the published shape (see experiments/synthetic.py for how sparsity is set and
how the predictors come to find it); in mode "predicted" the predictors run, and their bytes and time
count. The caches are filled to the context with zeros: decoding reads them as any others. The peer comes
with the extra `bench`; CTranslate2 decodes in int8 whatever the type. Modes and the peer take turns,
`--repeats` rounds of `--tokens` tokens each; medians are reported, beside the rate at which this machine
streamed memory in the same rounds. Prints a Markdown table; --json prints one object a line instead.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from experiments.synthetic import SHAPES, make_model
from pjax import ops
from pjax.base import MODES, DecodeState, Mode, Predictors
from pjax.executor import OneProgram
from pjax.generate import cache_capacity
from pjax.model import Decoder
from pjax.model_config import ModelConfig
from pjax.sampling import greedy
from pjax.speed import WARM_UP_TOKENS, bytes_per_token

_SHAPE = flags.DEFINE_enum("shape", "llama-1b-mha", list(SHAPES), "Published shape.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["float32", "bfloat16", "float16", "q8_0", "q4_0"], "Type of all matrices."
)
_MODES = flags.DEFINE_list("modes", list(MODES), "Modes to decode in.")
_DENSITY = flags.DEFINE_float("density", None, "Share of active neurons; default the published one.")
_RANK = flags.DEFINE_integer("rank", None, "Of the predictors; default the shape's.", lower_bound=32)
_CONTEXT = flags.DEFINE_integer("context", 64, "Tokens in the cache.", lower_bound=1)
_THREADS = flags.DEFINE_integer(
    "threads", os.cpu_count() or 1, "Of our kernels and of the peer.", lower_bound=1
)
_PEER = flags.DEFINE_enum(
    "peer", None, ["llama_cpp", "ctranslate2"], "Decode the same shape with a peer, too."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds; medians count.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 16, "Tokens a round.", lower_bound=1)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object a line instead of the table.")
_QUICK = flags.DEFINE_bool("quick", False, "A tiny shape, to see that it runs.")

COLUMNS = (
    "model", "size", "params", "type", "threads", "mode", "density", "test", "t/s", "GB/token", "% of stream",
    "vs peer",
)  # fmt: skip
"""Those of llama-bench, and ours; its tg16 @ d64 are 16 tokens generated behind 64."""

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
    if _RANK.value is not None:
        shape = dataclasses.replace(shape, rank=_RANK.value)
    os.environ["PJAX_NUM_THREADS"] = str(_THREADS.value)  # read when the kernels are first used
    print(f"{shape.config.name} in {_DTYPE.value}: synthetic weights", file=sys.stderr)
    model, predictors = make_model(shape, _DTYPE.value)
    runs, rows = {}, {}
    for mode in _MODES.value:
        executor = OneProgram(model, mode=cast(Mode, mode), predictors=predictors)
        runs[mode], rows[mode] = decoder(executor, _CONTEXT.value, _TOKENS.value)
    runs |= peer(shape.config)
    times = dict(measure(runs, _REPEATS.value, _TOKENS.value))
    stream = statistics.median(times.pop("stream"))
    peer_s = statistics.median(times[_PEER.value]) if _PEER.value else None
    if not _JSON.value:
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for name, samples in times.items():
        counted = rows[name]() if name in rows else None
        record = {
            "shape": shape.config.name,
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))),
            "params": num_parameters(shape.config),
            "dtype": "int8" if name == "ctranslate2" else _DTYPE.value,
            "threads": _THREADS.value,
            "mode": name,
            "context": _CONTEXT.value,
            "tokens": _TOKENS.value,
            "stream_gb_per_s": stream / 1e9,
            "peer_tokens_per_s": peer_s and 1 / peer_s,
            **_figures(name, statistics.median(samples), counted, model, predictors),
        }
        record["ratio"] = peer_s and peer_s * record["tokens_per_s"]
        print(json.dumps(record) if _JSON.value else _line(record))
    print(f"stream {stream / 1e9:.1f} GB/s", file=sys.stderr)


def peer(config: ModelConfig) -> dict[str, Callable[[int], None]]:
    """The peer that was asked for, under its name."""
    if _PEER.value is None:
        return {}
    from experiments import peers  # needs what only the extra `bench` installs

    how = {"context": _CONTEXT.value, "threads": _THREADS.value}
    if _PEER.value == "ctranslate2":
        return {_PEER.value: peers.ctranslate2_decoder(config, **how)}
    return {_PEER.value: peers.llama_cpp_decoder(config, _DTYPE.value, **how)}


def num_parameters(config: ModelConfig) -> int:
    """Numbers in all matrices of a decoder with that config."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim > 1)


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
    read = share = "-"
    if record["gb_per_token"] is not None:
        read = f"{record['gb_per_token']:.3f}"
        share = f"{record['gb_per_s'] / record['stream_gb_per_s']:.0%}"
    cells = (
        record["shape"],
        f"{record['bytes'] / 2**30:.2f} GiB",
        f"{record['params'] / 1e9:.2f} B",
        record["dtype"],
        record["threads"],
        record["mode"],
        f"{record['density']:.1%}",
        f"tg{record['tokens']} @ d{record['context']}",
        f"{record['tokens_per_s']:.1f}",
        read,
        share,
        f"{record['ratio']:.2f}x" if record["ratio"] else "-",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    app.run(main)
