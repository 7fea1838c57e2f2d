"""`python -m pjax.perplexity` as a user meets it, on the demo model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = (
    "--config=configs/quickstart.py",
    "--config.profile.num_tokens=2048",
    "--config.predictor.kind=sign",  # which takes no training
)


def perplexity(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pjax.perplexity", *SMALL, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs") / "demo"


@pytest.fixture(scope="module")
def first(workdir) -> subprocess.CompletedProcess:
    """In a workdir that has nothing yet; two batches of four chunks."""
    result = perplexity(f"--workdir={workdir}", "--config.quality.num_tokens=4096", "--json")
    assert result.returncode == 0, result.stderr
    return result


def test_json_has_every_mode_and_layer(first):
    found = json.loads(first.stdout)
    assert (found["model"], found["chunk_tokens"], found["chunks"], found["tokens"]) == ("demo", 512, 8, 2048)
    assert found["text"].endswith("evaluation.txt")
    assert list(found["modes"]) == ["dense", "exact", "predicted"]
    dense, exact, predicted = found["modes"].values()
    assert exact["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-5)
    assert abs(predicted["kl_mean"]) > 100 * abs(exact["kl_mean"])
    assert 0.8 < predicted["top1_agreement"] < 1
    assert predicted["perplexity"] == pytest.approx(dense["perplexity"] * (1 + predicted["rise"]), rel=1e-9)
    assert 0 < predicted["rise_error"] * dense["perplexity"] < dense["error"]
    assert len(exact["layer_error"]) == len(predicted["layer_error"]) == 6
    assert max(exact["layer_error"]) < 1e-5 < 1e-3 < min(predicted["layer_error"])
    assert found["perplexity_predicted"] == predicted["perplexity"] and found["guard"] in ("passed", "failed")


def test_it_makes_what_is_missing_and_tells_of_its_estimates(first, workdir):
    stages = [line.split("] ")[1] for line in first.stderr.splitlines() if line.startswith("[")]
    assert stages == ["load", "profile", "predictors", "thresholds", "perplexity"]
    estimates = [line for line in first.stderr.splitlines() if " tokens: dense " in line]
    assert [line.split()[0] for line in estimates] == ["1,024", "2,048"]
    dense = json.loads(first.stdout)["modes"]["dense"]
    assert f"dense {dense['perplexity']:.4f} +- {dense['error']:.4f}, exact " in estimates[-1]
    # It measures, and leaves the stages of a run to the run.
    assert not (workdir / "quality.json").exists() and not (workdir / "workdir.json").exists()


def test_another_text_in_a_prepared_workdir_gives_a_table(first, workdir, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 80)
    result = perplexity(f"--workdir={workdir}", f"--text={text}")
    assert result.returncode == 0, result.stderr
    assert [line.split("] ")[1] for line in result.stderr.splitlines() if line.startswith("[")] == [
        "load", "perplexity"
    ]  # fmt: skip
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert float(rows["dense"][1]) == pytest.approx(float(rows["exact"][1]), rel=1e-4)
    assert len(rows["predicted"]) == 7 and rows["dense"][3:] == ["-"] * 4
    assert rows["5"][-1] == "%"  # the last layer's error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--text=/nowhere.txt",), "/nowhere.txt"),
        (("--config.quality.num_tokens=100",), "quality.text: perplexity needs at least one chunk"),
        (("--config.mode=fast",), "config.mode"),
        (("--txt=x",), "txt"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(args, message, tmp_path):
    result = perplexity(f"--workdir={tmp_path}", *args)
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith("[")]
    assert (result.returncode, result.stdout, len(lines)) == (2, "", 1), result.stderr
    assert message in lines[0] and lines[0].startswith("pjax.perplexity: ")
