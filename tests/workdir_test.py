"""Artefacts come back as they were, or not at all: after a crash, a full disk, or a flipped bit."""

import errno
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax import workdir
from pjax.base import (
    ActivationStats,
    LowRankPredictor,
    Placement,
    PredictorReport,
    Predictors,
    ScoreHistogram,
    SignPredictor,
)
from pjax.predictor import with_dtype
from pjax.thresholds import NUM_BINS, set_recall
from pjax.workdir import Artefact, fingerprint, load, save, write_atomically

ARTEFACT = Artefact({"a.0": np.arange(40), "a.1": np.float32([[1, 2], [3, 4]])}, {"text": "é", "n": [1, 2.5]})


FILES = [(".npz", ARTEFACT), (".json", Artefact({}, ARTEFACT.record))]
"""An artefact of each kind, and the name's ending of the file that holds it."""


def assert_same(found: Artefact | None, expected: Artefact):
    assert found is not None
    assert found.record == expected.record
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def through_file(folder, artefact: Artefact) -> Artefact:
    save(folder, "stage", "x", artefact)
    found = load(folder, "stage", "x")
    assert found is not None
    return found


def test_stats_round_trip(tmp_path):
    stats = ActivationStats(tuple(np.arange(n, dtype=np.int64) * 2**40 for n in (3, 5, *[2] * 10)), 2**41)
    found = workdir.unpack_stats(through_file(tmp_path, workdir.pack_stats(stats)))
    assert found.num_tokens == stats.num_tokens
    assert [c.tolist() for c in found.counts] == [c.tolist() for c in stats.counts]
    assert all(c.dtype == np.int64 for c in found.counts)


@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_predictors_of_other_types_round_trip(tmp_path, dtype):
    rng = np.random.default_rng(0)
    parts = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 64), (5, 32), (5,), ()))
    layer = with_dtype(LowRankPredictor(*parts), dtype)
    artefact = through_file(tmp_path, workdir.pack_predictors(Predictors((layer,) * 2, ())))
    for found in workdir.unpack_predictors(artefact).layers:
        assert jax.tree.structure(found) == jax.tree.structure(layer)
        for array, expected in zip(jax.tree.leaves(found), jax.tree.leaves(layer), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_predictors_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    layers = tuple(
        LowRankPredictor(
            *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3), (n, 2), (n,), ())), which
        )
        for n, which in ((4, "normed"), (5, "residual"), (6, "normed"))
    )
    reports = tuple(
        PredictorReport(2, 1 / 3, 0.5, 0.25, 0.125, -1e9, 60 + i, 0.75, "lowrank") for i in range(3)
    )
    found = workdir.unpack_predictors(
        through_file(tmp_path, workdir.pack_predictors(Predictors(layers, reports)))
    )
    assert found.reports == reports
    for layer, expected in zip(found.layers, layers, strict=True):
        assert layer.input == expected.input
        for field in ("first", "second", "bias", "threshold"):
            array = getattr(layer, field)
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, np.asarray(getattr(expected, field)))


def test_other_kinds_and_thresholds_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    signs = SignPredictor(
        jnp.asarray(rng.integers(0, 2**32, (5, 2)), jnp.uint32), jnp.float32(0.1), jnp.ones(5), jnp.float32(1)
    )
    histograms = tuple(
        ScoreHistogram(rng.integers(0, 9, (2, NUM_BINS)), rng.random(NUM_BINS)) for _ in range(2)
    )
    kept = Predictors((signs, None), (), histograms)
    found = workdir.unpack_predictors(through_file(tmp_path, workdir.pack_predictors(kept)))
    assert jax.tree.structure(found.layers) == jax.tree.structure(kept.layers)
    assert all(map(np.array_equal, jax.tree.leaves(found.layers), jax.tree.leaves(kept.layers)))
    assert all(map(np.array_equal, jax.tree.leaves(found.histograms), jax.tree.leaves(histograms)))
    chosen = set_recall(kept, 0.7)
    again = workdir.unpack_thresholds(through_file(tmp_path, workdir.pack_thresholds(chosen)), found)
    assert again.reports == chosen.reports and again.layers[1] is None
    assert float(again.layers[0].threshold) == float(chosen.layers[0].threshold)


