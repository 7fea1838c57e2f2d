"""Finds real-life cases: checkpoints kept in tests/data, and the larger shared collection where it is."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[2] / "shared" / "cases"
PLACES = (Path(__file__).parent / "data", Path(os.environ.get("PJAX_CASES", BESIDE)))


def find_case(name: str) -> Path:
    """Returns the file or folder of a case, in tests/data, $PJAX_CASES, or `shared/cases` beside us."""
    for place in PLACES:
        if (place / name).exists():
            return place / name
    pytest.skip(f"the case {name} is not here; set PJAX_CASES to the folder of cases")


def checkpoint_names() -> list[str]:
    """Returns the names of all cases that are Hugging Face model folders; not that of the download cache."""
    folders = {path.parent for place in PLACES for path in place.glob("*/golden.npz")}
    folders |= {path.parent for place in PLACES for path in place.glob("*/expect.json")}
    return sorted({folder.name for folder in folders} - {"gguf", "q_llama_hub_cache"})
