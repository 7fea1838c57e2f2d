"""The main job on the demo model that ships with pjax, on any machine, without a GPU.

    python -m pjax.run --config=configs/quickstart.py

Claim: on two cores, in under 3 minutes, it profiles the model, trains a predictor in every layer, places
its neurons for a simulated device (40 % of the FFN fits), runs it split over two emulated devices and
writes Python. Density about 10 %, recall at least 95 %, exact perplexity equal to dense, predicted
within 2 % of it. The model fits in a CPU's caches: its tokens/s say nothing about larger ones.
"""

from pathlib import Path

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

DEMO = Path(__file__).parent / "demo"


def get_config() -> ConfigDict:
    """The config."""
    config = ConfigDict()
    config.model = str(DEMO)
    config.prompt = 'class Stack:\n    """A stack of items."""\n\n    def push(self'
    config.chat = False
    config.activation = placeholder(str)
    config.dtype = placeholder(str)
    config.mode = placeholder(str)
    config.seed = 0
    config.profile = ConfigDict(
        {"text": "stdlib:calibration", "num_tokens": 131072, "path": placeholder(str)}
    )
    config.predictor = ConfigDict(
        {"kind": "lowrank", "dtype": "float32", "recall": 0.96, "path": placeholder(str)}
    )
    config.hardware = "demo"
    config.placement = ConfigDict(
        {
            "device_bytes": "40%",
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
            "repetition_penalty": 1.15,  # greedy text of so small a model repeats itself without
            "stop": (),
        }
    )
    config.quality = ConfigDict(
        {"text": str(DEMO / "evaluation.txt"), "num_tokens": 16384, "max_perplexity_rise": 0.02}
    )
    return config