def test_placement_round_trip(tmp_path):
    masks = (np.array([True, False, True]), np.zeros(4, bool), np.ones(2, bool))
    placement = Placement(
        masks, "feasible", 1 / 3, 0.5, 10, 20, 0.125, "latency", ("budget", "minimum", "all hot")
    )
    found = workdir.unpack_placement(through_file(tmp_path, workdir.pack_placement(placement)), (3, 4, 2))
    assert [m.tolist() for m in found.hot_mask] == [m.tolist() for m in masks]
    assert all(m.dtype == bool for m in found.hot_mask)
    assert found.__dict__ | {"hot_mask": None} == placement.__dict__ | {"hot_mask": None}


@pytest.mark.parametrize("ids", [[0, 0], [-1], [3], [1, 2, 1], [1.5], [True], "ab"])
def test_placement_with_a_senseless_table_is_refused(ids):
    artefact = workdir.pack_placement(Placement((np.ones(3, bool),), "optimal", 0, 0, 0, 0, 0))
    artefact.record["layers"][0]["hot_ids"] = ids
    with pytest.raises(ValueError, match=r"layer 0's neuron table has an id twice or outside 0\.\.2"):
        workdir.unpack_placement(artefact, (3,))


MASK = np.array([True, False, True])
SIGNS = SignPredictor(np.zeros((3, 1), np.uint32), np.float32(0.1), np.ones(3), np.float32(1))
REPORT = PredictorReport(0, 1.0, 0.5, 0.5, 0.25, 1.0, 24, 1.0, "sign")
KEPT = Predictors((SIGNS,), (REPORT,), (ScoreHistogram(np.ones((2, NUM_BINS)), np.ones(NUM_BINS)),))
WHOLE = {
    "profile.npz": (workdir.pack_stats(ActivationStats((MASK.astype(int),), 3)), workdir.unpack_stats),
    "predictors.npz": (workdir.pack_predictors(KEPT), workdir.unpack_predictors),
    "thresholds.json": (workdir.pack_thresholds(KEPT), lambda part: workdir.unpack_thresholds(part, KEPT)),
    "placement.json": (
        workdir.pack_placement(Placement((MASK,), "optimal", 0, 0, 0, 0, 0)),
        lambda part: workdir.unpack_placement(part, (3,)),
    ),
}
"""By the files that they are in: artefacts, and what reads them."""


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("profile.npz", "num_tokens"),
        ("predictors.npz", "layers"),
        ("predictors.npz", "reports"),
        ("thresholds.json", "reports"),
        ("placement.json", "layers"),
        ("placement.json", "limits"),
        ("placement.json", "status"),
    ],
)
def test_whole_artefact_that_lacks_something_is_refused(file, key):
    artefact, unpack_fn = WHOLE[file]
    unpack_fn(artefact)
    del (record := dict(artefact.record))[key]
    with pytest.raises(ValueError, match=f"workdir's {file} is not as .*{key}.*; delete it, and pjax.run"):
        unpack_fn(artefact._replace(record=record))


def test_the_format_stands_for_this_layout():
    """Whoever changes what is written changes FORMAT too, and then this list."""
    found = {file: " ".join([*artefact.arrays, *artefact.record]) for file, (artefact, _) in WHOLE.items()}
    assert workdir.FORMAT == 2
    assert found == {
        "profile.npz": "counts.0 num_tokens num_tokens_known",
        "predictors.npz": "bits.0 slope.0 bias.0 threshold.0 counts.0 contributions.0 layers reports",
        "thresholds.json": "reports",
        "placement.json": "status objective bound device_bytes budget_bytes solve_s goal limits next_gib"
        " layers",
    }
    assert list(WHOLE["thresholds.json"][0].record["reports"][0]) == [
        "rank", "recall", "precision", "density", "true_density", "threshold", "bytes",
        "contribution_recall", "kind",
    ]  # fmt: skip


