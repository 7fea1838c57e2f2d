"""Texts: the three corpora are disjoint, and every kind of file reads as written or says why not."""

import ast
import json
import logging
from importlib.util import find_spec

import pytest

from pjax.formats import text

CORPORA = {
    "training": text.TRAINING_MODULES,
    "calibration": text.CALIBRATION_MODULES,
    "evaluation": text.EVALUATION_MODULES,
}
PAIRS = [("training", "calibration"), ("training", "evaluation"), ("calibration", "evaluation")]


@pytest.mark.parametrize("first, second", PAIRS)
def test_corpora_are_disjoint(first, second):
    """No module, and no file that a module stands for, is in two corpora."""
    assert not set(CORPORA[first]) & set(CORPORA[second])
    files = {name: {f for m in CORPORA[name] for f in text.stdlib_files(m)} for name in (first, second)}
    assert files[first] and files[second]
    assert not files[first] & files[second]


@pytest.mark.parametrize("name", CORPORA)
def test_no_file_is_read_twice(name):
    """Within one corpus too, each file counts once."""
    files = [file for module in CORPORA[name] for file in text.stdlib_files(module)]
    assert len(files) == len(set(files))


@pytest.mark.parametrize("name", ["calibration", "evaluation"])
def test_measured_corpora_exist_in_this_python(name):
    """Each module is where the import system finds it, so numbers do not hang on a skipped one."""
    for module in CORPORA[name]:
        spec = find_spec(module)
        assert spec is not None and spec.origin in {str(f) for f in text.stdlib_files(module)}


@pytest.mark.parametrize("name, least, most", [("calibration", 4e5, 6e5), ("evaluation", 1.5e5, 3e5)])
def test_corpus_sizes(name, least, most):
    """The corpora are large enough to measure on, and small enough to be quick."""
    texts = text.read_texts(f"stdlib:{name}")
    assert least < sum(map(len, texts)) < most
    assert texts == text.read_texts(f"stdlib:{name}")
    for source in texts:
        ast.parse(source)


def test_stdlib_training_has_prose_and_skips_missing(caplog):
    """The manual pages come as text; a module of another Python version is skipped with a note."""
    with caplog.at_level(logging.INFO):
        texts = text.read_stdlib(["no_such_module", "pydoc_data.topics", "abc"])
    assert "no_such_module" in caplog.text
    assert len(texts) == 2
    assert "topics = {" not in texts[0] and "statement" in texts[0]
    assert "class ABCMeta" in texts[1]
    with pytest.raises(ValueError, match="no_such_module"):
        text.read_stdlib(["no_such_module"])


def test_package_tree_leaves_tests_out():
    """A package stands for its whole tree, less what tests it."""
    names = {file.name for file in text.stdlib_files("unittest")}
    assert "mock.py" in names
    assert not any("test" in f.parent.parts[-1:] for f in text.stdlib_files("unittest"))


def test_txt_is_one_text(tmp_path, monkeypatch):
    """A .txt file is one document, found through `~` and variables as well."""
    (tmp_path / "a.txt").write_text("naïve\n\n日本語\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TEXTS", str(tmp_path))
    for source in (tmp_path / "a.txt", "~/a.txt", "$TEXTS/a.txt"):
        assert text.read_texts(source) == ["naïve\n\n日本語\n"]


def test_jsonl_fields(tmp_path):
    """`text` is taken as it is, Alpaca's fields are joined, empty lines do not count."""
    records = [
        {"text": "one\u2028line", "id": 3},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": None},
    ]
    lines = [json.dumps(r, ensure_ascii=False) for r in records]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    assert text.read_texts(tmp_path / "a.jsonl") == ["one\u2028line", "Add.\n\n1 2\n\n3", "Say hi."]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'\n{"body": "a", "id": 1}', r"a\.jsonl:2: .*body, id"),
        ("a.jsonl", b"[1]", r"a\.jsonl:1: .*list"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl:1: .*string in text, found 3"),
        ("a.jsonl", b'{"text": ""}', r"a\.jsonl holds no text"),
        ("a.txt", b" \n", r"a\.txt holds no text"),
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8 \(byte 2\)"),
        ("a.pdf", b"x", r"a\.pdf is; expected a \.txt file"),
    ],
)
def test_bad_files_name_the_place(tmp_path, name, content, message):
    """Whatever is wrong, the message says where."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text.read_texts(tmp_path / name)


def test_missing_sources(tmp_path):
    """A wrong name lists what would be right."""
    with pytest.raises(FileNotFoundError, match=r"no\.txt does not exist; expected .*stdlib:evaluation"):
        text.read_texts(tmp_path / "no.txt")
    with pytest.raises(ValueError, match="stdlib:test.*stdlib:training"):
        text.read_texts("stdlib:test")
