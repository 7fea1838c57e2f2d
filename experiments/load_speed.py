"""How fast does a model load, in how much memory, and when does a prepared one write its first token?

    python -m experiments.load_speed [--quick]

Writes a LLaMA of 2.7 GB in bfloat16 with weights of no meaning (synthetic; only time and memory are
measured), as one file and as shards, and loads each in fresh processes while the files are in the system's
cache. Claims: peak memory, less its level before the load, is at most 1.1 times the weights in the type asked
for; a load takes at most 1.5 times as long as reading the bytes once into memory.

Then it prepares workdirs of it, in bfloat16 and in 4 bits, and opens each in fresh processes: from
`LLM(workdir)` to the first token after a prompt of 8 ids, less the imports and the start of JAX. "compiles"
is the first such process, which has to compile; the others find its programs. Claim: at most 3 s.
"""

import json
import os
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

from pjax.formats import read_checkpoint
from pjax.llm import LLM
from pjax.manifest import Manifest, write_manifest
from pjax.storage import load_checkpoint, load_model, model_fingerprint
from pjax.weights_file import WEIGHTS_FILE, save_weights, weights_origin

_QUICK = flags.DEFINE_bool("quick", False, "A twentieth of the size, once, to see that it runs.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Processes for each figure, which is their median.", 1)
_SCRATCH = flags.DEFINE_string(
    "scratch", None, "Folder for 9 GB of files, deleted at the end; default: temporary."
)
_TASK = flags.DEFINE_string("task", None, "For the processes it starts: what to time.")
_FOLDER = flags.DEFINE_string("folder", None, "For the processes it starts: the model.")

_PROMPT_TOKENS = 8  # Reading them reads the weights once or twice, as any prompt does, and little more.
_READ_BYTES = 16 << 20  # At a time; larger ones are no faster.


def write_model(folder: Path, num_shards: int, quick: bool) -> None:
    """Writes a LLaMA with shapes as those of a 1.3B model."""
    width, neurons, layers, vocab = (512, 2048, 12, 8192) if quick else (2048, 5504, 24, 32000)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
    }
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
    kept = []  # all of it until the end: the memory of one shard must not serve for the next
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        kept.append(np.empty(size if keep else _READ_BYTES, np.uint8))
        target = memoryview(kept[-1])
        with file.open("rb", buffering=0) as stream:
            position = 0
            while count := stream.readinto(target[position : position + _READ_BYTES]):
                position += count if keep else 0


def prepare(folder: Path, workdir: Path, dtype: str | None) -> None:
    """Makes a workdir of a model that nothing was measured of: its weights, and what `LLM` has to know."""
    checkpoint = read_checkpoint(folder)
    model = load_checkpoint(checkpoint, dtype=dtype)
    save_weights(workdir / WEIGHTS_FILE, model, weights_origin(checkpoint, dtype))
    write_manifest(workdir, Manifest(str(folder), dtype, None, model_fingerprint(model), "exact", {}))


def first_token(workdir: Path) -> dict[str, float]:
    """Opens a workdir and generates one token."""
    start = time.perf_counter()
    llm = LLM(workdir)
    loaded = time.perf_counter()
    llm.generate(list(range(_PROMPT_TOKENS)), max_new_tokens=1)
    end = time.perf_counter()
    return {"load": loaded - start, "generate": end - loaded, "seconds": end - start}


def memory_bytes(field: str) -> int:
    """One of the figures that Linux keeps of this process: VmRSS now, VmHWM at its highest."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if not found:
        raise ValueError(f"/proc/self/status has no {field}; this needs Linux.")
    return int(found[1]) * 1024


def run_task(task: str, folder: Path) -> dict[str, float]:
    """Times one task in this process: read, read_small, first_token, or load with a type or "stored"."""
    jax.block_until_ready(jax.numpy.zeros(1))  # starting JAX is not part of loading
    if task == "first_token":
        return first_token(folder)
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
    # Compiled programs are kept beside the model: nothing of an earlier experiment counts.
    environment = os.environ | {"XDG_CACHE_HOME": str(folder.parent)}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def load_table(scratch: Path, repeats: int) -> Table:
    """Writes the models and loads them."""
    table = Table("files", "task", "seconds", "times reading", "peak / weights")
    for kind, num_shards in (("single", 1), ("3 shards", 3)):
        folder = scratch / kind.replace(" ", "-")
        write_model(folder, num_shards, _QUICK.value)
        tasks = ("read_small", "read", "stored", "float32", "q4_0")
        # In turns, so that what else this machine does falls on all alike.
        runs = [{task: measure(task, folder) for task in tasks} for _ in range(repeats)]
        medians = {t: statistics.median(run[t]["seconds"] for run in runs) for t in tasks}
        for task in tasks:
            peak = max(run[task]["peak"] for run in runs)
            ratio = medians[task] / medians["read"]
            cells = (f"{medians[task]:.2f}", f"{ratio:.2f}", f"{peak:.3f}" if peak else "")
            table.add_row(kind, task, *cells)
    return table


def first_token_table(scratch: Path, repeats: int) -> Table:
    """Prepares workdirs of the model in one file and opens them."""
    table = Table("weights.pack", "GB", "load, s", "generate, s", "first token, s", "compiles, s")
    for dtype in (None, "q4_0"):
        workdir = scratch / f"workdir-{dtype}"
        workdir.mkdir()
        prepare(scratch / "single", workdir, dtype)
        compiling = measure("first_token", workdir)
        runs = [measure("first_token", workdir) for _ in range(repeats)]
        medians = [statistics.median(run[part] for run in runs) for part in ("load", "generate", "seconds")]
        gigabytes = (workdir / WEIGHTS_FILE).stat().st_size / 1e9
        figures = (gigabytes, *medians, compiling["seconds"])
        table.add_row(dtype or "bfloat16", *(f"{figure:.2f}" for figure in figures))
    return table


def main(argv):
    """Measures and prints."""
    del argv
    if _TASK.value and _FOLDER.value:
        print(json.dumps(run_task(_TASK.value, Path(_FOLDER.value))))
        return
    repeats = 1 if _QUICK.value else _REPEATS.value
    with tempfile.TemporaryDirectory(dir=_SCRATCH.value) as scratch:
        for table_fn in (load_table, first_token_table):
            Console().print(table_fn(Path(scratch), repeats))


if __name__ == "__main__":
    app.run(main)
