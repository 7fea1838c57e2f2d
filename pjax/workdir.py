"""Keeps what the stages made: one file a stage, written whole or not at all, with a fingerprint.

An artefact is a JSON record, `NAME.json`, or an `.npz` of arrays with such a record among them. Its
fingerprint says what it was made from; one that does not match is not returned, so it is made again or
refused, never used.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pjax.base import (
    ActivationStats,
    LowRankPredictor,
    Placement,
    Predictor,
    PredictorReport,
    Predictors,
    ScoreHistogram,
    SignPredictor,
)
from pjax.weights import BFLOAT16, BLOCK, PackedMatrix, row_bytes

RECORD = "__record__"
"""Name of the JSON record among the arrays."""

FORMAT = 2
"""Of all that is written here; one more whenever any of it changes, so that none of it is misread."""


class Artefact(NamedTuple):
    """What a stage made: arrays by name and a JSON record."""

    arrays: dict[str, np.ndarray]
    record: dict[str, Any]


def fingerprint(*parts: Any) -> str:
    """A short hash of values that JSON can write and of arrays' bytes, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def write_atomically(path: Path, *pieces: bytes | memoryview) -> None:
    """Writes a file under a temporary name, then renames it: it is there whole, or not at all."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        pid = leftover.name.split(".")[-2]
        if pid.isdecimal() and not _is_running(int(pid)):
            leftover.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"could not write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def save(workdir: Path, name: str, made_from: str, artefact: Artefact) -> None:
    """Writes an artefact.

    Args:
        workdir: an existing folder.
        name: of the stage.
        made_from: fingerprint of all that the artefact depends on.
        artefact: what to write.
    """
    header = {"format": FORMAT, "made_from": made_from, "record": artefact.record}
    header["checksum"] = _checksum(artefact)
    record, (as_json, as_npz) = json.dumps(header).encode(), _paths(workdir, name)
    if artefact.arrays:
        buffer = io.BytesIO()
        np.savez(buffer, **artefact.arrays, **{RECORD: np.frombuffer(record, np.uint8)})  # type: ignore[arg-type]
        write_atomically(as_npz, buffer.getvalue())
    else:
        write_atomically(as_json, record)
    (as_json if artefact.arrays else as_npz).unlink(missing_ok=True)


def _paths(workdir: Path, name: str) -> tuple[Path, Path]:
    """The two files that an artefact may be in; it is in one of them."""
    return workdir / f"{name}.json", workdir / f"{name}.npz"


def load(workdir: Path, name: str, made_from: str | None) -> Artefact | None:
    """Reads an artefact.

    Args:
        workdir: the folder.
        name: of the stage.
        made_from: the fingerprint it must have; None accepts any.

    Returns:
        None if there is none, if it is damaged or of another version (with a note in the log), or if it was
        made from something else.
    """
    path = next((path for path in _paths(workdir, name) if path.exists()), None)
    if path is None:
        return None
    try:
        arrays, record = _read(path)
        header = json.loads(record)
        if header.get("format") != FORMAT:
            raise ValueError(f"its format is {header.get('format')}, not {FORMAT}")
        artefact = Artefact(arrays, header["record"])
        fits = made_from in (None, header["made_from"])
        # The zip's own checksums do not cover the names of its arrays.
        if header["checksum"] != _checksum(artefact):
            raise ValueError("its checksum is wrong")
    except Exception as error:  # a damaged zip raises any of a dozen types
        logging.warning("%s is damaged or of another version (%s) and is not used", path, error)
        return None
    return artefact if fits else None


def _read(path: Path) -> tuple[dict[str, np.ndarray], bytes]:
    """An artefact's arrays, and its record as it was written."""
    if path.suffix == ".json":
        return {}, path.read_bytes()
    with open(path, "rb") as opened, np.load(opened) as file:
        arrays = {key: file[key] for key in file.files}
    return arrays, arrays.pop(RECORD).tobytes()


def _checksum(artefact: Artefact) -> str:
    return fingerprint(artefact.record, *(part for item in sorted(artefact.arrays.items()) for part in item))


