"""Opening what a user named: paths with `~` and variables, and JSON files that may be broken."""

import json
import os
from pathlib import Path
from typing import Any

LFS_POINTER = b"version https://git-lfs"
"""How the small text file begins that git leaves where a large file was not downloaded."""


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path with `~` and environment variables replaced.

    Args:
        path: as a person wrote it, for example `~/models/opt` or `$MODELS/opt`.
    """
    return Path(os.path.expandvars(os.path.expanduser(os.fspath(path))))


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Args:
        path: an existing file.

    Raises:
        ValueError: not UTF-8, not JSON, or JSON but not an object; names the file and the place.
    """
    raw = path.read_bytes()
    if not raw.strip():
        raise ValueError(f"{path} is empty; expected a JSON object. Download it again.")
    if raw.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself. Fetch it with `git lfs pull`.")
    try:
        found = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); expected a JSON object.") from error
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise ValueError(f"{place}: not valid JSON ({error.msg}); the file begins {raw[:40]!r}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a JSON {type(found).__name__}; expected an object.")
    return found
