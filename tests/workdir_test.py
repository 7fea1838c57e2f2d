"""Artefacts come back as they were, or not at all: after a crash, a full disk, or a flipped bit."""

import errno
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from pjax import workdir
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


@pytest.mark.parametrize(("suffix", "artefact"), FILES)
def test_artefact_of_another_format_is_noted_and_not_used(tmp_path, monkeypatch, caplog, suffix, artefact):
    monkeypatch.setattr(workdir, "FORMAT", workdir.FORMAT - 1)
    save(tmp_path, "stage", "x", artefact)
    assert_same(load(tmp_path, "stage", "x"), artefact)
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, "stage", "x") is None
    assert_noted(caplog, tmp_path / f"stage{suffix}")


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
