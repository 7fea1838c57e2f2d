"""Reads the texts that a run trains, calibrates and evaluates on.

The Python standard library is a corpus that every machine already has. Its modules are dealt into
three disjoint lists, so that no number is ever measured on a text that something was fitted to.
"""

import json
import logging
import os
import sysconfig
import tokenize
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from pjax.formats.files import expand_path


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


EVALUATION_MODULES = _names(
    """
    bisect copy csv fnmatch fractions glob heapq json queue sched shlex string textwrap
    """
)
"""About 200 kB for perplexity and divergence; in every CPython from 3.11 on."""

CALIBRATION_MODULES = _names(
    """
    argparse configparser dataclasses ipaddress sqlite3 statistics threading tokenize wsgiref
    """
)
"""About 450 kB for activation counts and predictors; in every CPython from 3.11 on."""

TRAINING_MODULES = _names(
    """
    __future__ _aix_support _android_support _bootsubprocess _collections_abc _colorize _compat_pickle
    _compression _ios_support _markupbase _osx_support _py_abc _pydatetime _pydecimal _pyio _pylong _pyrepl
    _sitebuiltins _strptime _threading_local _weakrefset abc aifc ast asynchat asyncio asyncore base64 bdb
    bz2 cProfile calendar cgi cgitb chunk cmd code codecs codeop collections colorsys compileall concurrent
    contextlib copyreg crypt ctypes curses datetime dbm difflib dis distutils doctest email
    encodings.aliases encodings.idna encodings.punycode encodings.utf_16 encodings.utf_32
    encodings.utf_8_sig ensurepip enum filecmp fileinput ftplib functools genericpath getopt getpass gettext
    graphlib gzip hashlib hmac html.parser http idlelib imaplib imghdr imp importlib inspect io lib2to3
    linecache locale logging lzma mailbox mailcap mimetypes modulefinder multiprocessing netrc nntplib
    ntpath nturl2path numbers opcode operator optparse os pathlib pdb pickle pickletools pipes pkgutil
    platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc pydoc_data.topics
    quopri random re reprlib rlcompleter runpy secrets selectors shelve shutil signal site smtpd smtplib
    sndhdr socket socketserver ssl stat subprocess sunau symtable sysconfig tabnanny tarfile telnetlib
    tempfile timeit tkinter tomllib trace traceback tracemalloc tty turtle turtledemo types typing unittest
    urllib uu uuid venv warnings wave weakref webbrowser xdrlib xml xmlrpc zipapp zipfile zipimport zoneinfo
    """
)
"""The rest of the library, for training the demonstration model; a version lacks some of them."""

_CORPORA = {
    "stdlib:training": TRAINING_MODULES,
    "stdlib:calibration": CALIBRATION_MODULES,
    "stdlib:evaluation": EVALUATION_MODULES,
}
_ACCEPTED = f"a .txt file, a .jsonl file, or one of {', '.join(_CORPORA)}"
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
_TOPICS = "pydoc_data.topics"  # A dict of manual pages: prose, so it is read as text and not as source.


def read_texts(source: str | os.PathLike[str]) -> list[str]:
    """Returns the texts that `source` names, in a fixed order.

    Args:
        source: a path to a .txt file (one text) or a .jsonl file (one JSON object a line, with the
            field `text`, or with Alpaca's `instruction` and optional `input` and `output`, which are
            joined by blank lines); or "stdlib:training", "stdlib:calibration", "stdlib:evaluation".
            `~` and environment variables are replaced.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of source, not UTF-8, a line that is not JSON or has no known field,
            or no text at all.
    """
    if isinstance(source, str) and source.startswith("stdlib:"):
        if source not in _CORPORA:
            raise ValueError(f"Unknown text {source!r}; expected {_ACCEPTED}.")
        return read_stdlib(_CORPORA[source])
    path = expand_path(source)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"Cannot tell what kind of text {path} is; expected {_ACCEPTED}.")
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"The text file {path} {problem}; expected {_ACCEPTED}.")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8 first.") from error
    texts = _read_jsonl(path, content) if path.suffix == ".jsonl" else [content]
    if not any(text.strip() for text in texts):
        raise ValueError(f"{path} holds no text; give a file with at least one non-empty text.")
    return texts


def read_stdlib(modules: Sequence[str]) -> list[str]:
    """Returns the sources of standard library modules, one text a file, without importing them.

    Args:
        modules: dotted names; a package stands for its whole tree, less its tests. A module that
            this Python does not have is skipped, with a note in the log.

    Raises:
        ValueError: none of the modules was found.
    """
    texts = []
    for module in modules:
        files = stdlib_files(module)
        if not files:
            logging.info("This Python has no source of the module %s; its text is left out.", module)
        elif module == _TOPICS:
            texts.append("\n\n".join(import_module(_TOPICS).topics.values()))
        else:
            texts.extend(_read_source(file) for file in files)
    if not any(texts):
        folder = sysconfig.get_path("stdlib")
        raise ValueError(f"No Python sources of {', '.join(modules)} in {folder}; give a .txt file instead.")
    return texts


def stdlib_files(module: str) -> list[Path]:
    """Returns the source files of a standard library module in sorted order; none if it is missing.

    Args:
        module: dotted name of a module, or of a package (all of its tree, less tests).
    """
    stem = Path(sysconfig.get_path("stdlib")).joinpath(*module.split("."))
    if stem.is_dir():
        files = sorted(stem.rglob("*.py"))
        return [f for f in files if not _SKIPPED_FOLDERS.intersection(f.relative_to(stem).parts)]
    file = stem.with_name(stem.name + ".py")
    return [file] if file.is_file() else []


def _read_source(file: Path) -> str:
    with tokenize.open(file) as stream:  # Honours the file's own coding line.
        return stream.read()


def _read_jsonl(path: Path, content: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg}, column {error.colno}).") from error
        texts.append(_record_text(record, f"{path}:{number}"))
    return texts


def _record_text(record: object, place: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object, found a {type(record).__name__}.")
    fields = ("text",) if "text" in record else ("instruction", "input", "output")
    if not record.keys() & {"text", "instruction"}:
        found = ", ".join(map(str, record)) or "none"
        raise ValueError(f"{place}: expected the field text or instruction; found keys: {found}.")
    parts = {field: record[field] for field in fields if record.get(field) is not None}
    for field, part in parts.items():
        if not isinstance(part, str):
            raise ValueError(f"{place}: expected a string in {field}, found {part!r}.")
    return "\n\n".join(part for part in parts.values() if part)
