"""From how scores are spread on held-out tokens to a threshold for any recall, without training again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pjax.base import Predictor, PredictorReport, Predictors, ScoreHistogram

MAX_SCORE = 16.0
"""Scores beyond +-16 (odds of 1e7) are as good as certain, so the histogram of scores ends there."""

NUM_BINS = 2048
"""Of that histogram: a bin is 1/64 wide, so the threshold is within 1.6 % in odds of the exact one."""

BIN_EDGES = np.linspace(-MAX_SCORE, MAX_SCORE, NUM_BINS - 1, dtype=np.float32)
"""Upper edges of all bins but the last; the first and last bins are open."""

CERTAIN = 1e9
"""A threshold below or above every score; finite, so that JSON can carry it."""

DEFAULT_RECALL = 0.95
"""Those missed contribute little: on the demo model 0.8 % of the output, and 0.1 % of perplexity."""

SHOWN_RECALLS = (0.9, 0.95, 0.98, 0.99)
"""Those that a trade-off is shown at, beside the chosen one."""


@jax.jit
def score_histogram(
    scores: jax.Array, active_mask: jax.Array, contributions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How the scores of inactive and active neurons are spread.

    Args:
        scores: float32 [batch, neurons].
        active_mask: bool [batch, neurons].
        contributions: float32 [batch, neurons], what each neuron contributes; 0 where it is inactive.

    Returns:
        int32 [2, NUM_BINS], counts of inactive, then of active neurons with a score in each bin; float32
        [NUM_BINS], the contributions in each.
    """
    bins = jnp.searchsorted(jnp.asarray(BIN_EDGES), scores, side="left")
    index = active_mask.astype(jnp.int32) * NUM_BINS + bins
    counts = jnp.bincount(index.reshape(-1), length=2 * NUM_BINS).reshape(2, NUM_BINS)
    weights = contributions.astype(jnp.float32).reshape(-1)
    return counts, jnp.bincount(bins.reshape(-1), weights=weights, length=NUM_BINS)


def check_recall(recall: float) -> None:
    """Raises ValueError unless recall is a number in 0..1."""
    if not 0 <= recall <= 1:
        raise ValueError(f"recall: expected a number in 0..1, got {recall!r}")


def marked_above(histogram: ScoreHistogram) -> tuple[np.ndarray, np.ndarray]:
    """What every threshold marks.

    Args:
        histogram: of one layer.

    Returns:
        float64 [bins + 1], thresholds, rising; [3, bins + 1], how many scores of inactive neurons and of
        active ones are above each, and what the latter contribute. Above the first are all.
    """
    # Thresholds are the lower edges of the bins; no score is above the last.
    parts = [*histogram.counts, histogram.contributions]
    marked = np.stack([np.append(np.cumsum(part[::-1])[::-1], 0) for part in parts])
    return np.concatenate([[-CERTAIN], BIN_EDGES, [CERTAIN]]), marked


def report_at(predictor: Predictor | None, histogram: ScoreHistogram, recall: float) -> PredictorReport:
    """The highest threshold that still reaches a recall, and what it gives.

    Args:
        predictor: of one layer; None marks all neurons, whatever the recall.
        histogram: of held-out tokens.
        recall: wanted share of active neurons marked, 0..1. A layer with none has recall 1.

    Raises:
        ValueError: if recall is outside 0..1.
    """
    check_recall(recall)
    thresholds, marked = marked_above(histogram)
    total = marked[:, 0]
    recalls = marked[1] / total[1] if total[1] else np.ones(len(thresholds))
    best = 0 if predictor is None else int(np.flatnonzero(recalls >= recall)[-1])
    return make_report(predictor, float(thresholds[best]), marked[:, best], total)


def make_report(
    predictor: Predictor | None, threshold: float, marked: np.ndarray, total: np.ndarray
) -> PredictorReport:
    """What a predictor gives at a threshold.

    Args:
        predictor: of one layer; None for none, which marks everything.
        threshold: score above which it marks a neuron.
        marked: [3], how often it marked an inactive, and an active neuron, and what the latter contributed.
        total: [3], the same of all inactive and active neurons.
    """
    inactive, active = (int(n) for n in marked[:2])
    total_active = int(total[1])
    neurons = int(total[0]) + total_active
    return PredictorReport(
        rank=predictor.rank if predictor else 0,
        recall=active / total_active if total_active else 1.0,
        precision=active / (active + inactive) if active + inactive else 1.0,
        density=(active + inactive) / neurons if neurons else 0.0,
        true_density=total_active / neurons if neurons else 0.0,
        threshold=threshold,
        bytes=predictor.nbytes if predictor else 0,
        contribution_recall=float(marked[2] / total[2]) if total[2] else 1.0,
        kind=predictor.kind if predictor else "none",
    )


def set_recall(predictors: Predictors, recall: float) -> Predictors:
    """The predictors with the thresholds and reports of another recall.

    Args:
        predictors: with their histograms.
        recall: share of the active neurons to mark, on the tokens of the histograms, 0..1.

    Raises:
        ValueError: if recall is outside 0..1, or there are no histograms.
    """
    if len(predictors.histograms) != len(predictors.layers):
        raise ValueError("predictors: expected histograms of their scores; these were not measured")
    pairs = list(zip(predictors.layers, predictors.histograms, strict=True))
    reports = tuple(report_at(layer, histogram, recall) for layer, histogram in pairs)
    layers = tuple(
        layer and dataclasses.replace(layer, threshold=jnp.float32(report.threshold))
        for layer, report in zip(predictors.layers, reports, strict=True)
    )
    return Predictors(layers, reports, predictors.histograms)


def trade_off(predictors: Predictors, recall: float) -> str:
    """What other recalls than the chosen one would cost, one line; means over all layers."""
    parts = []
    for shown in sorted({*SHOWN_RECALLS, recall}):
        reports = set_recall(predictors, shown).reports
        density, contribution = (
            float(np.mean([getattr(report, field) for report in reports]))
            for field in ("density", "contribution_recall")
        )
        mark = "*" if shown == recall else ""
        parts.append(f"{shown:.2%}{mark} -> {density:.1%} ({contribution:.2%})")
    return "recall -> density (recall by contribution): " + ", ".join(parts)
