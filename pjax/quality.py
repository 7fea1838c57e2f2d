"""Proof that the answers stay right: perplexity and divergence of each mode against the dense model.

Every scored position runs the mode's own FFN with per-token masks; nothing is switched to dense here.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pjax.base import FfnFn, Mode, Predictors, ProgressFn
from pjax.executor import check_mode, mode_ffn_fn
from pjax.model import Decoder, check_ids, prompt_positions

CHUNK = 512
"""Tokens of a chunk, at most the context: llama.cpp's default, whose convention this is, save that it
scores one token fewer in each."""

BATCH_TOKENS = 2048
"""Scored at once: the logits of so many tokens are 260 MB at a vocabulary of 32,000. The errors of the
layers are measured on one such batch: norms over a thousand tokens do not move any more."""

MAX_NATS = 700.0
"""Mean negative log-likelihood beyond which the perplexity leaves float64; chance is log(vocab), 10 to 12."""


class FfnWay(NamedTuple):
    """A way to run the FFNs.

    Attributes:
        make_fn: gives the `ffn_fn`, from the arrays; a program is compiled for each, so the same one for the
            same way.
        arrays: any pytree; what a program closes over is copied, so weights come in here.
    """

    make_fn: Callable[[Any], FfnFn]
    arrays: Any = ()


class WayQuality(NamedTuple):
    """What one way to run the FFNs does to the model's predictions; the base is the way compared with.

    Attributes:
        perplexity: exp of the mean negative log-likelihood.
        error: standard error of that perplexity.
        rise: of the perplexity over the base's, as a fraction.
        rise_error: standard error of the rise; small, as both score the same tokens.
        kl_mean: mean of KL(base || this) in nats, 0 or more.
        top1_agreement: share of scored positions where the best token is the base's.
    """

    perplexity: float
    error: float
    rise: float
    rise_error: float
    kl_mean: float
    top1_agreement: float


class Quality(NamedTuple):
    """What the modes do to the model's predictions.

    Attributes:
        modes: for each mode that was scored; the first is the base.
        tokens: scored positions.
    """

    modes: dict[str, WayQuality]
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


@partial(jax.jit, static_argnames=("graphdef", "make_fns"))
def _score(graphdef, state, arrays: tuple, ids: jax.Array, *, make_fns: tuple) -> list[_Scores]:
    """The scores of each way on chunks ids [batch, seq]; the first is what the others are held to."""
    model = nnx.merge(graphdef, state)
    targets = ids[:, ids.shape[1] // 2 :, None]
    results, base = [], None
    for make_fn, own in zip(make_fns, arrays, strict=True):
        log_probs = _scored_log_probs(model, ids, make_fn(own))
        base = log_probs if base is None else base
        results.append(
            _Scores(
                jnp.take_along_axis(log_probs, targets, axis=-1).reshape(-1),
                (jnp.exp(base) * (base - log_probs)).sum(-1).reshape(-1),
                (log_probs.argmax(-1) == base.argmax(-1)).reshape(-1),
            )
        )
    return results


@partial(jax.jit, static_argnames=("graphdef", "make_fns"))
def _layer_squares(graphdef, state, arrays: tuple, ids: jax.Array, *, make_fns: tuple) -> list[jax.Array]:
    """float32 [ways] a layer: squared norm of the first way's output, and of the others' distance from it."""
    ffn_fns = [make_fn(own) for make_fn, own in zip(make_fns, arrays, strict=True)]

    def compare_fn(layer, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        base, *others = (ffn_fn(layer, x, residual)[0] for ffn_fn in ffn_fns)
        parts = [base, *(y - base for y in others)]
        return base, jnp.stack([jnp.square(part[:, ids.shape[1] // 2 :]).sum() for part in parts])

    return nnx.merge(graphdef, state).run(ids, prompt_positions(ids), ffn_fn=compare_fn)[2]


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


@functools.cache
def _mode_fn(mode: Mode) -> Callable[[Any], FfnFn]:
    return lambda layers: mode_ffn_fn(mode, Predictors(layers, ()))


def mode_ways(
    model: Decoder, modes: tuple[Mode, ...], predictors: Predictors | None = None
) -> dict[str, FfnWay]:
    """The modes as ways to run the FFNs.

    Args:
        model: the decoder.
        modes: the first is the base, usually "dense".
        predictors: for mode "predicted".

    Raises:
        ValueError: if the model cannot run in one of the modes.
    """
    for mode in modes:
        check_mode(mode, model.config, predictors)
    layers = jax.device_put(predictors.layers if predictors else ())
    return {mode: FfnWay(_mode_fn(mode), layers if mode == "predicted" else ()) for mode in modes}


def measure_quality(
    model: Decoder,
    rows: np.ndarray,
    ways: Mapping[str, FfnWay],
    *,
    progress_fn: ProgressFn = lambda done, total: None,
    report_fn: Callable[[Quality], None] = lambda so_far: None,
) -> Quality:
    """Scores a text with the FFNs run in several ways.

    Args:
        model: the decoder.
        rows: int32 [chunks, seq], see `chunks`; the second half of each is scored.
        ways: by name, see `mode_ways`; the first is what the others are compared with.
        progress_fn: called with the chunks done and in all.
        report_fn: called after each batch with the `Quality` so far.

    Raises:
        ValueError: if the ids do not fit the model, or its answers are not finite.
    """
    rows = check_ids(rows, model.config)
    graphdef, state = nnx.split(model)
    make_fns, arrays = zip(*ways.values(), strict=True)
    parts: list[list[_Scores]] = [[] for _ in ways]
    done = 0
    for batch in _batches(rows):
        scored = _score(graphdef, state, arrays, batch, make_fns=make_fns)
        for part, scores in zip(parts, scored, strict=True):
            part.append(_Scores(*(np.asarray(a) for a in scores)))
        done += len(batch)
        progress_fn(done, len(rows))
        report_fn(_summarize(tuple(ways), parts))
    return _summarize(tuple(ways), parts)


def measure_layer_errors(
    model: Decoder, rows: np.ndarray, ways: Mapping[str, FfnWay]
) -> dict[str, list[float]]:
    """How far the FFN outputs are from the first way's, on the same inputs: `|y - base| / |base|` a layer.

    Args:
        model: the decoder.
        rows: int32 [chunks, seq]; the second halves of the first `BATCH_TOKENS` tokens' chunks count.
        ways: by name, see `mode_ways`; the inputs are those that the first one makes.

    Returns:
        For each way but the first, one error a layer, 0 or more.
    """
    graphdef, state = nnx.split(model)
    make_fns, arrays = zip(*ways.values(), strict=True)
    batch = next(_batches(check_ids(rows, model.config)))
    squares = np.asarray(_layer_squares(graphdef, state, arrays, batch, make_fns=make_fns), np.float64)
    # A layer that gives nothing has nothing to lose.
    errors = np.sqrt(squares[:, 1:] / np.maximum(squares[:, :1], np.finfo(np.float32).tiny))
    return {name: errors[:, i].tolist() for i, name in enumerate(tuple(ways)[1:])}


def _summarize(names: tuple[str, ...], parts: list[list[_Scores]]) -> Quality:
    modes: dict[str, WayQuality] = {}
    base = np.zeros(0)
    for name, part in zip(names, parts, strict=True):
        log_likelihood, kl, agrees = (np.concatenate(a).astype(np.float64) for a in zip(*part, strict=True))
        base = base if modes else log_likelihood
        mean, lost = float(log_likelihood.mean()), base - log_likelihood
        if not mean > -MAX_NATS:
            raise ValueError(
                f"perplexity: mode {name!r} gives log-likelihoods of {mean:g} a token, so its logits are not "
                'numbers or senseless; float16 weights may have overflowed, try dtype="float32"'
            )
        ratio, scale = math.exp(float(lost.mean())), 1 / math.sqrt(len(lost))
        modes[name] = WayQuality(
            perplexity=math.exp(-mean),
            error=math.exp(-mean) * float(log_likelihood.std()) * scale,
            rise=ratio - 1,
            rise_error=ratio * float(lost.std()) * scale,
            kl_mean=float(kl.mean()),
            top1_agreement=float(agrees.mean()),
        )
    return Quality(modes, len(base))


def guard_faults(quality: Quality, *, max_perplexity_rise: float, max_kl: float) -> list[str]:
    """Why mode "predicted" is too far from the base to be used unasked; empty if it is not.

    Args:
        quality: with mode "predicted".
        max_perplexity_rise: allowed rise of the perplexity, as a fraction.
        max_kl: allowed mean divergence, in nats.
    """
    found, faults = quality.modes["predicted"], []
    if not found.rise <= max_perplexity_rise:
        faults.append(
            f"its perplexity is {found.rise:.1%} above that of dense, more than {max_perplexity_rise:.1%} "
            "(quality.max_perplexity_rise)"
        )
    if not found.kl_mean <= max_kl:
        faults.append(
            f"its mean KL divergence from dense is {found.kl_mean:.3g} nats, more than {max_kl:g} "
            "(quality.max_kl)"
        )
    return faults


def worst_layers(errors: list[float], count: int = 3) -> list[int]:
    """The layers with the largest errors, worst first.

    Args:
        errors: one a layer, see `measure_layer_errors`.
        count: at most so many.
    """
    return [int(i) for i in np.argsort(errors)[::-1][:count] if errors[i] > 0]
