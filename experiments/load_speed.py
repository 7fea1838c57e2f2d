"""How fast does a model load, and how much memory does that take beyond the weights themselves?

    python -m experiments.load_speed [--quick]

Writes a LLaMA of 2.7 GB in bfloat16 with weights of no meaning (synthetic; only time and memory are
measured), as one file and as shards, and loads each in fresh processes while the files are in the system's
cache. Claims: peak memory, less its level before the load, is at most 1.1 times the weights in the type asked
for; a load takes at most 1.5 times as long as reading the bytes once into memory.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from pjax.storage import load_model

_QUICK = flags.DEFINE_bool("quick", False, "A twentieth of the size, once, to see that it runs.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Processes for each figure, which is their median.", 1)
_SCRATCH = flags.DEFINE_string(
    "scratch", None, "Folder for 5 GB of files, deleted at the end; default: temporary."
)
_TASK = flags.DEFINE_string("task", None, "For the processes it starts: what to time.")
_FOLDER = flags.DEFINE_string("folder", None, "For the processes it starts: the model.")

_READ_BYTES = 16 << 20  # At a time; larger ones are no faster.


def write_model(folder: Path, num_shards: int, quick: bool) -> None:
    """Writes a LLaMA with shapes as those of a 1.3B model."""
    width, neurons, layers, vocab = (512, 2048, 12, 8192) if quick else (2048, 5504, 24, 32000)
    shapes = {"model.embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    shapes["model.norm.weight"] = (width,)
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.self_attn.{n}_proj.weight": (width, width) for n in "qkvo"}
        shapes |= {f"{stem}.mlp.{n}_proj.weight": (neurons, width) for n in ("gate", "up")}
        shapes[f"{stem}.mlp.down_proj.weight"] = (width, neurons)
        shapes |= {f"{stem}.{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}
    folder.mkdir()
    noise = np.random.default_rng(0).normal(size=1 << 20).astype(ml_dtypes.bfloat16)
    shards: list[dict] = [{} for _ in range(num_shards)]
    for index, (name, shape) in enumerate(shapes.items()):
        shards[index * num_shards // len(shapes)][name] = np.resize(noise, shape)
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / ("model.safetensors" if num_shards == 1 else name))
    if num_shards > 1:
        weight_map = {name: file for file, tensors in zip(names, shards, strict=True) for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "relu",
        "hidden_size": width,
        "intermediate_size": neurons,
        "max_position_embeddings": 2048,
        "num_attention_heads": width // 128,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def read_once(folder: Path, keep: bool) -> None:
    """Reads all weight files, into new memory as a load has to, or into one small piece of it."""
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        target = memoryview(np.empty(size if keep else _READ_BYTES, np.uint8))
        with file.open("rb", buffering=0) as stream:
            position = 0
            while count := stream.readinto(target[position : position + _READ_BYTES]):
                position += count if keep else 0


def memory_bytes(field: str) -> int:
    """One of the figures that Linux keeps of this process: VmRSS now, VmHWM at its highest."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if not found:
        raise ValueError(f"/proc/self/status has no {field}; this needs Linux.")
    return int(found[1]) * 1024


def run_task(task: str, folder: Path) -> dict[str, float]:
    """Times one task in this process: read, read_small, or load with a type or "stored"."""
    jax.block_until_ready(jax.numpy.zeros(1))  # starting JAX is not part of loading
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    before, start = memory_bytes("VmRSS"), time.perf_counter()
    if task.startswith("read"):
        read_once(folder, keep=task == "read")
        return {"seconds": time.perf_counter() - start, "peak": 0.0}
    model = load_model(folder, dtype=None if task == "stored" else task)
    jax.block_until_ready(jax.tree.leaves(model))
    seconds, peak = time.perf_counter() - start, memory_bytes("VmHWM") - before
    return {"seconds": seconds, "peak": peak / sum(leaf.nbytes for leaf in jax.tree.leaves(model))}


def measure(task: str, folder: Path) -> dict[str, float]:
    """Runs a task in a fresh process."""
    command = [sys.executable, "-m", "experiments.load_speed", f"--task={task}", f"--folder={folder}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(argv):
    """Measures and prints."""
    del argv
    if _TASK.value:
        print(json.dumps(run_task(_TASK.value, Path(_FOLDER.value))))
        return
    repeats = 1 if _QUICK.value else _REPEATS.value
    table = Table("files", "task", "seconds", "times reading", "peak / weights")
    with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
        for kind, num_shards in (("single", 1), ("3 shards", 3)):
            folder = Path(scratch) / kind.replace(" ", "-")
            write_model(folder, num_shards, _QUICK.value)
            tasks = ("read_small", "read", "stored", "float32")
            # In turns, so that what else this machine does falls on all alike.
            runs = [{task: measure(task, folder) for task in tasks} for _ in range(repeats)]
            medians = {t: statistics.median(run[t]["seconds"] for run in runs) for t in tasks}
            for task in tasks:
                peak = max(run[task]["peak"] for run in runs)
                ratio = medians[task] / medians["read"]
                cells = (f"{medians[task]:.2f}", f"{ratio:.2f}", f"{peak:.3f}" if peak else "")
                table.add_row(kind, task, *cells)
    Console().print(table)


if __name__ == "__main__":
    app.run(main)
