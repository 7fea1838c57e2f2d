"""The quality guard end to end: predictors that were deliberately ruined must not answer anybody unasked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pjax
from tests.tiny_powerinfer import PowerInferFiles, write_all

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> PowerInferFiles:
    """A model with a folder of predictors that mark no neuron."""
    return write_all(tmp_path_factory.mktemp("ruined"), "llama", threshold=1e9)


@pytest.fixture(scope="module")
def ran(files) -> tuple[Path, subprocess.CompletedProcess]:
    """The workdir and the messages of a run that was given the ruined predictors."""
    folder = files.model.parent
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    values = {
        "model": files.model, "predictor.path": files.predictors, "profile.text": folder / "text.txt",
        "profile.num_tokens": 512, "quality.text": folder / "text.txt", "quality.num_tokens": 256,
        "hardware": "demo", "generate.max_new_tokens": 4, "prompt": "a fox",
    }  # fmt: skip
    command = [sys.executable, "-m", "pjax.run", "--config=configs/model.py", f"--workdir={folder / 'work'}"]
    command += [f"--config.{key}={value}" for key, value in values.items()]
    return folder / "work", subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_ruined_predictor_trips_the_guard(ran):
    workdir, result = ran
    assert result.returncode == 0, result.stderr
    report = json.loads((workdir / "report.json").read_text())
    quality = report["quality"]
    assert quality["guard"] == "failed" and quality["faults"]
    assert quality["kl_mean"] > 0.02
    errors = quality["modes"]["predicted"]["layer_error"]
    assert errors == pytest.approx([1.0, 1.0])  # nothing of any layer is left
    assert sorted(quality["worst_layers"]) == [0, 1]
    assert max(quality["modes"]["exact"]["layer_error"]) < 1e-5


def test_run_says_so_loudly_and_falls_back(ran):
    _, result = ran
    warning = next(line for line in result.stderr.splitlines() if "QUALITY GUARD FAILED" in line)
    assert "Worst layers by relative output error: " in warning and " (100.0%)" in warning
    assert "mode=None falls back to exact" in warning
    assert "mode exact, first token" in result.stderr


def test_llm_falls_back_too(ran):
    llm = pjax.LLM(ran[0])
    assert llm.mode() == "exact" and llm.predictors is not None
    assert llm.executor().mode == "exact"
    default = llm.generate("a fox", max_new_tokens=4)
    assert default.ids == llm.generate("a fox", max_new_tokens=4, mode="exact").ids
    assert llm.executor("predicted").mode == "predicted"  # whoever asks for it gets it
