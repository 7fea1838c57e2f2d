"""Proof that the answers stay right: perplexity and divergence of each mode against the dense model.

Every scored position runs the mode's own FFN with per-token masks; nothing is switched to dense here.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax.base import FfnFn, Mode, Predictor, Predictors, ProgressFn
from pjax.executor import check_mode, mode_ffn_fn
from pjax.model import Decoder, check_ids, prompt_positions

CHUNK = 512
"""Tokens of a chunk, at most the context: llama.cpp's default, whose convention this is, save that it
scores one token fewer in each."""

BATCH_TOKENS = 2048
"""Scored at once: the logits of so many tokens are 260 MB at a vocabulary of 32,000."""

MAX_NATS = 700.0
"""Mean negative log-likelihood beyond which the perplexity leaves float64; chance is log(vocab), 10 to 12."""


class Quality(NamedTuple):
    """What the modes do to the model's predictions.

    Attributes:
        perplexity: exp of the mean negative log-likelihood, for each mode that was scored.
        error: standard error of that perplexity, for each mode.
        top1_agreement: share of scored positions where the last mode's best token is the first mode's.
        kl_mean: mean of KL(first mode || last mode) in nats, 0 or more.
        tokens: scored positions.
    """

    perplexity: dict[str, float]
    error: dict[str, float]
    top1_agreement: float
    kl_mean: float
    tokens: int


class _Scores(NamedTuple):
    """Of one batch of chunks: log-likelihood [scored], KL [scored], agreement [scored]."""

    log_likelihood: jax.Array | np.ndarray
    kl: jax.Array | np.ndarray
    agrees: jax.Array | np.ndarray


def _scored_log_probs(model: Decoder, ids: jax.Array, ffn_fn: FfnFn) -> jax.Array:
    """float32 [batch, scored, vocab]: predictions of the second half of each chunk."""
    residual, _, _ = model.run(ids, prompt_positions(ids), ffn_fn=ffn_fn)
    return jax.nn.log_softmax(model.logits(residual[:, ids.shape[1] // 2 - 1 : -1]), axis=-1)


@partial(jax.jit, static_argnames=("graphdef", "modes"))
def _score(
    graphdef, state, layers: tuple[Predictor | None, ...], ids: jax.Array, *, modes: tuple[Mode, ...]
) -> list[_Scores]:
    """The scores of each mode on chunks ids [batch, seq]; the first mode is what the others are held to."""
    model = nnx.merge(graphdef, state)
    targets = ids[:, ids.shape[1] // 2 :, None]
    results, base = [], None
    for mode in modes:
        log_probs = _scored_log_probs(model, ids, mode_ffn_fn(mode, Predictors(layers, ())))
        base = log_probs if base is None else base
        results.append(
            _Scores(
                jnp.take_along_axis(log_probs, targets, axis=-1).reshape(-1),
                (jnp.exp(base) * (base - log_probs)).sum(-1).reshape(-1),
                (log_probs.argmax(-1) == base.argmax(-1)).reshape(-1),
            )
        )
    return results


def chunks(ids: np.ndarray, context: int, bos_id: int | None) -> np.ndarray:
    """Cuts a text into non-overlapping chunks; a BOS, if the model has one, replaces each one's first id.

    Args:
        ids: int [tokens].
        context: of the model; a chunk has at most so many and at most `CHUNK` tokens.
        bos_id: or None.

    Returns:
        int32 [chunks, seq].

    Raises:
        ValueError: if the text is shorter than one chunk.
    """
    size = min(CHUNK, context)
    if len(ids) < size:
        raise ValueError(
            f"text: perplexity needs at least one chunk of {size} tokens, got {len(ids)}; give more"
        )
    rows = np.asarray(ids[: len(ids) // size * size], np.int32).reshape(-1, size).copy()
    if bos_id is not None:
        rows[:, 0] = bos_id
    return rows


def _batches(rows: np.ndarray) -> Iterator[np.ndarray]:
    size = max(1, BATCH_TOKENS // rows.shape[1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def measure_quality(
    model: Decoder,
    rows: np.ndarray,
    modes: tuple[Mode, ...],
    *,
    predictors: Predictors | None = None,
    progress_fn: ProgressFn = lambda done, total: None,
    report_fn: Callable[[Quality], None] = lambda so_far: None,
) -> Quality:
    """Scores a text in several modes.

    Args:
        model: the decoder.
        rows: int32 [chunks, seq], see `chunks`; the second half of each is scored.
        modes: the first is what the others are compared with, usually "dense".
        predictors: for mode "predicted".
        progress_fn: called with the chunks done and in all.
        report_fn: called after each batch with the `Quality` so far.

    Raises:
        ValueError: if the model cannot run in one of the modes, the ids do not fit it, or its answers
            are not finite.
    """
    rows = check_ids(rows, model.config)
    for mode in modes:
        check_mode(mode, model.config, predictors)
    graphdef, state = nnx.split(model)
    layers = jax.device_put(predictors.layers if predictors else ())
    parts: list[list[_Scores]] = [[] for _ in modes]
    done = 0
    for batch in _batches(rows):
        for part, scores in zip(parts, _score(graphdef, state, layers, batch, modes=modes), strict=True):
            part.append(_Scores(*(np.asarray(a) for a in scores)))
        done += len(batch)
        progress_fn(done, len(rows))
        report_fn(_summarize(modes, parts))
    return _summarize(modes, parts)


def _summarize(modes: tuple[Mode, ...], parts: list[list[_Scores]]) -> Quality:
    perplexity, error = {}, {}
    for mode, part in zip(modes, parts, strict=True):
        log_likelihood = np.concatenate([scores.log_likelihood for scores in part]).astype(np.float64)
        mean = float(log_likelihood.mean())
        if not mean > -MAX_NATS:
            raise ValueError(
                f"perplexity: mode {mode!r} gives log-likelihoods of {mean:g} a token, so its logits are not "
                'numbers or senseless; float16 weights may have overflowed, try dtype="float32"'
            )
        perplexity[mode] = math.exp(-mean)
        error[mode] = perplexity[mode] * float(log_likelihood.std()) / math.sqrt(len(log_likelihood))
    last = parts[-1]
    agrees = np.concatenate([scores.agrees for scores in last])
    kl = np.concatenate([scores.kl for scores in last]).astype(np.float64)
    return Quality(perplexity, error, float(agrees.mean()), float(kl.mean()), len(agrees))
