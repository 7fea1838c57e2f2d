"""Config files: every key of `Settings` at its default, and what a file changes."""

import dataclasses
import typing
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from pjax.settings import Settings


def make_config(**changes: Any) -> ConfigDict:
    """Returns a config that has every key, so that each can be overridden on the command line.

    Args:
        **changes: values instead of the defaults, nested as the records of `settings` are; `model` and
            `prompt` have none, and are left for the command line if they are not given.

    Raises:
        KeyError: there is no such key.
    """
    config = ConfigDict(_defaults(Settings)).lock()
    config.update(changes)
    return config


def _defaults(record: type) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {field.name: _default(hints[field.name], field.default) for field in dataclasses.fields(record)}


def _default(hint: Any, default: Any) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _defaults(hint)
    if default is None or default is dataclasses.MISSING:
        return placeholder((typing.get_args(hint) or (hint,))[0])
    return default
