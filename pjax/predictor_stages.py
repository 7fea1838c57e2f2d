"""The stages that make a run's predictors: training, which takes long, and thresholds, which take nothing."""

import shutil

import numpy as np

from pjax.base import HardwareSpec, Predictors, ProgressFn, SayFn
from pjax.imported import Imports, import_predictors, predictors_fingerprint
from pjax.model import Decoder
from pjax.profiler import measure_predictors
from pjax.settings import Settings
from pjax.stages import Stages
from pjax.thresholds import set_recall, trade_off
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

    Imported ones keep their thresholds, and are measured on what training would hold out.

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
    wanted, stored = settings.predictor, imports.predictors
    if stored is not None:
        kept = stored

        def measure(progress_fn: ProgressFn) -> Artefact:
            layers, held_out = import_predictors(kept), rows[::HELD_OUT]
            return pack_predictors(measure_predictors(model, layers, held_out, progress_fn=progress_fn))

        made_from = fingerprint(made_from, predictors_fingerprint(stored))
        return unpack_predictors(stages.run("predictors", made_from, measure)), made_from

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

    def choose(progress_fn: ProgressFn) -> Artefact:
        del progress_fn
        say_fn(trade_off(predictors, wanted.recall))
        return pack_thresholds(set_recall(predictors, wanted.recall))

    made_from = fingerprint(made_from, wanted.recall)
    return unpack_thresholds(stages.run("thresholds", made_from, choose), predictors), made_from
