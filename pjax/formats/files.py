"""Opening what a user named: paths with `~` and variables, and files that may not be what they seem."""

import json
import os
import re
from pathlib import Path
from typing import Any

_KNOWN_STARTS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`",
    b"<": "is a web page, not the file itself; download it again",
    b"GGUF": "is a GGUF file",
    b"PWRI": "is a PowerInfer GGUF file",
    b"lmgg": "is a GGML file of before GGUF ('ggml'); get the model as GGUF",
    b"fmgg": "is a GGML file of before GGUF ('ggmf'); get the model as GGUF",
    b"tjgg": "is a GGML file of before GGUF ('ggjt'); get the model as GGUF",
    b"algg": "is a GGML LoRA adapter ('ggla'), no model",
    b"PK\x03\x04": "is a zip or PyTorch archive",
    b"\x80\x02": "is a Python pickle",
    b"../": "holds only a path: a link that was copied as text; copy the folder with its links followed",
}


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path with `~` and environment variables replaced.

    Args:
        path: as a person wrote it, for example `~/models/opt` or `$MODELS/opt`.
    """
    return Path(os.path.expandvars(os.path.expanduser(os.fspath(path))))


def describe_content(start: bytes) -> str:
    """Returns what a file of the wrong kind is, as the rest of a sentence.

    Args:
        start: the first bytes of the file, at least 40 if it has them.
    """
    if not start.strip():
        return "is empty; download it again"
    for known, description in _KNOWN_STARTS.items():
        if start.lstrip().startswith(known):
            return description
    return f"begins {start[:40]!r}"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Args:
        path: an existing file.

    Raises:
        ValueError: not UTF-8, not JSON, or JSON but not an object; names the file and the place.
    """
    raw = path.read_bytes()
    try:
        found = json.loads(raw.decode("utf-8-sig"))
        if re.search(rb"\\u[dD][89a-fA-F]", raw):  # a surrogate, which no text has unless as half of a pair
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{path}: expected text, {half!r} is half of a surrogate pair.") from error
    except UnicodeDecodeError as error:
        message = f"{path}: expected JSON, not UTF-8 at byte {error.start}; the file {describe_content(raw)}."
        raise ValueError(message) from error
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise ValueError(f"{place}: not JSON ({error.msg}); the file {describe_content(raw)}.") from error
    except (ValueError, RecursionError) as error:  # too many digits or brackets for Python
        raise ValueError(f"{path}: cannot be read as JSON ({error}). Get it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(found).__name__}.")
    return found