@contextlib.contextmanager
def unpacking(file: str) -> Iterator[None]:
    """Within it, an artefact that is whole but does not hold what it should is refused.

    Args:
        file: its name, for the complaint.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"the workdir's {file} is not as pjax writes it: {what}; delete it, and pjax.run makes it again"
        ) from error


def _per_layer(arrays: Mapping[str, np.ndarray], prefix: str) -> tuple[np.ndarray, ...]:
    return tuple(arrays[f"{prefix}.{i}"] for i in range(sum(key.startswith(f"{prefix}.") for key in arrays)))


def pack_stats(stats: ActivationStats) -> Artefact:
    """The statistics as an artefact."""
    arrays = {f"counts.{i}": counts for i, counts in enumerate(stats.counts)}
    record = {"num_tokens": stats.num_tokens, "num_tokens_known": stats.num_tokens_known}
    return Artefact(arrays, record)


@unpacking("profile.npz")
def unpack_stats(artefact: Artefact) -> ActivationStats:
    """The reverse of `pack_stats`."""
    return ActivationStats(_per_layer(artefact.arrays, "counts"), **artefact.record)


def pack_predictors(predictors: Predictors) -> Artefact:
    """The predictors as an artefact."""
    arrays: dict[str, np.ndarray] = {}
    layers: list[dict[str, Any] | None] = []
    for i, predictor in enumerate(predictors.layers):
        for field, value in _parts(predictor).items():
            arrays[f"{field}.{i}"] = _bits(value.rows if isinstance(value, PackedMatrix) else value)
        layers.append(
            predictor and {"kind": predictor.kind, "dtype": predictor.dtype, "input": predictor.input}
        )
    for i, histogram in enumerate(predictors.histograms):
        arrays |= {f"{field}.{i}": value for field, value in histogram._asdict().items()}
    return Artefact(arrays, {"layers": layers} | _reports(predictors))


@unpacking("predictors.npz")
def unpack_predictors(artefact: Artefact) -> Predictors:
    """The reverse of `pack_predictors`; the weights are numpy arrays."""
    layers = tuple(
        layer and _unpack_predictor(layer, {name: artefact.arrays.get(f"{name}.{i}") for name in _FIELDS})
        for i, layer in enumerate(artefact.record["layers"])
    )
    fields = (_per_layer(artefact.arrays, field) for field in ScoreHistogram._fields)
    histograms = tuple(ScoreHistogram(*parts) for parts in zip(*fields, strict=True))
    return Predictors(layers, _unpack_reports(artefact), histograms)


def pack_thresholds(predictors: Predictors) -> Artefact:
    """The reports of predictors as an artefact, with their thresholds but without the predictors."""
    return Artefact({}, _reports(predictors))


@unpacking("thresholds.json")
def unpack_thresholds(artefact: Artefact, predictors: Predictors) -> Predictors:
    """The predictors with the thresholds and reports of an artefact."""
    reports = _unpack_reports(artefact)
    layers = tuple(
        layer and dataclasses.replace(layer, threshold=np.array(report.threshold, np.float32))
        for layer, report in zip(predictors.layers, reports, strict=True)
    )
    return Predictors(layers, reports, predictors.histograms)


_FIELDS = ("first", "second", "bits", "slope", "bias", "threshold")


def _unpack_predictor(layer: dict[str, Any], arrays: dict[str, Any]) -> Predictor:
    first, second, bits, slope, bias, threshold = (arrays[name] for name in _FIELDS)
    if layer["kind"] == "sign":
        return SignPredictor(bits, slope, bias, threshold, layer["input"])
    if first.dtype == np.uint8:
        per_block = row_bytes(layer["dtype"], BLOCK)
        first, second = (
            PackedMatrix(rows, layer["dtype"], rows.shape[1] // per_block * BLOCK) for rows in (first, second)
        )
    elif first.dtype == np.uint16:
        first, second = first.view(BFLOAT16), second.view(BFLOAT16)
    return LowRankPredictor(first, second, bias, threshold, layer["input"])


def _bits(array: Any) -> np.ndarray:
    """The array as NumPy files know it: bfloat16 as uint16."""
    array = np.asarray(array)
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def _parts(predictor: Predictor | None) -> dict[str, Any]:
    return {field: getattr(predictor, field) for field in _FIELDS if hasattr(predictor, field)}


def _reports(predictors: Predictors) -> dict[str, Any]:
    return {"reports": [report._asdict() for report in predictors.reports]}


def _unpack_reports(artefact: Artefact) -> tuple[PredictorReport, ...]:
    return tuple(PredictorReport(**report) for report in artefact.record["reports"])


def pack_placement(placement: Placement) -> Artefact:
    """The placement as an artefact: a record with a neuron table (the hot ones' numbers) for each layer."""
    record = {
        field: getattr(placement, field) for field in Placement.__dataclass_fields__ if field != "hot_mask"
    }
    tables = [{"neurons": len(mask), "hot_ids": np.flatnonzero(mask).tolist()} for mask in placement.hot_mask]
    return Artefact({}, record | {"layers": tables})


@unpacking("placement.json")
def unpack_placement(artefact: Artefact, neurons: Sequence[int]) -> Placement:
    """The reverse of `pack_placement`.

    Args:
        artefact: of a placement.
        neurons: of each layer of the model.

    Raises:
        ValueError: something is missing, or a layer's neuron table is of another width, or has an id twice or
            out of range.
    """
    record = dict(artefact.record)
    limits, tables = tuple(record.pop("limits")), record.pop("layers")
    widths = [table["neurons"] for table in tables]
    if widths != list(neurons):
        raise ValueError(
            f"it has neuron tables for layers of {widths} neurons, the model's have {list(neurons)}"
        )
    masks = tuple(np.zeros(width, bool) for width in widths)
    for layer, (mask, table) in enumerate(zip(masks, tables, strict=True)):
        ids = table["hot_ids"]
        if not all(type(i) is int and 0 <= i < len(mask) for i in ids) or len(set(ids)) != len(ids):
            raise ValueError(f"layer {layer}'s neuron table has an id twice or outside 0..{len(mask) - 1}")
        mask[ids] = True
    return Placement(hot_mask=masks, limits=limits, **record)
