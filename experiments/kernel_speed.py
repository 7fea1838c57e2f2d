"""How fast is each CPU operator, in each weight type, beside the memory's own speed?

    python -m experiments.kernel_speed --shapes=llama-1b-mha,prosparse-7b --dtypes=bfloat16,q8_0,q4_0

Weights, masks and inputs are random (synthetic): only time is measured. An operator runs over many layers'
weights in one program, as in a decode step, each read once; between two runs more memory than the last
cache holds is streamed. That empties the cache, and its own time is the machine's bandwidth at that moment:
a share is the median, over the runs, of their rate by that of the streams right before and after. Bytes are
those that had to be read: of an FFN the opener's row of every neuron in the mask, and the other rows of
those that opened. Prints a Markdown table; --json prints one object a line instead.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.synthetic import SHAPES, Shape, make_ffn, make_matrix, make_opener
from pjax import ops
from pjax.base import LowRankPredictor, SignPredictor
from pjax.memory import on_large_pages
from pjax.predictor import predict_mask
from pjax.weights import DTYPES, row_bytes

OPERATORS = ("matvec", "sparse_ffn", "exact", "dense_ffn", "predictor", "decode_attention")

_SHAPES = flags.DEFINE_list("shapes", ["llama-1b-mha"], f"Published shapes, of {list(SHAPES)}.")
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16", "q8_0", "q4_0"], f"Weight types, of {list(DTYPES)}.")
_DENSITIES = flags.DEFINE_list("densities", ["0.1"], "Shares of the neurons in the mask.")
_OPERATORS = flags.DEFINE_list("operators", list(OPERATORS), "Operators to time.")
_CONTEXTS = flags.DEFINE_list("contexts", ["512", "4096"], "Tokens in the KV cache.")
_BATCH = flags.DEFINE_integer("batch", 1, "Tokens of a call.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed runs a row.", lower_bound=3)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object a line instead of the table.")
_QUICK = flags.DEFINE_bool("quick", False, "A tiny shape and few runs, to see that it works.")

FLUSH_BYTES = 512 << 20
"""Larger than the last cache of the machines this was run on (300 MB): a stream of it empties the cache."""

LAYERS_BYTES = 2 << 30
"""Weights of one run's layers. Starting a program takes 170 us from cold caches, and 1.4 us more for each of
its arrays: 1 to 2 % of a run of so many bytes."""

MAX_LAYERS = 160
"""A program of more takes too long to compile."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        operator: what runs, and on what.
        dtype: of its weights.
        density: share of the neurons in the mask; None where there is none.
        run: one program over all layers.
        num_calls: layers.
        num_bytes: that `run` has to read.
    """

    operator: str
    dtype: str
    density: float | None
    run: Callable[[], Any]
    num_calls: int
    num_bytes: float


def layers_of(first: Any) -> list[Any]:
    """Weights like `first`, with its rows rolled: as good as random ones, and soon made."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    count = int(np.clip(LAYERS_BYTES // num_bytes, 2, MAX_LAYERS))
    rolled = (jax.tree.map(partial(_rolled, shift), first) for shift in range(1, count))
    return [first, *rolled]


def _rolled(shift: int, leaf: jax.Array) -> jax.Array:
    return on_large_pages(jnp.roll(leaf, shift, 0)) if leaf.ndim else leaf


def over_layers(fn: Callable, x: jax.Array, *args: Any) -> Callable[[], jax.Array]:
    """One program that calls `fn(x, ...)` for each layer's arguments, each after the one before.

    XLA runs calls that do not depend on each other at the same time, and they would share the threads. The
    link is one elementwise sum: what XLA does with a broadcast wakes its own threads, which then spin beside
    the kernels' and take 40 us from each call.
    """

    def program(x: jax.Array, *args: Any) -> jax.Array:
        for layer in zip(*args, strict=True):
            y = fn(x, *layer)
            x = x + 1e-30 * y[:, : x.shape[1]].astype(jnp.float32)
        return x

    return partial(jax.jit(program), x, *args)


def inputs(rng: np.random.Generator, width: int) -> jax.Array:
    """A batch of normal numbers."""
    return jnp.asarray(rng.standard_normal((_BATCH.value, width)), jnp.float32)


