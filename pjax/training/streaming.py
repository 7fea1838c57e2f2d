"""Trains low-rank predictors on a stream of observations, none of which is kept; goes on after a kill."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from pjax.base import LowRankPredictor
from pjax.model import Decoder
from pjax.profiler import batches, observe
from pjax.training.checkpoints import CHECKPOINT_S, load_checkpoint, save_checkpoint
from pjax.training.fit import FitState, fit_tokens, init_fit, init_predictor, positive_weight
from pjax.training.ranks import STEP_TOKENS, step_order

PASSES = 2
"""Steps that see each observed token: observing a token costs more than another step on it."""

WINDOW = 16
"""Batches whose mean losses, of tokens not seen before, are compared: noise of the text is then below 1 %."""

PLATEAU = 0.005
"""A layer whose loss falls by less from one window to the next begins the decay of its learning rate, after
which it is done."""


class Course(NamedTuple):
    """How far a layer's training is, in batches.

    Attributes:
        begin: where the decay of its learning rate begins.
        length: of the decay.
        weight: of an active neuron in its loss.
        losses: mean loss of each batch so far, before the layer was trained on it.
    """

    begin: int
    length: int
    weight: float
    losses: tuple[float, ...] = ()

    def decayed(self, position: float) -> float:
        """Part of the decay that is over, 0..1; 1 is the end."""
        return min(1.0, max(0.0, (position - self.begin) / max(self.length, 1)))

    def after(self, batch: int, total: int, batch_loss: float) -> "Course":
        """The course after one more batch; on a plateau the decay begins, and lasts as long as it took."""
        losses = (*self.losses, batch_loss)
        if batch + 1 < self.begin and len(losses) >= 2 * WINDOW:
            before, now = np.mean(losses[-2 * WINDOW : -WINDOW]), np.mean(losses[-WINDOW:])
            if now > (1 - PLATEAU) * before:
                return Course(batch + 1, min(batch + 1, total - batch - 1), self.weight, losses)
        return self._replace(losses=losses)


class Job(NamedTuple):
    """What a training of low-rank predictors is about.

    Attributes:
        model: the decoder.
        dtype: weight type that the predictors will have.
        seed: of the initial weights and the order.
        key: tells it from others in its checkpoints.
        folder: of the checkpoints; None keeps none.
    """

    model: Decoder
    dtype: str
    seed: int
    key: str
    folder: Path | None


def _start(job: Job, ranks: Sequence[int], frequencies: Sequence[np.ndarray]) -> list[FitState]:
    key, width = jax.random.key(job.seed), job.model.config.model
    return [
        init_fit(init_predictor(jax.random.fold_in(key, i), width, frequency, rank))
        for i, (rank, frequency) in enumerate(zip(ranks, frequencies, strict=True))
    ]


def _resume(job: Job, ranks: Sequence[int]) -> tuple[int, list[FitState], list[Course]] | None:
    """Where the last checkpoint left off: batches done, the layers' states and courses."""
    if job.folder is None:
        return None
    blank = _start(job, ranks, [np.zeros(n) for n in job.model.config.neurons])
    wanted = {"key": job.key, "ranks": list(ranks)}
    found = load_checkpoint(job.folder / "fits", wanted, lambda record: _leaves(blank))
    if found is None:
        return None
    record, arrays = found
    fits = [
        jax.tree.unflatten(
            jax.tree.structure(fit), [arrays[f"{i}.{j}"] for j in range(len(jax.tree.leaves(fit)))]
        )
        for i, fit in enumerate(blank)
    ]
    return (
        record["done"],
        fits,
        [Course(begin, length, weight, tuple(losses)) for begin, length, weight, losses in record["courses"]],
    )


def _leaves(fits: Sequence[FitState]) -> dict[str, jax.Array]:
    return {f"{i}.{j}": leaf for i, fit in enumerate(fits) for j, leaf in enumerate(jax.tree.leaves(fit))}


def fit_stream(
    job: Job, ids: np.ndarray, ranks: Sequence[int], done_fn: Callable[[int], None]
) -> list[LowRankPredictor]:
    """Trains all layers side by side in one pass over a text, a batch at a time.

    Args:
        job: what it is about.
        ids: int32 [batch, seq], in random order.
        ranks: of each layer's predictor.
        done_fn: called with the sequences done.

    Returns:
        The predictors, in float32.
    """
    graphdef, state = nnx.split(job.model)
    pieces = list(batches(ids))
    done, fits, courses = _resume(job, ranks) or (0, [], [])
    saved_s = time.monotonic()
    for index in range(done, len(pieces)):
        if courses and all(course.decayed(index) == 1 for course in courses):
            break  # all layers are done
        observed = observe(graphdef, state, pieces[index])
        if not fits:
            frequencies = [np.asarray(layer.active_mask.mean(0)) for layer in observed]
            fits, half = _start(job, ranks, frequencies), len(pieces) // 2
            courses = [
                Course(half, len(pieces) - half, positive_weight(float(f.mean()))) for f in frequencies
            ]
        for i, layer in enumerate(observed):
            if courses[i].decayed(index) < 1:
                fits[i], batch_loss = _fit_batch(job, fits[i], layer, courses[i], (job.seed, index, i))
                courses[i] = courses[i].after(index, len(pieces), batch_loss)
        done_fn(sum(map(len, pieces[: index + 1])))
        if job.folder and time.monotonic() - saved_s >= CHECKPOINT_S:
            record: dict[str, Any] = {"key": job.key, "ranks": list(ranks), "done": index + 1}
            record["courses"] = [list(course) for course in courses]
            save_checkpoint(job.folder / "fits", index + 1, record, _leaves(fits))
            saved_s = time.monotonic()
    return [fit.predictor for fit in fits]


def _fit_batch(
    job: Job, fit: FitState, layer: Any, course: Course, seed: tuple[int, int, int]
) -> tuple[FitState, float]:
    """`PASSES` over one batch, in an order that only the seed decides; returns the first one's loss."""
    tokens, rng, losses = layer.x.shape[0], np.random.default_rng(seed), []
    for i in range(PASSES):
        fit, batch_loss = fit_tokens(
            fit,
            layer.x,
            layer.active_mask,
            step_order(rng, tokens, min(STEP_TOKENS, tokens)),
            decayed=course.decayed(seed[1] + i / PASSES),
            weight=course.weight,
            dtype=job.dtype,
        )
        losses.append(batch_loss)
    return fit, losses[0]
