"""Makes a model's predictors: ranks from a sample, weights from a stream, thresholds from held-out tokens."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import nnx

from pjax import ops
from pjax.base import HardwareSpec, Predictor, Predictors, ProgressFn, SayFn, SignPredictor
from pjax.model import Decoder
from pjax.predictor import KINDS, LayerCost, check_widths, fitting_dtype, rank_choices, with_dtype
from pjax.profiler import batches, check_profiled, hot_share, measure_scores, no_progress, observe
from pjax.storage import model_fingerprint
from pjax.thresholds import DEFAULT_RECALL, check_recall, report_at, set_recall
from pjax.training.fit import SignSums, fit_signs, sum_signs
from pjax.training.ranks import RANK_RECALL, Sample, Trial, choose_rank
from pjax.training.streaming import Job, fit_stream
from pjax.weights import BFLOAT16
from pjax.workdir import fingerprint, write_atomically

HELD_OUT = 8
"""One of so many sequences is kept from training, to set the threshold and report recall on."""

SAMPLE_TOKENS = 16384
"""Of the text, for comparing ranks; a quarter as many of the held-out text."""

SAMPLE_BYTES = 4 << 30
"""That the sample may take: 14,000 tokens of a 7B model."""


def train_predictors(
    model: Decoder,
    ids: np.ndarray,
    *,
    recall: float = DEFAULT_RECALL,
    kind: str = "lowrank",
    rank: int | None = None,
    dtype: str = "q4_0",
    every_layer: bool = False,
    hardware: HardwareSpec | None = None,
    seed: int = 0,
    checkpoints: Path | None = None,
    progress_fn: ProgressFn = no_progress,
    say_fn: SayFn = lambda line: None,
) -> Predictors:
    """Makes one predictor a layer from what the model does, and sets their thresholds.

    The text is observed in random order, a batch at a time, and each batch is forgotten after
    a few steps a token: memory does not grow with the text. Without `rank` each layer gets the one that
    costs the least time, see `ranks`, and a layer none at all if that is cheaper still.

    Args:
        model: the decoder.
        ids: int32 [batch, seq], at least two sequences; one in eight is held out.
        recall: wanted share of active neurons marked on held-out tokens, 0..1; `thresholds.set_recall` sets
            another one later. It changes nothing but the thresholds.
        kind: "lowrank", "sign" or "none", see `predictor.KINDS`.
        rank: width of the low-rank ones, at least 1; None chooses, see above.
        dtype: weight type of the low-rank ones; they are trained for it, and thresholds and reports are
            those of the type. bfloat16 is taken, with a warning, where the model's width has no whole blocks.
        every_layer: make a predictor in each layer, whether it pays or not.
        hardware: whose host's bandwidths tell what costs time; None counts bytes.
        seed: of the initial weights and the order.
        checkpoints: a folder that keeps what was done, so that the same call, after a kill, goes on from
            there to the same result; the caller removes it.
        progress_fn: called with the sequences done and in all.
        say_fn: told of each rank that is tried.

    Raises:
        ValueError: if the ids do not fit the model, its activation leaves no neuron at zero, an argument is
            out of range, or the rank does not fit dtype.
    """
    ids = check_profiled(ids, model.config)
    if len(ids) < 2:
        raise ValueError(f"ids: expected at least two sequences, one of them to hold out, got {len(ids)}")
    check_recall(recall)
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if rank is not None and rank < 1:
        raise ValueError(f"rank: expected at least 1, or None to choose one, got {rank}")
    if (fitting := fitting_dtype(dtype, model.config.model)) != dtype:
        logging.warning(
            "predictor.dtype: %s needs a width that is a multiple of 32, and the model's is %d; its "
            "predictors are in %s",
            dtype, model.config.model, fitting,
        )  # fmt: skip
        dtype = fitting
    check_widths(dtype, model.config.model, rank)
    held_out, training = ids[::HELD_OUT], np.delete(ids, np.s_[::HELD_OUT], axis=0)
    training = np.random.default_rng(seed).permutation(training)
    costs = layer_costs(model, hardware)

    def done_fn(done: int) -> None:
        progress_fn(done, len(ids))

    layers: Sequence[Predictor | None] = (None,) * model.config.layers
    if kind == "sign":
        layers = _fit_signs(model, training, done_fn)
    if kind == "lowrank":
        key = fingerprint(model_fingerprint(model), ids, rank, dtype, seed, [list(cost) for cost in costs])
        job = Job(model, dtype, seed, key, checkpoints)
        ranks = _choose_ranks(job, training, held_out, costs, say_fn) if rank is None else [rank] * len(costs)
        layers = [with_dtype(fitted, dtype) for fitted in fit_stream(job, training, ranks, done_fn)]
    histograms = measure_scores(
        model, layers, held_out, progress_fn=lambda done, _: done_fn(len(training) + done)
    )
    if not every_layer:
        reports = [report_at(*pair, RANK_RECALL) for pair in zip(layers, histograms, strict=True)]
        pays = [cost.of(r.bytes, r.density) < cost.without for cost, r in zip(costs, reports, strict=True)]
        for index in np.flatnonzero(~np.array(pays)) if kind != "none" else ():
            say_fn(f"layer {index}: no predictor pays; it runs exact")
        layers = [layer if paid else None for layer, paid in zip(layers, pays, strict=True)]
    return set_recall(Predictors(tuple(layers), (), histograms), recall)


def layer_costs(model: Decoder, hardware: HardwareSpec | None) -> list[LayerCost]:
    """What each layer's openers cost on the hardware's host; without hardware seconds are bytes."""
    rates = (1.0, 1.0)
    if hardware is not None:
        rates = (hardware.host_bytes_per_s, hardware.host_gather_bytes_per_s)
    ffns = [layer.ffn.weights for layer in model.layers]
    return [LayerCost(ffn.neurons, ffn.neuron_bytes / (3 if ffn.gated else 2), *rates) for ffn in ffns]


class _Kept(NamedTuple):
    """A layer's part of the sample, small: bfloat16 [tokens, model], uint8 [tokens, neurons / 8]."""

    x: np.ndarray
    bits: np.ndarray


