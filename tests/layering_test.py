"""A module imports only from lower floors, and BUILD says the same as the imports."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = {
    "model_config": 0,
    "memory": 0,
    "weights": 0,
    "base": 0,
    "settings": 1,
    "workdir": 1,
    "chat": 1,
    "ops": 1,
    "formats": 1,
    "placement": 1,
    "sampling": 1,
    "textio": 1,
    "compiled": 2,
    "imported": 2,
    "manifest": 2,
    "stages": 2,
    "split": 2,
    "predictor": 2,
    "thresholds": 2,
    "hardware": 2,
    "attention": 2,
    "plan": 3,
    "layers": 3,
    "model": 3,
    "storage": 3,
    "weights_file": 3,
    "profiler": 4,
    "training": 4,
    "executor": 4,
    "generate": 5,
    "quality": 5,
    "speed": 5,
    "report": 5,
    "predictor_stages": 5,
    "likelihood": 5,
    "measure": 6,
    "pipeline": 6,
    "llm": 6,
    "cli": 7,
    "harness": 7,
    "evaluate": 7,
    "config": 7,
    "perplexity": 7,
    "run": 7,
}
"""The floor of each module; those of one floor do not import each other, save where SAME_FLOOR says."""

SAME_FLOOR = {
    ("base", "model_config"),
    ("base", "weights"),
    ("model", "layers"),
    ("storage", "layers"),
    ("storage", "model"),
    ("weights_file", "layers"),
    ("weights_file", "model"),
    ("weights_file", "storage"),
    ("training", "profiler"),
    ("report", "quality"),
    ("report", "speed"),
    ("likelihood", "quality"),
    ("pipeline", "measure"),
    ("perplexity", "cli"),
    ("evaluate", "cli"),
    ("evaluate", "harness"),
    ("run", "cli"),
}

ONLY_IN = {
    "mip": {"placement"},
    "jinja2": {"chat", "report"},
    "tokenizers": {"formats"},
    "sentencepiece": {"formats"},
    "optax": {"training"},
    "orbax": {"training"},
    "ctypes": {"ops"},
    "matplotlib": {"report"},
    "lm_eval": {"evaluate", "harness"},
    "absl": {"cli", "perplexity", "run"},
    "ml_collections": {"cli", "config"},
}
"""Packages that only the named modules may import."""


def module_of(file: Path) -> str:
    """ "pjax/ops/ffi.py" -> "ops"."""
    return file.relative_to(ROOT / "pjax").parts[0].removesuffix(".py")


def source_files() -> list[Path]:
    return [file for file in sorted((ROOT / "pjax").rglob("*.py")) if module_of(file) != "__init__"]


def imported(file: Path) -> set[str]:
    """Dotted names that a file imports, `from a import b` as a.b."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def pjax_edges(module: str) -> set[str]:
    """The other modules of pjax that a module imports."""
    edges = set()
    for file in source_files():
        if module_of(file) == module:
            edges |= {name.split(".")[1] for name in imported(file) if name.startswith("pjax.")}
    return edges - {module}


def test_every_module_has_a_floor():
    assert {module_of(file) for file in source_files()} == set(FLOORS)


@pytest.mark.parametrize("module", FLOORS)
def test_imports_go_down(module):
    for other in pjax_edges(module):
        assert FLOORS[other] < FLOORS[module] or (module, other) in SAME_FLOOR, f"{module} imports {other}"


@pytest.mark.parametrize("package", ONLY_IN)
def test_package_stays_in_its_module(package):
    users = {
        module_of(file)
        for file in source_files()
        if any(name == package or name.startswith(package + ".") for name in imported(file))
    }
    assert users <= ONLY_IN[package]
    assert users, f"nothing imports {package} any more"


def test_jax_ffi_stays_in_one_file():
    users = [file for file in source_files() if "jax.ffi" in file.read_text().replace("`jax.ffi`", "")]
    assert [file.relative_to(ROOT / "pjax").as_posix() for file in users] == ["ops/ffi.py"]


def build_targets() -> dict[str, set[str]]:
    """Target name to its `deps`, from BUILD's py_library rules."""
    targets = {}
    for node in ast.walk(ast.parse((ROOT / "BUILD").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "py_library":
            values = {
                keyword.arg: ast.literal_eval(keyword.value)
                for keyword in node.keywords
                if keyword.arg in ("name", "deps")
            }
            targets[values["name"]] = {dep.removeprefix(":") for dep in values.get("deps", [])}
    return targets


def test_build_has_the_real_imports():
    targets = build_targets()
    assert set(targets) == set(FLOORS) | {"pjax"}
    for module in FLOORS:
        assert targets[module] == pjax_edges(module), f"BUILD: deps of {module}"


def test_public_names_exist_and_are_listed():
    import pjax

    text = (ROOT / "pjax" / "__init__.py").read_text()
    names = re.findall(r'^    "(\w+)",$', text, re.MULTILINE)
    assert sorted(names) == sorted(pjax.__all__)
    assert all(hasattr(pjax, name) for name in names)


def test_import_loads_no_library_solver_or_flags():
    code = """
import sys
import pjax
from absl import flags
assert not {"mip", "ml_collections", "pjax.run"} & set(sys.modules)
assert not [name for name in flags.FLAGS if flags.FLAGS.find_module_defining_flag(name).startswith("pjax")]
assert "libpjax" not in open("/proc/self/maps").read()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
