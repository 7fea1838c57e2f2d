"""Do the hot and the cold half of a split layer run at the same time?

    PJAX_NUM_THREADS=1 python -m experiments.overlap [--quick]

Splits the FFN of a decoder with random weights (synthetic; only time is measured) into equal halves over two
emulated CPU devices, one thread each, and compares a whole step with its longer half run alone. Claim:
at most 1.25 times.
"""

import json
import os
import sys
from typing import cast

import jax
import numpy as np
from absl import app, flags
from flax import nnx

from pjax.base import Mode
from pjax.executor import TwoPrograms, measure_overlap
from pjax.model import Decoder
from pjax.model_config import ModelConfig, Rope
from pjax.sampling import greedy

_QUICK = flags.DEFINE_bool("quick", False, "A tenth of the size, to see that it runs.")
_JSON = flags.DEFINE_string("json", None, "File that gets the figures and the timeline.")
_MODE = flags.DEFINE_enum("mode", "dense", ["dense", "exact"], "Which neurons are computed.")


def make_config(quick: bool) -> ModelConfig:
    """Nearly all of the work is FFN, as in a large model, so that the halves can be equal."""
    width, neurons = (512, 2048) if quick else (2048, 8192)
    return ModelConfig(
        name="synthetic", family="llama", vocab=256, model=width, neurons=(neurons,) * 2, heads=8, kv_heads=1,
        head_dim=16, context=512, activation="relu", gated=True, norm="rms", norm_eps=1e-5,
        rope=Rope(1e4, 16),
        tied=True, bos_id=None, eos_ids=(),
    )  # fmt: skip


def main(argv):
    """Measures and prints."""
    del argv
    if os.environ.get("PJAX_NUM_THREADS") != "1":
        sys.exit("set PJAX_NUM_THREADS=1: each of the two emulated devices is to have one thread")
    jax.config.update("jax_num_cpu_devices", 2)
    config = make_config(_QUICK.value)
    model = Decoder(config, rngs=nnx.Rngs(0))
    halves = tuple(np.arange(n) < n // 2 for n in config.neurons)
    device, host = jax.devices()
    executor = TwoPrograms(model, halves, mode=cast(Mode, _MODE.value), device=device, host=host)
    prompt = np.arange(32, dtype=np.int32)[None, :]
    state = executor.prefill(prompt, np.array([32], np.int32), capacity=256, sample_fn=greedy, sampler=None)
    overlap = measure_overlap(executor, state, greedy)
    longer = max(overlap.device_s, overlap.host_s)
    milliseconds = [1e3 * seconds for seconds in (overlap.step_s, overlap.device_s, overlap.host_s)]
    print("step {:.2f} ms, device half {:.2f} ms, host half {:.2f} ms".format(*milliseconds))
    print(f"step / longer half: {overlap.step_s / longer:.2f}")
    for index, layer in enumerate(overlap.timeline):
        moments = [1e3 * moment for moment in layer]
        print("layer {}: input {:.2f}, hot done {:.2f}, cold done {:.2f} ms".format(index, *moments))
    if _JSON.value:
        record = overlap._asdict() | {"timeline": [layer._asdict() for layer in overlap.timeline]}
        with open(_JSON.value, "w") as file:
            json.dump(record | {"step_over_longer_half": overlap.step_s / longer}, file, indent=1)


if __name__ == "__main__":
    app.run(main)