@pytest.mark.parametrize(("suffix", "artefact"), FILES)
def test_artefact_of_another_format_is_noted_and_not_used(tmp_path, monkeypatch, caplog, suffix, artefact):
    monkeypatch.setattr(workdir, "FORMAT", workdir.FORMAT - 1)
    save(tmp_path, "stage", "x", artefact)
    assert_same(load(tmp_path, "stage", "x"), artefact)
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, "stage", "x") is None
    assert_noted(caplog, tmp_path / f"stage{suffix}")


@pytest.mark.parametrize("neurons", [(3,), (3, 3, 3), (3, 4), (4, 3)])
def test_placement_of_other_layers_is_refused(neurons):
    artefact = workdir.pack_placement(Placement((np.ones(3, bool),) * 2, "optimal", 0, 0, 0, 0, 0))
    with pytest.raises(ValueError, match=r"tables for layers of \[3, 3\] neurons, the model's have \["):
        workdir.unpack_placement(artefact, neurons)


BASE = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "other",
    [
        (np.nextafter(BASE, np.float32(9)), "x"),
        (BASE.reshape(3, 2), "x"),
        (BASE.reshape(-1), "x"),
        (BASE.view(np.int32), "x"),
        (BASE.astype(np.float64), "x"),
        (BASE.astype(">f4"), "x"),
        (BASE.T, "x"),
        (BASE, "y"),
        (BASE, ["x"]),
        ("x", BASE),
        (BASE,),
        (BASE, "x", None),
    ],
)
def test_fingerprint_changes(other):
    assert fingerprint(*other) != fingerprint(BASE, "x")


def test_fingerprint_changes_with_every_byte():
    base = np.arange(24, dtype=np.uint8).view(np.int64)
    found = {fingerprint(base)}
    for i in range(24):
        other = base.copy()
        other.view(np.uint8)[i] ^= 1
        found.add(fingerprint(other))
    assert len(found) == 25


def test_fingerprint_sees_values_not_memory():
    assert fingerprint(BASE) == fingerprint(BASE.copy(order="F")) == fingerprint(np.pad(BASE, 1)[1:-1, 1:-1])
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    for odd in (np.zeros((0, 3)), np.zeros((3, 0)), np.array(1, np.float32), np.zeros(2, bool)):
        assert fingerprint(odd) != fingerprint(BASE)


def test_load_by_fingerprint(tmp_path):
    assert load(tmp_path, "stage", None) is None
    save(tmp_path, "stage", "abc", ARTEFACT)
    assert_same(load(tmp_path, "stage", "abc"), ARTEFACT)
    assert_same(load(tmp_path, "stage", None), ARTEFACT)
    assert load(tmp_path, "stage", "abd") is None
    assert load(tmp_path, "other", "abc") is None
    save(tmp_path, "empty", "abc", Artefact({}, {}))
    assert_same(load(tmp_path, "empty", "abc"), Artefact({}, {}))


def test_an_artefact_of_the_other_kind_replaces_the_old_one(tmp_path):
    for (suffix, artefact), made_from in zip(FILES + FILES, "abcd", strict=True):
        save(tmp_path, "stage", made_from, artefact)
        assert os.listdir(tmp_path) == [f"stage{suffix}"]
        assert_same(load(tmp_path, "stage", made_from), artefact)


def assert_noted(caplog, path):
    assert [str(path) in record.message and "damaged" in record.message for record in caplog.records] == [
        True
    ]
    caplog.clear()


@pytest.mark.parametrize(("suffix", "artefact"), FILES)
def test_truncated_file_is_noted_and_not_used(tmp_path, caplog, suffix, artefact):
    save(tmp_path, "stage", "x", artefact)
    file = tmp_path / f"stage{suffix}"
    content = file.read_bytes()
    with caplog.at_level(logging.WARNING):
        for size in (*range(0, len(content), 37), len(content) - 1):
            file.write_bytes(content[:size])
            assert load(tmp_path, "stage", "x") is None
            assert_noted(caplog, file)


