"""Finds the shared collection of real-life cases; tests that need it are skipped where it is not there."""

import os
from pathlib import Path

import pytest


def find_case(name: str) -> Path:
    """Returns the folder of a case, from $PJAX_CASES or `shared/cases` beside the project."""
    beside = Path(__file__).parents[2] / "shared" / "cases"
    folder = Path(os.environ.get("PJAX_CASES", beside)) / name
    if not folder.exists():
        pytest.skip(f"the case {name} is not here; set PJAX_CASES to the folder of cases")
    return folder
