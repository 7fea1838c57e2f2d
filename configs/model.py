"""The main job on a model of your own, on this machine as it is.

    python -m pjax.run --config=configs/model.py --config.model=PATH --workdir=runs/NAME --prompt=TEXT

Claim: no figures, they are your model's. It profiles the model on 131,072 tokens, trains predictors,
places the neurons for the GPU that JAX sees, if any, and measures every mode; a model of 1B on two cores
takes long. Texts default to Python's own sources, so that it works at once; for predictors and a verdict
of the quality guard that mean something give texts like those the model will meet, with
--config.profile.text and --config.quality.text (.txt or .jsonl). Greedy, without penalties;
--config.chat=True makes the prompt a user message of a chat model.
"""

from ml_collections import ConfigDict

from pjax.config import make_config


def get_config() -> ConfigDict:
    """The config."""
    return make_config(prompt="The capital of France is")
