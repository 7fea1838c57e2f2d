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
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """The config."""
    config = ConfigDict()
    config.model = placeholder(str)
    config.prompt = "The capital of France is"
    config.chat = False
    config.activation = placeholder(str)
    config.dtype = placeholder(str)
    config.mode = placeholder(str)
    config.seed = 0
    config.profile = ConfigDict(
        {"text": "stdlib:calibration", "num_tokens": 131072, "path": placeholder(str)}
    )
    config.predictor = ConfigDict(
        {"kind": "lowrank", "dtype": "float32", "recall": 0.95, "path": placeholder(str)}
    )
    config.hardware = "measured"
    config.placement = ConfigDict(
        {
            "device_bytes": "max",
            "objective": "impact",
            "group_size": 64,
            "time_limit_s": 30.0,
            "path": placeholder(str),
        }
    )
    config.generate = ConfigDict(
        {
            "max_new_tokens": 128,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": (),
        }
    )
    config.quality = ConfigDict(
        {"text": "stdlib:evaluation", "num_tokens": 16384, "max_perplexity_rise": 0.02}
    )
    return config
