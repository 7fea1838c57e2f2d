"""`python -m pjax.run` as a user meets it: on the demo model, with less text than the quickstart."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pjax
from pjax.workdir import FORMAT, load, save, unpack_placement, unpack_predictors, unpack_thresholds

ROOT = Path(__file__).parents[1]
PROMPT = 'class Stack:\n    """A stack of items."""\n\n    def push(self'
OPTIONS = {"max_new_tokens": 8, "repetition_penalty": 1.15}
SMALL = (
    "--config=configs/quickstart.py",
    "--config.profile.num_tokens=2048",
    "--config.predictor.dtype=bfloat16",  # whose training compiles half as many programs
    "--config.quality.num_tokens=1024",
    "--config.generate.max_new_tokens=8",
    "--config.quality.max_perplexity_rise=1.0",  # so little text trains poor predictors
    "--config.quality.max_kl=1.0",
)


def start(*args: str, **options) -> subprocess.Popen:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "pjax.run", *args]
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, **options)


def run(*args: str) -> tuple[int, str, str]:
    process = start(*args)
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """A workdir whose first run was killed in the middle of its work."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    process = start(*SMALL, f"--workdir={folder}")
    while not (folder / "profile.npz").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (folder / "profile.npz").exists() and not (folder / "report.json").exists()
    return folder


@pytest.fixture(scope="module")
def first(workdir) -> tuple[str, str, dict]:
    """(text, messages, report) of the run that finishes the killed one's work."""
    code, out, err = run(*SMALL, f"--workdir={workdir}")
    assert code == 0, err
    return out, err, json.loads((workdir / "report.json").read_text())


def test_it_resumes_and_does_every_other_stage(first):
    text, messages, report = first
    stages = [line.split("] ")[1] for line in messages.splitlines() if line.startswith("[")]
    # The killed run may have got as far as the placement.
    stages = [name for name in stages if name != "placement"]
    assert stages == ["load", "predictors", "thresholds", "quality", "speed"]
    assert text == report["text"] + "\n" and text.startswith(PROMPT)
    assert "simulated" in messages
    assert "\nmode predicted, a token: predictors " in messages and "MB read\n" in messages


def test_the_report_is_whole_and_consistent(first):
    report = first[2]
    assert list(report) == [
        "model", "profile", "predictor", "hardware", "placement", "quality",
        "executor", "speed", "decode", "text",
    ]  # fmt: skip
    layers, neurons = report["model"]["layers"], report["model"]["neurons"]
    predictor, quality, placement = report["predictor"], report["quality"], report["placement"]
    assert len(predictor["per_layer"]) == len(neurons) == layers
    assert math.isclose(predictor["recall_mean"], np.mean([r["recall"] for r in predictor["per_layer"]]))
    assert all(r["recall"] >= 0.96 for r in predictor["per_layer"])
    assert math.isclose(quality["perplexity_exact"], quality["perplexity_dense"], rel_tol=1e-5)
    assert quality["perplexity_predicted"] != quality["perplexity_dense"]
    assert report["hardware"] == {"name": "demo", "source": "simulated"}
    assert placement["device_bytes"] <= placement["budget_bytes"]
    assert sum(hot > 0 for hot in placement["hot_neurons"]) >= 3
    assert placement["goal"] == "latency" and placement["bound"] <= placement["objective"] * (1 + 1e-9)
    assert math.isclose(placement["objective"], placement["step_s"])
    assert [layer["hot"] for layer in placement["per_layer"]] == placement["hot_neurons"]
    assert {layer["limit"] for layer in placement["per_layer"]} <= {"budget", "all hot", "no gain"}
    assert placement["step_s"] < placement["all_cold_s"]
    executor, decode = report["executor"], report["decode"]
    assert executor["kind"] == "two programs" and len(executor["timeline"]) == layers
    assert 0 < executor["neuron_load_share"] < 1
    assert 0 < decode["rows_active"] <= decode["rows_computed"] <= decode["rows_predicted"] < sum(neurons)


