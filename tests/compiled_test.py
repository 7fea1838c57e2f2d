"""A second process compiles nothing anew; a cache that is broken, shared or unwanted changes no result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pjax.compiled import cache_folder
from tests.tiny import tiny_llama

GENERATE = """
import collections, json, sys
import jax
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.split("/")[-1]]))
import pjax
ids = [pjax.LLM(sys.argv[1]).generate([3, 4, 5], max_new_tokens=4, temperature=t, seed=0).ids for t in (0, 1)]
used = counts["compile_requests_use_cache"], counts["cache_hits"], counts["cache_misses"]
print(json.dumps({"ids": ids, "used": used, "folder": jax.config.values["jax_compilation_cache_dir"]}))
"""
COMPILE = """
import json
import jax
from pjax.compiled import keep_compiled
keep_compiled()
jax.jit(lambda x: x + 1)(1)
print(json.dumps(jax.config.values["jax_compilation_cache_dir"]))
"""


def start(code: str, model: Path, cache: Path, **environment: str) -> subprocess.Popen:
    # As a user has it who has set nothing: without what tests/conftest.py sets about the cache.
    names = [name for name in os.environ if "CACHE" not in name and name != "PYTHONWARNINGS"]
    environment = {name: os.environ[name] for name in names} | {"XDG_CACHE_HOME": str(cache)} | environment
    command = [sys.executable, "-c", code, str(model)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen) -> tuple[Any, str]:
    """(what the program printed, its warnings)."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out), err


def test_a_second_process_compiles_nothing(tmp_path):
    """Two at the same time fill the cache; then all is there, until it is damaged."""
    tiny_llama(tmp_path / "model")
    cache = tmp_path / "cache"
    first, other = (finish(p)[0] for p in [start(GENERATE, tmp_path / "model", cache) for _ in range(2)])
    assert first["ids"] == other["ids"] and len(first["ids"][0]) == 4
    second, errors = finish(start(GENERATE, tmp_path / "model", cache))
    requests, hits, misses = second["used"]
    assert requests == hits > 5 and misses == 0 and second["ids"] == first["ids"] and not errors
    assert Path(second["folder"]).parent == cache / "pjax"
    for file in Path(second["folder"]).iterdir():
        file.write_bytes(file.read_bytes()[:50])
    third, _ = finish(start(GENERATE, tmp_path / "model", cache))
    assert third["ids"] == first["ids"] and third["used"][1] == 0


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/dev/null"}, None),
        ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, None),
        ({"JAX_COMPILATION_CACHE_DIR": "own"}, "own"),
    ],
)
def test_an_unwanted_or_useless_cache_is_left_alone(environment, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, errors = finish(start(COMPILE, tmp_path, tmp_path / "cache", **environment))
    assert found == folder and not errors
    assert not (tmp_path / "cache").exists()


def test_the_folder_is_private_and_there_is_none_where_it_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder()
    assert folder is not None and folder.stat().st_mode & 0o77 == 0 and cache_folder() == folder
    monkeypatch.setattr("os.getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert cache_folder() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder() is None