def _keep(model: Decoder, ids: np.ndarray) -> list[_Kept]:
    graphdef, state = nnx.split(model)
    pieces: list[list[_Kept]] = []
    for batch in batches(ids):
        observed = observe(graphdef, state, batch)
        pieces.append(
            [
                _Kept(np.asarray(o.x, BFLOAT16), np.packbits(np.asarray(o.active_mask), axis=1))
                for o in observed
            ]
        )
    layers = zip(*pieces, strict=True)
    return [
        _Kept(np.concatenate([p.x for p in parts]), np.concatenate([p.bits for p in parts]))
        for parts in layers
    ]


def _sample_rows(model: Decoder, seq: int) -> int:
    """Sequences of the sample."""
    config = model.config
    token_bytes = sum(2 * config.model + neurons // 8 for neurons in config.neurons)
    return max(1, min(SAMPLE_TOKENS, SAMPLE_BYTES // token_bytes) // seq)


def _choose_ranks(
    job: Job, training: np.ndarray, held_out: np.ndarray, costs: Sequence[LayerCost], say_fn: SayFn
) -> list[int]:
    """The cheapest rank of each layer; those of a run that was killed are taken from its file."""
    config, file = job.model.config, job.folder and job.folder / "ranks.json"
    ranks: list[int] = []
    if file and file.exists() and (known := json.loads(file.read_text()))["key"] == job.key:
        ranks = known["ranks"]
    if len(ranks) == config.layers:
        return ranks
    rows = _sample_rows(job.model, training.shape[1])
    kept = list(
        zip(_keep(job.model, training[:rows]), _keep(job.model, held_out[: -(-rows // 4)]), strict=True)
    )
    for index in range(len(ranks), config.layers):
        neurons, ffn = config.neurons[index], job.model.layers[index].ffn.weights
        (x, bits), (held_x, held_bits) = kept[index]
        masks = [np.unpackbits(b, axis=1, count=neurons).astype(bool) for b in (bits, held_bits)]
        sample = Sample(x, masks[0], held_x, masks[1])

        def tell(trial: Trial, index: int = index) -> None:
            say_fn(
                f"layer {index}, rank {trial.rank}: {trial.density:.1%} of the neurons marked, "
                f"{trial.bytes:,} bytes, cost {trial.cost_s:.4g} (without {costs[index].without:.4g})"
            )

        choices = rank_choices(job.dtype, config.model, neurons, ffn.neuron_bytes)
        skew = hot_share(masks[0].sum(0))
        trial = choose_rank(sample, choices, job.dtype, costs[index], (job.seed, index), skew, tell)
        ranks.append(trial.rank)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps({"key": job.key, "ranks": ranks}).encode())
    say_fn(f"ranks {' '.join(map(str, ranks))}")
    return ranks


def _fit_signs(model: Decoder, ids: np.ndarray, done_fn: Callable[[int], None]) -> list[SignPredictor]:
    """The openers' signs, with what the text says about each neuron."""
    graphdef, state = nnx.split(model)
    bits = []
    for layer in model.layers:
        ffn = ops.unpack_ffn(layer.ffn.weights)
        bits.append(ops.pack_signs(ffn.up if ffn.gate is None else ffn.gate))
    sums, done = [SignSums(*np.zeros((4, n))) for n in model.config.neurons], 0
    for batch in batches(ids):
        for i, layer in enumerate(observe(graphdef, state, batch)):
            part = sum_signs(bits[i], layer.x, layer.active_mask)
            sums[i] = SignSums(*(a + np.asarray(b, np.float64) for a, b in zip(sums[i], part, strict=True)))
        done += len(batch)
        done_fn(done)
    return [fit_signs(b, s, ids.size) for b, s in zip(bits, sums, strict=True)]
