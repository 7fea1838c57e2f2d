"""pjax in the lm-evaluation-harness, on tasks in local files; without network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_powerinfer import write_all

ROOT = Path(__file__).parents[1]
TEXTS = ["the quick brown fox jumps over the lazy dog", "a lazy fox", "over the dog"]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": [" dog", " quick fox"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "continued": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_without_the_harness_it_says_what_to_install(tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError('not here')")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "pjax.evaluate", "--model", "pjax"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "pip install 'pjax[eval]'" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed (pjax[eval])")
    import pjax.harness

    return pjax.harness


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny model with predictors in its file, so that it has all three modes."""
    return write_all(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, task in TASKS.items():
        values = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(values | {"test_split": "train"} | task))
    return folder


def requests(kind: str, *args):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arg, i) for i, arg in enumerate(args)]


def log_probs(lm, ids: list[int]) -> np.ndarray:
    """float64 [len(ids) - 1]: of each id behind those before it, by the mode's own FFN."""
    row = np.asarray(ids, np.int32)[None, :-1]
    logits = np.asarray(lm.llm.model(row, lm.way.make_fn(lm.way.arrays)), np.float64)[0]
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_answers_are_those_of_the_modes_logits(harness, files, mode):
    lm = harness.PjaxLM(str(files.model), mode=mode)
    assert lm.mode == mode
    encode = lm.llm.tokenizer.encode
    pairs = [("the quick", " fox"), ("", "a dog"), ("the lazy ", "dog")]
    found = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (before, after), (score, _) in zip(pairs, found, strict=True):
        ids = encode(before + after)
        scored = len(ids) - len(encode(before.rstrip())) if before else len(ids) - 1
        assert score == pytest.approx(log_probs(lm, ids)[-scored:].sum(), abs=1e-3)

    # Longer than the context of 64: windows whose tokens are all predicted, once each.
    text = "the quick brown fox " * 5
    ids = encode(text)
    rolled = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert len(ids) > 65
    last = log_probs(lm, ids[-65:])[-(len(ids) - 65) :]
    assert rolled == [pytest.approx(log_probs(lm, ids[:65]).sum() + last.sum(), abs=1e-3)]

    options = {"until": ["q"], "max_gen_toks": 5}
    texts = lm.generate_until(
        requests("generate_until", ("a fox", options), ("the", options)), disable_tqdm=True
    )
    assert texts == [
        lm.llm.generate(t, mode=mode, max_new_tokens=5, stop=["q"]).text for t in ("a fox", "the")
    ]


def test_modes_differ_where_they_should(harness, files):
    scores = {}
    for mode in ("dense", "exact", "predicted"):
        lm = harness.PjaxLM(str(files.model), mode=mode)
        pairs = requests("loglikelihood", ("the quick", " brown fox"))
        scores[mode] = lm.loglikelihood(pairs, disable_tqdm=True)[0][0]
    assert scores["exact"] == pytest.approx(scores["dense"], abs=1e-4)
    assert abs(scores["predicted"] - scores["dense"]) > 1e-2


def test_what_cannot_be_done_is_said(harness, files):
    lm = harness.PjaxLM(str(files.model))
    assert lm.mode == "exact"  # nobody measured its predictors
    for options, message in (
        ({"max_gen_toks": 64}, "leave no room"), ({"num_beams": 3}, "not num_beams")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            lm.generate_until(requests("generate_until", ("a fox", options)), disable_tqdm=True)
    with pytest.raises(ValueError, match="has no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="batch_size: expected a number from 1, got 'auto'"):
        harness.PjaxLM(str(files.model), batch_size="auto")


def test_the_command_runs_local_tasks(harness, files, tasks, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [
        sys.executable, "-m", "pjax.evaluate", "--model", "pjax", "--model_args",
        f"path={files.model},mode=predicted", "--tasks", ",".join(TASKS), "--include_path", str(tasks),
        "--output_path", str(tmp_path / "out.json"), "--batch_size", "2",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | offline)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(next(tmp_path.glob("out*.json")).read_text())["results"]
    assert set(found) == set(TASKS)
    lm = harness.PjaxLM(str(files.model), mode="predicted")
    total = sum(log_probs(lm, lm.llm.tokenizer.encode(text)).sum() for text in TEXTS)
    expected = np.exp(-total / sum(map(len, TEXTS)))
    assert found["rolling"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-3)
    assert found["choices"]["acc,none"] in [pytest.approx(n / 3) for n in range(4)]