def test_the_workdir_agrees_with_the_report(first, workdir):
    report = first[2]
    predictors = unpack_predictors(load(workdir, "predictors", None))
    predictors = unpack_thresholds(load(workdir, "thresholds", None), predictors)
    assert not (workdir / "predictors.checkpoints").exists()
    assert [r._asdict() for r in predictors.reports] == report["predictor"]["per_layer"]
    page = (workdir / "report.html").read_text()
    assert "<h1>demo: pjax report</h1>" in page and f"{report['speed']['dense_tokens_per_s']:,.1f}" in page
    placement = unpack_placement(load(workdir, "placement", None), (1024,) * 6)
    assert [int(mask.sum()) for mask in placement.hot_mask] == report["placement"]["hot_neurons"]


def test_a_second_run_reuses_all_of_it(first, workdir):
    code, out, err = run(*SMALL, f"--workdir={workdir}", "--json")
    assert code == 0, err
    stages = [line.split("] ")[1] for line in err.splitlines() if line.startswith("[")]
    assert stages == ["load"]
    assert json.loads(out) == first[2]


def test_damaged_weights_are_made_again(first, workdir):
    file = workdir / "weights.pack"
    sound = file.read_bytes()
    file.write_bytes(sound[:-100])
    assert PROMPT + pjax.LLM(workdir).generate(PROMPT, **OPTIONS).text == first[2]["text"]
    assert file.read_bytes() == sound[:-100]  # `LLM` never writes
    code, _, err = run(*SMALL, f"--workdir={workdir}")
    assert code == 0 and "weights.pack is damaged" in " ".join(err.split()), err
    assert file.read_bytes() == sound


def test_other_settings_make_again_only_what_depends_on_them(first, workdir, tmp_path):
    other = shutil.copytree(workdir, tmp_path / "other")  # the other tests expect their own settings' work
    code, out, err = run(
        *SMALL,
        f"--workdir={other}",
        "--config.placement.device_bytes=0",
        "--config.mode=exact",
        "--config.activation=relu",
        "--prompt=import os",
        "--json",
    )
    assert code == 0, err
    stages = [line.split("] ")[1] for line in err.splitlines() if line.startswith("[")]
    assert stages == ["load", "placement", "speed"]
    report = json.loads(out)
    assert sum(report["placement"]["hot_neurons"]) == 0 and report["executor"]["kind"] == "one program"
    assert report["text"].startswith("import os")
    assert "mode exact" in err and "emulated" not in err and "all neurons stay on the host" in err


def test_the_plan_is_printed_without_loading_a_weight(tmp_path):
    code, out, err = run(*SMALL, f"--workdir={tmp_path}", "--plan", "--config.placement.device_bytes=28MiB")
    assert (code, err) == (0, "")
    rows = {line.split("  ")[1].strip(): line.split()[-4:] for line in out.splitlines() if "MiB" in line}
    assert rows["together"][:2] == ["28.0", "MiB"] and list(tmp_path.iterdir()) == []
    assert {"predictors", "attention", "workspace", "FFN, hot and cold", "reserve"} <= rows.keys()
    code, out, err = run(*SMALL, f"--workdir={tmp_path}", "--plan", "--config.placement.device_bytes=3MiB")
    assert (code, out) == (2, "") and "3145728 bytes are less than the" in err


def test_llm_opens_the_workdir_and_continues_as_run_did(first, workdir):
    llm = pjax.LLM(workdir)
    assert llm.mode() == "predicted" and llm.predictors is not None
    generation = llm.generate(PROMPT, **OPTIONS)
    assert PROMPT + generation.text == first[2]["text"]
    assert "".join(llm.stream(PROMPT, **OPTIONS)) == generation.text
    dense, exact = (
        llm.generate(["import", "def main("], max_new_tokens=8, mode=mode) for mode in ("dense", "exact")
    )
    assert [g.ids for g in dense] == [g.ids for g in exact]


