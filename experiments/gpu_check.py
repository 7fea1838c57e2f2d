"""Does the split decoder do on a GPU and its host what it does on one device?

    python -m pjax.run --config=configs/quickstart.py          # anywhere, prepares runs/quickstart
    python -m experiments.gpu_check --workdir=runs/quickstart   # where a GPU is visible

Takes model and predictors from a prepared workdir (no solver needed here), splits the model over (GPU,
CPU) with 0 %, 37 % and 100 % of the neurons hot, and compares every mode with the same mode on the
host alone: the same greedy ids, and logits within 1e-4 of the largest one. Prints what it compared; exits 1
if anything differs. Without a GPU, --devices=emulated runs the same checks over two CPU devices.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pjax.base import Executor, Mode
from pjax.executor import OneProgram, TwoPrograms, device_pair, measure_overlap
from pjax.executor.two_programs import cold_program
from pjax.generate import Generation, generate
from pjax.llm import LLM
from pjax.sampling import greedy

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "A workdir prepared by pjax.run.")
_DEVICES = flags.DEFINE_enum("devices", "gpu", ["gpu", "emulated"], "What to split over.")
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens to generate in each comparison.", lower_bound=2)

PROMPT = "import os\n\n\ndef main(argv):\n"
SHARES = (0.0, 0.37, 1.0)
MODES: tuple[Mode, ...] = ("dense", "exact", "predicted")
TOLERANCE = 1e-4
"""Of logits, as a share of the largest: float32 sums in another order. A bfloat16 model also rounds its KV
cache to 8 bits, where two sums that differ in their last bit now and then end up 4e-3 apart; of the demo
model's logits, which reach 20, that moved one by 1.5e-4."""


def _keep_logits(logits, state):
    del state
    return jnp.argmax(logits, -1).astype(jnp.int32), logits


def logits_along(executor: OneProgram | TwoPrograms, ids: np.ndarray, new_ids: tuple[int, ...]) -> np.ndarray:
    """float32 [tokens, vocab]: the logits before each of `new_ids`, which are fed whatever was best."""
    state = executor.prefill(
        ids[None, :], np.array([len(ids)], np.int32), capacity=256, sample_fn=_keep_logits, sampler=None
    )
    logits = [np.asarray(state.sampler)[0]]
    for token in new_ids[:-1]:
        fed = jax.device_put(jnp.full((1,), token, jnp.int32), executor.devices[0])
        state = executor.step(state._replace(ids=fed), sample_fn=_keep_logits)
        logits.append(np.asarray(state.sampler)[0])
    return np.stack(logits)


def new_ids(executor: Executor, ids: np.ndarray) -> tuple[int, ...]:
    """What comes after a prompt."""
    generation = generate(executor, None, ids.tolist(), max_new_tokens=_TOKENS.value)
    assert isinstance(generation, Generation)  # one prompt gives one
    return generation.ids


def main(argv):
    """Compares, and exits 1 if anything differs."""
    del argv
    emulated = _DEVICES.value == "emulated"
    if emulated:
        jax.config.update("jax_num_cpu_devices", 2)
    pair = device_pair(simulated=emulated)
    if pair is None:
        sys.exit("no GPU is visible to JAX; --devices=emulated checks the same over two CPU devices")
    device, host = pair
    print(f"device {device} ({device.device_kind}), host {host}, jax {jax.__version__}")
    llm = LLM(_WORKDIR.value)
    model = llm.model
    if llm.tokenizer is None:
        sys.exit(f"--workdir: the model of {_WORKDIR.value} has no tokenizer")
    ids = np.asarray(llm.tokenizer.encode(PROMPT), np.int32)
    rng, failures = np.random.default_rng(0), 0
    for mode in MODES:
        whole = OneProgram(model, mode=mode, predictors=llm.predictors, device=host)
        expected = new_ids(whole, ids)
        logits = logits_along(whole, ids, expected)
        for share in SHARES:
            hot_mask = tuple(rng.permutation(n) < round(share * n) for n in model.config.neurons)
            split = TwoPrograms(
                model, hot_mask, mode=mode, predictors=llm.predictors, device=device, host=host
            )
            found = new_ids(split, ids)
            difference = float(
                np.abs(logits_along(split, ids, expected) - logits).max() / np.abs(logits).max()
            )
            good = found == expected and difference <= TOLERANCE
            failures += not good
            print(f"{mode:9} {share:4.0%} hot: ids {'equal' if found == expected else 'DIFFER'}, "
                  f"logits within {difference:.1e} of the largest {'ok' if good else 'FAILED'}")  # fmt: skip
    failures += _check_kernel(split, host)
    state = split.prefill(
        ids[None, :], np.array([len(ids)], np.int32), capacity=256, sample_fn=greedy, sampler=None
    )
    overlap = measure_overlap(split, state, greedy)
    print(f"all hot: step {overlap.step_s * 1e3:.2f} ms, device alone {overlap.device_s * 1e3:.2f} ms")
    print("passed" if not failures else f"{failures} checks FAILED")
    sys.exit(bool(failures))


def _check_kernel(split: TwoPrograms, host: jax.Device) -> int:
    layer = split._layers[0]
    x = jax.device_put(jnp.ones((1, 1, split.config.model)), host)
    text = cold_program.lower(layer.cold, x, None, mode="exact", activation="relu").as_text()
    good = "pjax_sparse_ffn" in text
    print(f"cold program on {host}: {'our kernel' if good else 'NO KERNEL in its lowered text'}")
    return not good


if __name__ == "__main__":
    app.run(main)
