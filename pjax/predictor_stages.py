"""The stages that make a run's predictors: training, which takes long, and thresholds, which take nothing."""

import dataclasses
import shutil

import numpy as np

from pjax.base import HardwareSpec, Predictors, ProgressFn, SayFn
from pjax.formats.checkpoint import StoredPredictors
from pjax.imported import Imports, import_predictors, predictors_fingerprint
from pjax.model import Decoder
from pjax.profiler import measure_predictors, measure_scores
from pjax.settings import Settings
from pjax.stages import Stages
from pjax.thresholds import DEFAULT_RECALL, set_recall, trade_off
from pjax.training.train import HELD_OUT, train_predictors
from pjax.workdir import (
    Artefact,
    fingerprint,
    pack_predictors,
    pack_thresholds,
    unpack_predictors,
    unpack_thresholds,
)

CHECKPOINTS = "predictors.checkpoints"
"""Folder in the workdir that a training goes on from after a kill."""


def run_predictors(
    stages: Stages,
    settings: Settings,
    imports: Imports,
    model: Decoder,
    hardware: HardwareSpec,
    rows: np.ndarray,
    made_from: str,
    say_fn: SayFn,
) -> tuple[Predictors, str]:
    """The predictors with their thresholds, and what they were made from.

    Imported ones are measured on what training would hold out.

    Args:
        stages: of the workdir.
        settings: what to do.
        imports: what the run takes from files.
        model: the decoder.
        hardware: whose host's bandwidths choose the ranks.
        rows: int32 [batch, seq], the text.
        made_from: fingerprint of model and text.
        say_fn: told of ranks and of what each recall costs.
    """
    wanted = settings.predictor
    if imports.predictors is not None:
        predictors, made_from = _imported(stages, imports.predictors, model, rows, made_from)
        if wanted.recall is None:
            return predictors, made_from
    else:
        predictors, made_from = _trained(stages, settings, model, hardware, rows, made_from, say_fn)
    recall = DEFAULT_RECALL if wanted.recall is None else wanted.recall

    def choose(progress_fn: ProgressFn) -> Artefact:
        del progress_fn
        say_fn(trade_off(predictors, recall))
        return pack_thresholds(set_recall(predictors, recall))

    made_from = fingerprint(made_from, recall)
    return unpack_thresholds(stages.run("thresholds", made_from, choose), predictors), made_from


def _imported(
    stages: Stages, stored: StoredPredictors, model: Decoder, rows: np.ndarray, made_from: str
) -> tuple[Predictors, str]:
    """The predictors of a file with their own thresholds, and how their scores are spread."""

    def measure(progress_fn: ProgressFn) -> Artefact:
        layers, held_out = import_predictors(stored), rows[::HELD_OUT]
        measured = measure_predictors(model, layers, held_out, progress_fn=progress_fn)
        histograms = measure_scores(model, layers, held_out)
        return pack_predictors(dataclasses.replace(measured, histograms=histograms))

    made_from = fingerprint(made_from, predictors_fingerprint(stored))
    return unpack_predictors(stages.run("predictors", made_from, measure)), made_from


def _trained(
    stages: Stages,
    settings: Settings,
    model: Decoder,
    hardware: HardwareSpec,
    rows: np.ndarray,
    made_from: str,
    say_fn: SayFn,
) -> tuple[Predictors, str]:
    wanted = settings.predictor

    def train(progress_fn: ProgressFn) -> Artefact:
        trained = train_predictors(
            model,
            rows,
            kind=wanted.kind,
            dtype=wanted.dtype,
            every_layer=wanted.every_layer,
            hardware=hardware,
            seed=settings.seed,
            checkpoints=stages.workdir / CHECKPOINTS,
            progress_fn=progress_fn,
            say_fn=say_fn,
        )
        return pack_predictors(trained)

    rates = [hardware.host_bytes_per_s, hardware.host_gather_bytes_per_s]
    how = [wanted.kind, wanted.dtype, wanted.every_layer, rates, settings.seed]
    made_from = fingerprint(made_from, how)
    predictors = unpack_predictors(stages.run("predictors", made_from, train))
    shutil.rmtree(stages.workdir / CHECKPOINTS, ignore_errors=True)
    return predictors, made_from