def test_llm_refuses_a_workdir_of_other_weights(first, workdir, tmp_path):
    manifest = json.loads((workdir / "workdir.json").read_text())
    for file in [*workdir.glob("*.npz"), *workdir.glob("*.json")]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "workdir.json").write_text(json.dumps(manifest | {"fingerprint": "0"}))
    with pytest.raises(ValueError, match="was prepared from other weights"):
        pjax.LLM(tmp_path)
    for name, wrong in {
        "model": None,
        "activation": 1,
        "mode": "x",
        "made_from": {"placement": None},
    }.items():
        (tmp_path / "workdir.json").write_text(json.dumps(manifest | {name: wrong}))
        with pytest.raises(ValueError, match=rf"workdir.json: {name} is .*; run pjax.run on"):
            pjax.LLM(tmp_path)
    (tmp_path / "workdir.json").write_text(json.dumps(manifest | {"format": FORMAT - 1}))
    with pytest.raises(ValueError, match=rf"format {FORMAT}, got .* format {FORMAT - 1}; run pjax.run on"):
        pjax.LLM(tmp_path)


def test_llm_refuses_a_whole_artefact_that_lacks_something(first, workdir, tmp_path):
    for file in (*workdir.glob("*.npz"), *workdir.glob("*.json"), workdir / "weights.pack"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    made_from = json.loads((workdir / "workdir.json").read_text())["made_from"]["placement"]
    placement = load(workdir, "placement", made_from)
    del placement.record["layers"]
    save(tmp_path, "placement", made_from, placement)
    with pytest.raises(
        ValueError, match="workdir's placement.json .* lacks 'layers'; delete it, and pjax.run"
    ):
        pjax.LLM(tmp_path)
    (tmp_path / "placement.json").unlink()
    (tmp_path / "predictors.npz").write_bytes(b"damaged")
    with pytest.raises(
        ValueError, match="expected predictors and placement of the run .* run pjax.run on it"
    ):
        pjax.LLM(tmp_path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--config=configs/nowhere.py",), "nowhere.py"),
        ((), "--config is missing"),
        (("--config=configs/quickstart.py", "--config.prompts=x"), "prompts"),
        (("--config=configs/quickstart.py", "--config.profile.num_tokens=many"), "num_tokens"),
        (("--config=configs/quickstart.py", "--config.predictor.recall=1.5"), "config.predictor.recall"),
        (("--config=configs/quickstart.py", "--config.model=/nowhere/at/all"), "/nowhere/at/all"),
        (("--config=configs/quickstart.py", "--config.hardware=abacus"), "abacus"),
        (
            ("--config=configs/quickstart.py", "--config.hardware={folder}"),
            "config.hardware: {folder}: expected",
        ),
        (("--config=configs/quickstart.py", "--workdirr=x"), "workdirr"),
        (("--config=configs/quickstart.py", f"--prompt={'import os ' * 300}"), "context"),
        (("--config=configs/quickstart.py", "--config.dtype=int3"), "config.dtype"),
        (("--config=configs/quickstart.py", "--config.placement.device_bytes=much"), "device_bytes"),
        (("--config=configs/quickstart.py", "--config.generate.top_p=2.0"), "top_p"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(args, message, tmp_path):
    (folder := tmp_path / "machine.toml").mkdir()
    args, message = [arg.format(folder=folder) for arg in args], message.format(folder=folder)
    code, out, err = run(*args, *(() if "--workdirr=x" in args else (f"--workdir={tmp_path}",)))
    lines = [line for line in err.splitlines() if line and not line.startswith("[")]
    assert (code, out, len(lines)) == (2, "", 1), err
    assert message in lines[0]


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="started where interrupts are ignored"
)
def test_interrupted_by_the_user_it_exits_130(tmp_path):
    process = start(*SMALL, f"--workdir={tmp_path}")
    assert any("load" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130


def test_gpu_check_passes_over_emulated_devices(first, workdir):
    """Ids and logits of the shipped model, every mode, 0 %, 37 % and 100 % hot."""
    command = [sys.executable, "-m", "experiments.gpu_check", f"--workdir={workdir}", "--devices=emulated"]
    result = subprocess.run([*command, "--tokens=8"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("passed\n"), result.stdout + result.stderr
    assert result.stdout.count("ids equal") == 9 and "our kernel" in result.stdout
