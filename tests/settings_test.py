"""The checks of a config: every message names the key."""

import dataclasses

import pytest

from pjax.settings import CHOICES, RANGES, Settings, make_settings

LEAST = {"model": "folder", "prompt": "text"}


def with_value(key: str, value) -> dict:
    """LEAST, and a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return LEAST | value


def value_of(settings: Settings, key: str):
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


def test_least_config_gets_the_defaults():
    assert make_settings(LEAST) == Settings(model="folder", prompt="text")


def test_all_defaults_written_out_change_nothing():
    settings = Settings(model="folder", prompt="text")
    assert make_settings(dataclasses.asdict(settings)) == settings


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_settings(LEAST).seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("seed", 7, 7),
        ("dtype", "bfloat16", "bfloat16"),
        ("mode", None, None),
        ("predictor.recall", 1, 1.0),
        ("placement.device_bytes", 123, 123),
        ("placement.device_bytes", "40%", "40%"),
        ("placement.time_limit_s", 5, 5.0),
        ("generate.stop", "END", ("END",)),
        ("generate.stop", ["a", "b"], ("a", "b")),
        ("generate.stop", (), ()),
    ],
)
def test_values_are_taken(key, value, expected):
    found = value_of(make_settings(with_value(key, value)), key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("key", ["colour", "profile.colour", "generate.colour", "quality.perplexity"])
def test_unknown_key_is_named_with_those_that_exist(key):
    with pytest.raises(ValueError, match=rf"config\.{key}: no such key; the keys here are \w+, \w+"):
        make_settings(with_value(key, 1))


def test_key_that_is_no_string_is_named():
    with pytest.raises(ValueError, match=r"config\.3: no such key"):
        make_settings({**LEAST, 3: "x", "colour": 1})


@pytest.mark.parametrize("key", ["model", "prompt"])
def test_missing_key_is_named(key):
    with pytest.raises(ValueError, match=rf"config\.{key}: this key is required"):
        make_settings({name: value for name, value in LEAST.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("model", None, "str"),
        ("model", 3, "str"),
        ("seed", 1.0, "int"),
        ("seed", "1", "int"),
        ("seed", True, "int"),
        ("seed", None, "int"),
        ("dtype", 32, "str or None"),
        ("profile.num_tokens", 1e5, "int"),
        ("predictor.recall", "0.9", "float or None"),
        ("predictor.recall", True, "float or None"),
        ("placement.device_bytes", 1.5, "int or str"),
        ("placement.device_bytes", None, "int or str"),
        ("generate.stop", 5, "strings"),
        ("generate.stop", None, "strings"),
        ("generate.stop", ["a", 1], "strings"),
        ("generate.stop", {"a": "b"}, "strings"),
        ("profile", None, "keys and values"),
        ("profile", "stdlib:calibration", "keys and values"),
    ],
)
def test_wrong_type_is_named(key, value, wanted):
    with pytest.raises(ValueError, match=rf"config\.{key}: expected {wanted}, got"):
        make_settings(with_value(key, value))


def test_config_that_is_no_mapping():
    with pytest.raises(ValueError, match=r"^config: expected keys and values, got 'x'"):
        make_settings("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", CHOICES)
def test_choices(key):
    for choice in CHOICES[key]:
        assert value_of(make_settings(with_value(key, choice)), key) == choice
    with pytest.raises(ValueError, match=rf"config\.{key}: expected one of \[.*\], got 'other'"):
        make_settings(with_value(key, "other"))


@pytest.mark.parametrize("key", RANGES)
def test_ranges(key):
    low, high = RANGES[key]
    default = value_of(make_settings(LEAST), key)
    kind = float if default is None else type(default)
    for inside in (low, high):
        assert value_of(make_settings(with_value(key, kind(inside))), key) == inside
    outside = [low - 1, high + 1 if kind is int else high * 2]
    for value in [kind(v) for v in outside] + ([float("nan"), float("inf")] if kind is float else []):
        with pytest.raises(ValueError, match=rf"config\.{key}: expected .* to .*, got"):
            make_settings(with_value(key, value))
