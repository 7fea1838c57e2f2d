"""What a run takes from a PowerInfer user's files instead of making it: statistics, predictors, placement."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pjax.base import ActivationStats, HardwareSpec, LowRankPredictor, Placement
from pjax.formats import expand_path, read_checkpoint
from pjax.formats.checkpoint import SourceTensor, StoredPredictors
from pjax.formats.mapped import describe_stored, load_array
from pjax.formats.powerinfer import read_counts, read_hot_mask, read_predictors
from pjax.model_config import ModelConfig
from pjax.placement import layer_neuron_bytes
from pjax.settings import Settings
from pjax.workdir import fingerprint

_POOR_SPLIT = 0.9  # of what as many neurons could serve; a split made from the same statistics has 1


class Imports(NamedTuple):
    """What a run takes from files; None for what it makes itself.

    Attributes:
        stats: activation counts.
        predictors: opened, not read.
        hot_mask: bool [neurons] per layer.
        sources: for people, where the parts "profile", "predictor" and "placement" come from: a path, or how
            the run makes it.
    """

    stats: ActivationStats | None
    predictors: StoredPredictors | None
    hot_mask: tuple[np.ndarray, ...] | None
    sources: dict[str, str]


def read_imports(settings: Settings, config: ModelConfig) -> Imports:
    """Opens and checks all files that a run imports.

    Predictors in the model's own file are taken, too, unless `predictor.path` says otherwise.

    Args:
        settings: the keys `profile.path`, `predictor.path` and `placement.path`.
        config: of the model.

    Raises:
        ValueError, FileNotFoundError: a file is missing, damaged or of another model, or the model's
            activation is not sparse.
    """
    paths = {
        "profile": settings.profile.path,
        "predictor": None if settings.predictor.path == "train" else settings.predictor.path,
        "placement": settings.placement.path,
    }
    for part, path in paths.items():
        if path is not None and not config.is_sparse:
            raise ValueError(
                f"config.{part}.path: {config.name} has the activation {config.activation!r}, under which "
                "every neuron is active for every token; leave the key out"
            )
    stats = None if paths["profile"] is None else import_stats(read_counts(paths["profile"], config))
    hot_mask = None if paths["placement"] is None else read_hot_mask(paths["placement"], config)
    predictors = None if paths["predictor"] is None else read_predictors(paths["predictor"], config)
    if settings.predictor.path is None and config.is_sparse:
        predictors = read_checkpoint(settings.model, activation=settings.activation).predictors
        paths["predictor"] = settings.model if predictors else None
    made = {"profile": "measured", "predictor": "trained", "placement": "solved"}
    sources = {part: made[part] if path is None else str(expand_path(path)) for part, path in paths.items()}
    return Imports(stats, predictors, hot_mask, sources)


def import_stats(counts: tuple[np.ndarray, ...]) -> ActivationStats:
    """Counts as statistics; over how many tokens is not known, only that no count can be larger.

    Args:
        counts: int64 [neurons] per layer.
    """
    return ActivationStats(counts, max(int(layer.max()) for layer in counts), num_tokens_known=False)


def import_predictors(stored: StoredPredictors) -> tuple[LowRankPredictor, ...]:
    """Reads the weights of predictors, one predictor a layer.

    Args:
        stored: as `formats` opened them.

    Returns:
        Predictors whose weights are numpy arrays, float16 if they are stored so, else float32.

    Raises:
        ValueError: a file has become shorter since it was opened.
    """
    threshold = _below(stored.threshold)
    biases: list[Any] = [np.zeros(second.shape[0], np.float32) for _, second in stored.layers]
    return tuple(
        LowRankPredictor(_load(first), _load(second), bias, threshold, input="residual")
        for (first, second), bias in zip(stored.layers, biases, strict=True)
    )


def predictors_fingerprint(stored: StoredPredictors) -> str:
    """A hash of the predictors' names, shapes and types, and of samples of their bytes."""
    tensors = [tensor for layer in stored.layers for tensor in layer]
    return fingerprint(stored.threshold, [describe_stored(tensor) for tensor in tensors])


def import_placement(
    hot_mask: tuple[np.ndarray, ...],
    stats: ActivationStats,
    config: ModelConfig,
    hardware: HardwareSpec,
    *,
    device_bytes: int,
    dtype: str | Sequence[str],
) -> Placement:
    """A placement that somebody else chose, with what it serves; warns if that is far from what it could.

    PowerInfer's own splits of models with more than ten layers are: it takes the counts of the wrong layers
    (its issue 247).

    Args:
        hot_mask: bool [neurons] per layer.
        stats: activation counts of the model.
        config: of the model.
        hardware: sizes of device and host.
        device_bytes: device memory that hot neurons may take.
        dtype: storage type of the rows, see `placement.neuron_bytes`; one for all layers or one each.

    Raises:
        ValueError: the hot neurons do not fit on the device, or the others not on the host.
    """
    sizes = layer_neuron_bytes(config, dtype)
    num_hot = sum(int(mask.sum()) for mask in hot_mask)
    hot_bytes = sum(size * int(mask.sum()) for size, mask in zip(sizes, hot_mask, strict=True))
    cold_bytes = sum(size * int((~mask).sum()) for size, mask in zip(sizes, hot_mask, strict=True))
    if hot_bytes > device_bytes:
        raise ValueError(
            f"placement.path: its {num_hot} hot neurons take {hot_bytes} bytes, more than the "
            f"{device_bytes} that placement.device_bytes allows on {hardware.name!r}; leave the path out"
        )
    if cold_bytes > hardware.host_bytes:
        raise ValueError(
            f"placement.path: its cold neurons take {cold_bytes} bytes, the host of "
            f"{hardware.name!r} has {hardware.host_bytes}; leave the path out"
        )
    pairs = list(zip(stats.frequencies, hot_mask, strict=True))
    objective = math.fsum(float(f[mask].sum()) for f, mask in pairs)
    bound = math.fsum(float(np.sort(f)[len(f) - int(mask.sum()) :].sum()) for f, mask in pairs)
    if objective < _POOR_SPLIT * bound:
        logging.warning(
            "placement.path: its hot neurons serve %.0f %% of what as many others in the same layers would; "
            "was it made from other statistics? Without placement.path pjax makes its own",
            100 * objective / bound,
        )
    return Placement(
        hot_mask=hot_mask,
        status="imported",
        objective=objective,
        bound=max(bound, objective),  # equal ones differ in the order of summation
        device_bytes=hot_bytes,
        budget_bytes=device_bytes,
        solve_s=0.0,
    )


def _load(tensor: SourceTensor) -> Any:  # LowRankPredictor's arrays are JAX's or numpy's
    return load_array(tensor, tensor.dtype if tensor.dtype == np.float16 else np.dtype(np.float32))


def _below(threshold: float) -> Any:
    """The next smaller float32: there `score >= threshold`, here `score > threshold`.

    Below 0 that is the normal number nearest to it: XLA takes smaller ones for 0.
    """
    if np.float32(threshold) == 0:
        return -np.finfo(np.float32).tiny
    return np.nextafter(np.float32(threshold), np.float32(-np.inf))