def matvec_cases(rng: np.random.Generator, shape: Shape, dtype: str) -> Iterator[Case]:
    """Projections of attention, and those of the width of an FFN."""
    model = shape.config.model
    for rows in (model, shape.config.neurons[0]):
        weights = layers_of(make_matrix(rng, rows, model, dtype))
        num_bytes = len(weights) * rows * row_bytes(dtype, model)
        name = f"matvec [{rows}, {model}]"
        yield Case(
            name, dtype, None, over_layers(ops.matvec, inputs(rng, model), weights), len(weights), num_bytes
        )


def ffn_cases(
    rng: np.random.Generator, shape: Shape, dtype: str, operators: list[str], densities: list[float]
) -> Iterator[Case]:
    """The FFN in all modes; the openers' bias decides which of them open."""
    config, neurons = shape.config, shape.config.neurons[0]
    opener, _ = make_opener(rng, config.model, neurons, shape.rank, 0.0)
    ffns = layers_of(make_ffn(rng, opener, config.gated, dtype))
    x = inputs(rng, config.model)
    row, followers = row_bytes(dtype, config.model), 2 if config.gated else 1

    def case(name: str, density: float, bias: float, masks: list[Any]) -> Case:
        biases = {"gate_bias" if config.gated else "up_bias": jnp.full(neurons, bias, jnp.float32)}
        biased = [dataclasses.replace(ffn, **biases) for ffn in ffns]
        # Counted apart: in the timed program the counts would be small programs beside the next layer's call.
        # With several tokens a row is read once for all: bytes are known for one token only.
        rows = 0.0
        for ffn, mask in zip(biased, masks, strict=True):
            _, counts = ops.sparse_ffn_counted(x, ffn, mask, activation="relu")
            rows += float(counts.predicted.sum() + followers * counts.computed.sum())
        run = over_layers(partial(ops.sparse_ffn, activation="relu"), x, biased, masks)
        return Case(name, dtype, density, run, len(ffns), rows * row)

    for density in densities:
        masks = [jnp.asarray(rng.random((_BATCH.value, neurons)) < density) for _ in ffns]
        if "sparse_ffn" in operators:
            yield case("sparse_ffn, all open", density, 10.0, masks)
            yield case("sparse_ffn, half open", density, 0.0, masks)
        if "exact" in operators:
            closing = statistics.NormalDist().inv_cdf(density)
            yield case("sparse_ffn, exact", density, closing, [None] * len(ffns))
    if "dense_ffn" in operators:
        run = over_layers(partial(ops.dense_ffn, activation="relu"), x, ffns)
        num_bytes = len(ffns) * neurons * (1 + followers) * row
        yield Case("dense_ffn", dtype, None, run, len(ffns), num_bytes)


def predictor_case(rng: np.random.Generator, shape: Shape, dtype: str, rank: int) -> Case:
    """The whole predictor, of that rank."""
    model, neurons = shape.config.model, shape.config.neurons[0]
    first = LowRankPredictor(
        make_matrix(rng, rank, model, dtype),
        make_matrix(rng, neurons, rank, dtype),
        jnp.zeros(neurons),
        jnp.float32(0),
    )
    predictors = layers_of(first)
    num_bytes = len(predictors) * (rank * row_bytes(dtype, model) + neurons * row_bytes(dtype, rank))
    run = over_layers(lambda x, predictor: predict_mask(predictor, x, x), inputs(rng, model), predictors)
    return Case(f"predictor, rank {rank}", dtype, None, run, len(predictors), num_bytes)


