"""A config.json with checked access: a value is right, or the error names file, key and value."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

ACTIVATIONS = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
"""Names that configs use, and ours; the last three are one formula, the tanh approximation."""


class ConfigFile(NamedTuple):
    """A config.json with checked access to its values.

    Attributes:
        file: for messages.
        values: the JSON object.
    """

    file: Path
    values: dict[str, Any]

    def error(self, key: str, expected: str) -> ValueError:
        """Returns the error for a value that is missing or wrong."""
        found = repr(self.values[key]) if key in self.values else "no such key"
        return ValueError(f"{self.file}: {key}: expected {expected}, found {found}.")

    def unsupported(self, key: str, value: object, supported: str) -> ValueError:
        """Returns the error for a value that is right but beyond what is implemented."""
        return ValueError(
            f"{self.file}: {key}: {json.dumps(value)} is not supported yet; supported: {supported}."
        )

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer; the default, if there is one, for an absent or null key."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """Returns a positive finite number; the default for an absent or null key."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean; the default for an absent or null key."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def activation(self, key: str, default: str, override: str | None) -> str:
        """Returns our name of the activation function, `override` instead of the file's if given."""
        value = override or self.values.get(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            where = f"activation: {override!r}" if override else f"{self.file}: {key}: {value!r}"
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"{where} is not a supported activation function; expected one of {known}.")
        return ACTIVATIONS[value]

    def ids(self, key: str) -> tuple[int, ...]:
        """Returns token ids written as one integer, a list or null; none for an absent key."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(key, "a token id, a list of token ids or null")
        return tuple(ids)
