"""How likely a model finds given continuations, in a mode: what choices and texts are evaluated by."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax.base import ProgressFn
from pjax.model import Decoder, check_ids, prompt_positions
from pjax.quality import BATCH_TOKENS, FfnWay
from pjax.textio import MIN_PROMPT_BUCKET, next_bucket


class Likelihood(NamedTuple):
    """Of a continuation behind its context.

    Attributes:
        log_likelihood: sum over its tokens, in nats.
        is_greedy: whether each of its tokens is the model's best one.
    """

    log_likelihood: float
    is_greedy: bool


@partial(jax.jit, static_argnames=("graphdef", "make_fn"))
def _score_targets(graphdef, state, arrays: Any, ids: jax.Array, targets: jax.Array, *, make_fn):
    """float32 and bool [batch, seq]: log-likelihood of each target, and whether it is the best token."""
    model = nnx.merge(graphdef, state)
    residual, _, _ = model.run(ids, prompt_positions(ids), ffn_fn=make_fn(arrays))
    log_probs = jax.nn.log_softmax(model.logits(residual), axis=-1)
    found = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return found, log_probs.argmax(-1) == targets


def score_continuations(
    model: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    way: FfnWay,
    *,
    progress_fn: ProgressFn = lambda done, total: None,
) -> list[Likelihood]:
    """Scores continuations; each position of context and continuation runs the FFNs in that way.

    Args:
        model: the decoder.
        pairs: ids of a context, at least one, and of what follows it. A context that is too long for the
            model loses its beginning.
        way: to run the FFNs, see `quality.mode_ways`.
        progress_fn: called with the pairs done and in all.

    Returns:
        One for each pair.

    Raises:
        ValueError: a context is empty, ids do not fit the model, a continuation is longer than its context,
            or the model's answers are not numbers.
    """
    context = model.config.context
    for before, after in pairs:
        if not before or len(after) > context:
            raise ValueError(
                f"pairs: expected at least one token of context and at most {context} that follow it, got "
                f"{len(before)} and {len(after)}; cut the continuation into several pairs"
            )
    rows = [[*before, *after][-context - 1 :] for before, after in pairs]
    graphdef, state = nnx.split(model)
    results: dict[int, Likelihood] = {}
    for numbers, seq in _batches([len(row) - 1 for row in rows], context):
        size = max(1, BATCH_TOKENS // seq)
        # What a row is padded with comes after it, and no position sees what comes after.
        ids, targets = (np.zeros((size, seq), np.int32) for _ in range(2))
        for place, number in enumerate(numbers):
            row = rows[number]
            ids[place, : len(row) - 1], targets[place, : len(row) - 1] = row[:-1], row[1:]
        for array in (ids, targets):
            check_ids(array, model.config)
        found = _score_targets(graphdef, state, way.arrays, ids, targets, make_fn=way.make_fn)
        log_likelihood, is_best = (np.asarray(array) for array in found)
        for place, number in enumerate(numbers):
            end = len(rows[number]) - 1
            scored = slice(end - len(pairs[number][1]), end)
            total = float(log_likelihood[place, scored].astype(np.float64).sum())
            if math.isnan(total):
                raise ValueError(
                    "log_likelihood: the model's logits are NaN; its weights are damaged, or their type is "
                    'too narrow, try dtype="float32"'
                )
            results[number] = Likelihood(total, bool(is_best[place, scored].all()))
        progress_fn(len(results), len(pairs))
    return [results[number] for number in range(len(pairs))]


def _batches(lengths: list[int], context: int) -> Iterator[tuple[list[int], int]]:
    """(numbers of rows, the length they are padded to), longest first; one program is compiled a length."""
    buckets: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        seq = min(next_bucket(MIN_PROMPT_BUCKET, length), context)
        buckets.setdefault(seq, []).append(number)
    for seq in sorted(buckets, reverse=True):
        size = max(1, BATCH_TOKENS // seq)
        for start in range(0, len(buckets[seq]), size):
            yield buckets[seq][start : start + size], seq