def sign_case(rng: np.random.Generator, shape: Shape) -> Case:
    """The whole predictor of signs."""
    model, neurons = shape.config.model, shape.config.neurons[0]
    bits = jnp.asarray(rng.integers(0, 1 << 32, (neurons, -(-model // 32)), np.uint32))
    first = SignPredictor(bits, jnp.float32(1), jnp.zeros(neurons), jnp.float32(0))
    predictors = layers_of(first)
    run = over_layers(lambda x, predictor: predict_mask(predictor, x, x), inputs(rng, model), predictors)
    return Case("predictor, signs", "1 bit", None, run, len(predictors), len(predictors) * first.nbytes)


def attention_case(rng: np.random.Generator, shape: Shape, dtype: str, context: int) -> Case:
    """Decode attention over a full cache of `context` tokens."""
    config, batch = shape.config, _BATCH.value
    dtype_bytes = 2 if dtype == "bfloat16" else 4
    slot_bytes = 2 * config.kv_heads * context * config.head_dim * dtype_bytes
    num_calls = int(np.clip(LAYERS_BYTES // (slot_bytes * batch), 2, MAX_LAYERS))
    rows = (num_calls * batch, config.kv_heads, context, config.head_dim)
    one_and_a_half = (0x3FC0, jnp.uint16) if dtype_bytes == 2 else (1.5, jnp.float32)
    caches = [jnp.full(rows, *one_and_a_half) for _ in range(2)]
    q, kv = (jnp.ones((batch, heads, config.head_dim)) for heads in (config.heads, config.kv_heads))
    positions = jnp.full((batch,), context - 1, jnp.int32)

    @partial(jax.jit, donate_argnums=0)
    def program(caches: list[jax.Array], q, kv, positions):
        for i in range(num_calls):
            y, *caches = ops.decode_attention(q, kv, kv, *caches, positions, first_slot=i * batch)
            q = q + 1e-30 * y[:, None, :1]
        return caches, q

    def run() -> Any:
        caches[:], y = program(list(caches), q, kv, positions)
        return y

    num_bytes = num_calls * batch * slot_bytes
    return Case(f"decode_attention, {context} tokens", dtype, None, run, num_calls, num_bytes)


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of a run, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def measure(case: Case, flush: jax.Array, repeats: int) -> dict[str, Any]:
    """Times the case, each run between two streams."""
    stream = partial(ops.stream_sum, flush)
    jax.block_until_ready(case.run())  # compiles
    streams, times, shares = [seconds(stream), seconds(stream)], [], []
    for _ in range(repeats):
        times.append(seconds(case.run))
        streams.append(seconds(stream))
        around = 2 * flush.nbytes / (streams[-2] + streams[-1])
        shares.append(case.num_bytes / times[-1] / around)
    return {
        "operator": case.operator,
        "dtype": case.dtype,
        "density": case.density,
        "us": statistics.median(times) / case.num_calls * 1e6,
        "gb_per_s": case.num_bytes / statistics.median(times) / 1e9,
        "stream_gb_per_s": flush.nbytes / statistics.median(streams) / 1e9,
        "stream_share": statistics.median(shares) if _BATCH.value == 1 else None,
    }


def cases(shape: Shape) -> Iterator[Case]:
    """All rows of a shape."""
    rng = np.random.default_rng(0)
    operators, densities = _OPERATORS.value, [float(density) for density in _DENSITIES.value]
    for dtype in _DTYPES.value:
        if "matvec" in operators:
            yield from matvec_cases(rng, shape, dtype)
        if {"sparse_ffn", "exact", "dense_ffn"} & set(operators):
            yield from ffn_cases(rng, shape, dtype, operators, densities)
        if "predictor" in operators:
            for rank in (shape.rank // 2, shape.rank):
                yield predictor_case(rng, shape, dtype, rank)
    if "predictor" in operators:
        yield sign_case(rng, shape)
    if "decode_attention" in operators:
        for dtype in ("bfloat16", "float32"):
            for context in map(int, _CONTEXTS.value):
                yield attention_case(rng, shape, dtype, context)


def line(shape: str, record: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    density = "-" if record["density"] is None else f"{record['density']:.0%}"
    share = "-" if record["stream_share"] is None else f"{record['stream_share']:.0%}"
    return (
        f"| {shape} | {record['operator']} | {record['dtype']} | {density} | {record['us']:.1f} "
        f"| {record['gb_per_s']:.1f} | {share} |"
    )


def check_flags() -> None:
    """Raises UsageError for a name that is not known."""
    for flag, known in ((_SHAPES, SHAPES), (_DTYPES, DTYPES), (_OPERATORS, OPERATORS)):
        if wrong := [name for name in flag.value if name not in known]:
            raise app.UsageError(f"--{flag.name}: expected names of {list(known)}, got {wrong}.")


def main(_: list[str]) -> None:
    """Measures and prints."""
    check_flags()
    flush = jnp.asarray(np.random.default_rng(0).integers(0, 1 << 32, FLUSH_BYTES // 4, np.uint32))
    if not _JSON.value:
        print("| shape | operator | type | mask | us | GB/s | % of stream |")
        print("|---|---|---|---|---|---|---|")
    for name in ["tiny"] if _QUICK.value else _SHAPES.value:
        for case in cases(SHAPES[name]):
            record = measure(case, flush, 3 if _QUICK.value else _REPEATS.value)
            print(json.dumps({"shape": name, **record}) if _JSON.value else line(name, record), flush=True)


if __name__ == "__main__":
    app.run(main)