@pytest.mark.parametrize(("suffix", "artefact"), FILES)
def test_flipped_bit_is_never_used(tmp_path, suffix, artefact):
    save(tmp_path, "stage", "x", artefact)
    file = tmp_path / f"stage{suffix}"
    content = file.read_bytes()
    rejected = 0
    for i in range(0, len(content), 3):
        for bit in (1, 32):
            damaged = bytearray(content)
            damaged[i] ^= bit
            file.write_bytes(damaged)
            found = load(tmp_path, "stage", "x")
            if found is not None:  # the zip's own dates and attributes carry nothing
                assert_same(found, artefact)
            rejected += found is None
    assert rejected > len(content) / 3


@pytest.mark.parametrize("name", ["stage.npz", "stage.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\x80\x04N.", b"\x93NUMPY", b"PK\x03\x04"])
def test_foreign_file_is_noted_and_not_used(tmp_path, caplog, content, name):
    (tmp_path / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, "stage", "x") is None
    assert_noted(caplog, tmp_path / name)


def test_npy_and_npz_of_others_are_not_used(tmp_path):
    with open(tmp_path / "stage.npz", "wb") as file:
        np.save(file, BASE)
    assert load(tmp_path, "stage", None) is None
    np.savez(tmp_path / "stage.npz", a=BASE)
    assert load(tmp_path, "stage", None) is None


@pytest.mark.parametrize("broken", ["open", "fsync", "replace"])
def test_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    save(tmp_path, "stage", "x", ARTEFACT)

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if broken == "open":
        monkeypatch.setattr("builtins.open", fail)
    else:
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match=r"could not write .*stage\.npz: No space left on device") as raised:
        save(tmp_path, "stage", "y", Artefact({"b": BASE}, {}))
    monkeypatch.undo()
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["stage.npz"]
    assert_same(load(tmp_path, "stage", "x"), ARTEFACT)


def test_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    save(tmp_path, "stage", "x", ARTEFACT)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, "stage", "y", Artefact({"b": BASE}, {}))
    assert os.listdir(tmp_path) == ["stage.npz"]
    assert_same(load(tmp_path, "stage", "x"), ARTEFACT)


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match=r"could not write .*report\.json: No such file or directory"):
        write_atomically(tmp_path / "missing" / "report.json", b"{}")


WRITER = """
import sys
from pathlib import Path
from pjax.workdir import Artefact, save
for turn in range(50):
    save(Path(sys.argv[1]), "stage", sys.argv[2], Artefact({}, {"by": sys.argv[2]}))
"""


def test_two_processes_leave_one_valid_artefact(tmp_path):
    save(tmp_path, "stage", "x", Artefact({}, {"by": "x"}))
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in "xy"]
    while any(writer.poll() is None for writer in writers):
        found = load(tmp_path, "stage", None)
        assert found is not None and found.record["by"] in "xy"
    assert [writer.returncode for writer in writers] == [0, 0]
    by_x, by_y = load(tmp_path, "stage", "x"), load(tmp_path, "stage", "y")
    assert (by_x is None) != (by_y is None)
    assert os.listdir(tmp_path) == ["stage.json"]


def test_leftovers_of_dead_processes_only_are_removed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    removed = [f".report.json.{pid}.tmp" for pid in (dead.pid, 2**31 - 1, 10**30)]
    kept = [
        f".report.json.{os.getppid()}.tmp",
        ".report.json.old.tmp",
        f".other.json.{dead.pid}.tmp",
        "a.tmp",
    ]
    for name in removed + kept:
        (tmp_path / name).write_bytes(b"half")
    write_atomically(tmp_path / "report.json", b"whole")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "report.json"])
    assert (tmp_path / "report.json").read_bytes() == b"whole"


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from pjax.workdir import Artefact, save
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
save(Path(sys.argv[1]), "stage", "y", Artefact({"b": np.ones(3)}, {"text": "new"}))
"""


def test_killed_in_the_middle_of_a_write(tmp_path):
    save(tmp_path, "stage", "x", ARTEFACT)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert len(os.listdir(tmp_path)) == 2  # the old file and a temporary one
    assert load(tmp_path, "stage", "y") is None
    assert_same(load(tmp_path, "stage", "x"), ARTEFACT)
    save(tmp_path, "stage", "y", ARTEFACT)
    assert os.listdir(tmp_path) == ["stage.npz"]
    assert_same(load(tmp_path, "stage", "y"), ARTEFACT)
