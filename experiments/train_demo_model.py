"""Trains the demo model: a small ReGLU decoder that writes Python, sparse by an L1 term on its gates.

    python experiments/train_demo_model.py --out=runs/demo_model     # 75 minutes on two cores

The text is the standard library's own sources and `pydoc_data.topics` (PSF licence): the modules
listed as training in `pjax/formats/text.py`. It checkpoints with Orbax, may be killed at any moment
and started again, and gives the same model from the same seed (and Python, whose sources it reads).
"""

import json
import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import rich.progress
from absl import app, flags, logging
from flax import nnx
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pjax.formats import read_texts, write_checkpoint
from pjax.model import Decoder
from pjax.model_config import ModelConfig, Rope
from pjax.storage import weight_name

_OUT = flags.DEFINE_string("out", "runs/demo_model", "New folder that gets the model, Hugging Face style.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/train_demo_model", "Folder of the checkpoints and the log.")
_STEPS = flags.DEFINE_integer("steps", 3000, "Optimiser steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 4, "Sequences a step.", lower_bound=1)
_SEQ = flags.DEFINE_integer("seq", 512, "Tokens a sequence.", lower_bound=2)
_L1 = flags.DEFINE_float("l1", 0.1, "Weight of the mean gate output in the loss; it makes the model sparse.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the initial weights and the order of the text.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 250, "Steps between checkpoints.", lower_bound=1)

VOCAB = 4096
END = "<|endoftext|>"
"""Stands between documents, and begins and ends a text; id 0."""
LEARNING_RATE = 2e-3
"""Peak of the schedule; the usual range for a model of this width."""
HORIZON = 1.5
"""Of the cosine, in runs: the rate is still high when the last fifth of the run cools it down to zero,
which ends lower than a cosine that fades out early (arXiv 2405.18392)."""
COOLDOWN = 0.2
"""Share of the steps that cool down."""
WARMUP_STEPS = 200
"""Adam's second moments need about 1 / (1 - b2) steps before a full step is safe."""

CONFIG = ModelConfig(
    name="pjax-demo", family="llama", vocab=VOCAB, model=256, neurons=(1024,) * 6, heads=8, kv_heads=4,
    head_dim=32, context=512, activation="relu", gated=True, norm="rms", norm_eps=1e-5,
    rope=Rope(1e4, 32),
    tied=True, bos_id=0, eos_ids=(0,),
)  # fmt: skip


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB entries."""
    tokenizer = Tokenizer(BPE())
    # Runs of spaces stay whole and digits stay single: indentation becomes one token.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare_tokens(workdir: pathlib.Path) -> np.ndarray:
    """All training text as one row of ids, documents divided by END; also trains the tokenizer."""
    texts = read_texts("stdlib:training")
    if not (workdir / "tokens.npy").exists():
        tokenizer = train_tokenizer(texts)
        tokenizer.save(str(workdir / "tokenizer.json"))
        ids = [[0, *encoding.ids] for encoding in tokenizer.encode_batch(texts)]
        np.save(workdir / "tokens.tmp.npy", np.concatenate([np.asarray(row, np.uint16) for row in ids]))
        (workdir / "tokens.tmp.npy").rename(workdir / "tokens.npy")
    tokens = np.load(workdir / "tokens.npy")
    print(
        f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.1f} M characters, {len(tokens) / 1e6:.2f} M tokens"
    )
    return tokens


def batch_at(tokens: np.ndarray, step: int) -> np.ndarray:
    """The ids [batch, seq + 1] of a step: a function of seed and step alone, so that a resume repeats it."""
    span = _SEQ.value + 1
    per_epoch = (len(tokens) - span) // _SEQ.value
    first = step * _BATCH.value
    rows = []
    for index in range(first, first + _BATCH.value):
        epoch, position = divmod(index, per_epoch)
        rng = np.random.default_rng((_SEED.value, epoch))
        order, shift = rng.permutation(per_epoch), int(rng.integers(_SEQ.value))
        start = min(order[position] * _SEQ.value + shift, len(tokens) - span)
        rows.append(tokens[start : start + span])
    return np.stack(rows).astype(np.int32)


def observed_ffn_fn(layer, x, residual):
    """The FFN, with the mean of its gate outputs (for the loss) and its density (for the log)."""
    del residual
    ffn = layer.ffn.weights
    gate = jax.nn.relu(x @ ffn.gate.T)
    return (gate * (x @ ffn.up.T)) @ ffn.down, (gate.mean(), (gate > 0).mean())


def learning_rate(step: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """The rate of a step: warm-up, part of a cosine, and a linear cool-down."""
    steps = _STEPS.value
    horizon = max(int(HORIZON * steps), WARMUP_STEPS + 1)
    cosine = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, WARMUP_STEPS, horizon, 1e-5)
    return cosine(step) * jnp.clip((steps - jnp.asarray(step)) / (COOLDOWN * steps), 0.0, 1.0)


def make_step(graphdef, optimizer):
    """The jitted training step."""

    def loss_fn(params, ids):
        model = nnx.merge(graphdef, params)
        inputs, targets = ids[:, :-1], ids[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None, :], inputs.shape)
        residual, _, aux = model.run(inputs, positions, ffn_fn=observed_ffn_fn)
        gates, densities = (jnp.stack(parts) for parts in zip(*aux, strict=True))
        losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(residual), targets)
        return losses.mean() + _L1.value * gates.mean(), (losses.mean(), densities)

    def step(params, state, ids):
        (_, (loss, densities)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, ids)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, densities

    return jax.jit(step, donate_argnums=(0, 1))


def train(tokens: np.ndarray, workdir: pathlib.Path) -> nnx.State:
    """Trains, resuming from the last complete checkpoint, and returns the parameters."""
    graphdef, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(_SEED.value)))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            learning_rate, b2=0.98, weight_decay=0.05, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p)
        ),
    )
    state = optimizer.init(params)
    step_fn = make_step(graphdef, optimizer)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with (
        ocp.CheckpointManager((workdir / "checkpoints").resolve(), options=options) as manager,
        rich.progress.Progress(*columns) as progress,
    ):
        first = 0
        if manager.latest_step() is not None:
            first = manager.latest_step()
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, (nnx.to_pure_dict(params), state))
            pure, state = manager.restore(first, args=ocp.args.StandardRestore(target))
            nnx.replace_by_pure_dict(params, pure)
        task = progress.add_task("train", total=_STEPS.value, completed=first)
        began, seen = time.perf_counter(), 0
        for step in range(first, _STEPS.value):
            params, state, loss, densities = step_fn(params, state, batch_at(tokens, step))
            seen += _BATCH.value * _SEQ.value
            if step % 10 == 9:
                loss, density = float(loss), float(densities.mean())
                rate = seen / (time.perf_counter() - began)
                progress.update(
                    task,
                    completed=step + 1,
                    description=f"loss {loss:.3f}, density {density:.1%}, {rate:,.0f} tokens/s",
                )
                with open(workdir / "log.jsonl", "a") as log:
                    record = {"step": step + 1, "loss": loss, "density": np.round(densities, 4).tolist()}
                    print(json.dumps(record), file=log)
            if (step + 1) % _SAVE_EVERY.value == 0 or step + 1 == _STEPS.value:
                manager.save(step + 1, args=ocp.args.StandardSave((nnx.to_pure_dict(params), state)))
    return params


def main(argv):
    """Trains and writes the model."""
    del argv
    logging.set_verbosity(logging.WARNING)
    workdir, out = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUT.value)
    workdir.mkdir(parents=True, exist_ok=True)
    if out.exists():
        raise app.UsageError(f"--out={out} exists already; name a new folder")
    params = train(prepare_tokens(workdir), workdir)
    tensors = {
        weight_name(path): np.asarray(
            variable[...].astype(jnp.bfloat16 if variable[...].ndim > 1 else jnp.float32)
        )
        for path, variable in nnx.to_flat_state(params)
    }
    write_checkpoint(out, CONFIG, tensors)
    shutil.copy(workdir / "tokenizer.json", out)
    # Shipped beside the model, so that its figures do not depend on the Python that measures them.
    (out / "evaluation.txt").write_text("\n\n".join(read_texts("stdlib:evaluation")), encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    app.run(main)
