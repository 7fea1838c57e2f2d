"""How many tokens of a prompt does a whole model read in a second?

    python -m experiments.prefill_speed --shape=llama-1b-mha --dtype=q4_0 --peer=llama_cpp

Weights are synthetic, in the published shape (see experiments/synthetic.py); a prompt runs dense in every
mode. The time is that of the whole prompt up to the choice of the next token. Ours and the peer, which
comes with the extra `bench`, take turns for `--repeats` rounds; medians count. FLOP are those of the
matrices, two a weight and token, of the head for one token only. Prints a Markdown table; --json prints
one object a line instead.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags
from flax import nnx

from experiments.synthetic import SHAPES, make_model
from pjax.executor import OneProgram
from pjax.generate import cache_capacity
from pjax.model_config import ModelConfig
from pjax.sampling import greedy
from pjax.weights import DTYPES

_SHAPE = flags.DEFINE_enum("shape", "llama-1b-mha", list(SHAPES), "Published shape.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "Type of all matrices.")
_TOKENS = flags.DEFINE_integer("tokens", 512, "Of the prompt.", lower_bound=1)
_THREADS = flags.DEFINE_integer(
    "threads", os.cpu_count() or 1, "Of our kernels and of the peer.", lower_bound=1
)
_PEER = flags.DEFINE_enum("peer", None, ["llama_cpp"], "Read the same prompt with a peer, too.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds; medians count.", lower_bound=1)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object a line instead of the table.")
_QUICK = flags.DEFINE_bool("quick", False, "A tiny shape, to see that it runs.")

COLUMNS = ("model", "size", "type", "threads", "engine", "test", "t/s", "GFLOP/s", "vs peer")


def prefill(executor: OneProgram, tokens: int) -> Callable[[], None]:
    """A function that reads a prompt."""
    ids, lengths = np.ones((1, tokens), np.int32), np.array([tokens], np.int32)
    options = {"capacity": cache_capacity(tokens + 1), "sample_fn": greedy, "sampler": None}

    def run() -> None:
        jax.block_until_ready(executor.prefill(ids, lengths, **options).ids)

    return run


def flop(config: ModelConfig, tokens: int) -> int:
    """Operations of the matrices for a prompt."""
    attention = 2 * config.model * (config.heads + config.kv_heads) * config.head_dim
    ffn = (3 if config.gated else 2) * config.model * sum(config.neurons)
    return 2 * (tokens * (config.layers * attention + ffn) + config.model * config.vocab)


def measure(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, after one that warms it up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def main(argv):
    """Measures and prints."""
    del argv
    shape, tokens = SHAPES["tiny" if _QUICK.value else _SHAPE.value], _TOKENS.value
    os.environ["PJAX_NUM_THREADS"] = str(_THREADS.value)  # read when the kernels are first used
    print(f"{shape.config.name} in {_DTYPE.value}: synthetic weights", file=sys.stderr)
    model, _ = make_model(shape, _DTYPE.value)
    runs = {"pjax": prefill(OneProgram(model, mode="dense"), tokens)}
    if _PEER.value == "llama_cpp":
        from experiments.peers import llama_cpp_prefill  # needs what only the extra `bench` installs

        runs["llama.cpp"] = llama_cpp_prefill(
            shape.config, _DTYPE.value, tokens=tokens, threads=_THREADS.value
        )
    seconds = measure(runs, _REPEATS.value)
    if not _JSON.value:
        print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for name in runs:
        record = {
            "shape": shape.config.name,
            "gib": sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / 2**30,
            "dtype": _DTYPE.value,
            "threads": _THREADS.value,
            "engine": name,
            "test": f"pp{tokens}",
            "tokens_per_s": tokens / seconds[name],
            "gflop_per_s": flop(shape.config, tokens) / seconds[name] / 1e9,
            "ratio": seconds["llama.cpp"] / seconds[name] if "llama.cpp" in seconds else None,
        }
        print(json.dumps(record) if _JSON.value else _line(record))


def _line(record: dict) -> str:
    fields = (
        record["shape"],
        f"{record['gib']:.2f} GiB",
        record["dtype"],
        record["threads"],
        record["engine"],
        record["test"],
        f"{record['tokens_per_s']:.1f}",
        f"{record['gflop_per_s']:.0f}",
        "-" if record["ratio"] is None else f"{record['ratio']:.2f}x",
    )
    return "| " + " | ".join(map(str, fields)) + " |"


if __name__ == "__main__":
    app.run(main)
