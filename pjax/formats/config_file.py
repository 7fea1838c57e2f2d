"""A config.json with checked access: a value is right, or the error names file, key and value."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pjax.model_config import Activation

_ACTIVATION_NAMES = {
    "relu": "relu",
    "relu2": "relu2",
    "relu_squared": "relu2",
    "squared_relu": "relu2",
    "fatrelu": "fatrelu",
    "drelu": "drelu",
    "dReLU": "drelu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
"""Names that configs use, and ours; the last three are one formula, the tanh approximation."""

_ACTIVATION_KEYS = ("hidden_act", "activation_function", "activation", "hidden_activation")
"""Where the configs of one family or another name it."""

_MAX_COUNT = 2**63 - 1
"""Of what fits NumPy's integers; JSON has no bound of its own."""

_MAX_NUMBER = sys.float_info.max
"""A larger integer is less than infinity and still has no float."""


def parse_activation(name: str) -> str:
    """Returns our spelling of an activation that a person or a file named, such as "swish" or "fatrelu:0.01".

    Raises:
        ValueError: no such activation, or its threshold is missing or wrong.
    """
    known, colon, threshold = name.partition(":")
    if known not in _ACTIVATION_NAMES:
        raise ValueError(
            f"activation: {name!r} is not supported; expected one of {', '.join(_ACTIVATION_NAMES)}."
        )
    text = f"{_ACTIVATION_NAMES[known]}{colon}{threshold}"
    Activation.parse(text)
    return text


class ConfigFile(NamedTuple):
    """A config.json with checked access to its values.

    Attributes:
        file: for messages.
        values: the JSON object.
    """

    file: Path
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """The model's name for people: that of its folder."""
        return self.file.parent.resolve().name

    def error(self, key: str, expected: str) -> ValueError:
        """Returns the error for a value that is missing or wrong."""
        found = repr(self.values[key]) if key in self.values else "no such key"
        return ValueError(f"{self.file}: {key}: expected {expected}, found {found}.")

    def unsupported(self, key: str, value: object, supported: str) -> ValueError:
        """Returns the error for a value that is right but beyond what is implemented."""
        return ValueError(
            f"{self.file}: {key}: {json.dumps(value)} is not supported yet; supported: {supported}."
        )

    def count(self, key: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
        """Returns an integer from 1 to `most`; the default, if there is one, for an absent or null key."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "a positive integer")
        if value > most:
            raise self.error(key, f"at most {most}")
        return value

    def count_or_none(self, key: str, default: int) -> int | None:
        """Returns a positive integer, or None for null; the default for an absent key."""
        return None if key in self.values and self.values[key] is None else self.count(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive finite number; the default, if there is one, for an absent or null key."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX_NUMBER:
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
        """Returns our spelling of the activation function, `override` instead of the file's if given.

        Its threshold, if it has one, is `hidden_act_param` (ProSparse, MiniCPM-S). A file that names another
        function by another family's key may mean either.
        """
        if override is not None:
            return parse_activation(override)
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in _ACTIVATION_NAMES:
            raise self.error(key, f"an activation function of {', '.join(_ACTIVATION_NAMES)}")
        for other in _ACTIVATION_KEYS:
            if self.values.get(other, value) not in (value, None):
                raise self.error(other, f"{value!r}, which {key} means here, or activation= given to decide")
        if value != "fatrelu":
            return _ACTIVATION_NAMES[value]
        threshold = self.values.get("hidden_act_param")
        if (
            not isinstance(threshold, int | float)
            or isinstance(threshold, bool)
            or not 0 <= threshold <= _MAX_NUMBER
        ):
            raise self.error("hidden_act_param", "fatrelu's threshold, a number of at least 0")
        return f"fatrelu:{float(threshold)}"

    def ids(self, key: str) -> tuple[int, ...]:
        """Returns token ids written as one integer, a list or null; none for an absent key."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(key, "a token id, a list of token ids or null")
        return tuple(ids)
