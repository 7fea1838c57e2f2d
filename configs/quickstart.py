"""The main job on the demo model that ships with pjax, on any machine, without a GPU.

    python -m pjax.run --config=configs/quickstart.py

Claim: on two cores, in under 3 minutes, it profiles the model, trains a predictor in every layer, places
its neurons for a simulated device (40 % of the FFN fits), runs it split over two emulated devices and
writes Python. Density about 10 %, recall at least 95 %, exact perplexity equal to dense, predicted
within 2 % of it. The model fits in a CPU's caches: its tokens/s say nothing about larger ones.
"""

from pathlib import Path

from ml_collections import ConfigDict

from pjax.config import make_config

DEMO = Path(__file__).parent / "demo"


def get_config() -> ConfigDict:
    """The config."""
    return make_config(
        model=str(DEMO),
        prompt='class Stack:\n    """A stack of items."""\n\n    def push(self',
        hardware="demo",
        predictor={"recall": 0.96, "every_layer": True},
        placement={"device_bytes": "40%"},
        # Greedy text of so small a model repeats itself without the penalty.
        generate={"repetition_penalty": 1.15},
        quality={"text": str(DEMO / "evaluation.txt")},
    )
