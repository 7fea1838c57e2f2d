"""How much of the activations does the device serve, and how long does a step take, by placement policy?

    python -m experiments.placement_compare [--quick] [--output=runs/placement_compare]

In the form of PowerInfer's Figs. 12 (share of the neuron load on the GPU) and 15 (what its policy adds to
random neurons). Policies: `layers` moves whole layers with their attention, the last ones first, as layer
offload does; `random` any neurons; `greedy` the most frequent ones, whatever a join costs (what PowerInfer's
public code intends); `impact` and `latency` are those of `pjax.solve_placement`.

Cases: the demo model's own statistics, and power laws fitted to the paper's figures for published shapes,
which are synthetic (`experiments.power_law`). All device memory but `plan.RESERVE` is for neurons: beside
all of the attention, 20 GB for OPT-30B in float16, few would fit. Times are those of the model that the
solver minimises, not measured.

`read_share` looks at the same memory otherwise: the share of all weights read for a token, the attention's
included, that the device holds; attention is read for every token, so that it comes before any neuron.

A second table has the solver's time and gap up to 96 x 768 groups. Writes placement_compare.csv, solver.csv
and, where matplotlib is installed (extra pjax[plots]), placement_compare.png.
"""

import csv
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from experiments.power_law import PUBLISHED, make_stats
from pjax.base import ActivationStats, HardwareSpec
from pjax.hardware import hardware_preset
from pjax.model_config import ModelConfig
from pjax.pipeline import encode_text, profile_rows
from pjax.placement import neuron_bytes, solve_placement, step_seconds
from pjax.plan import RESERVE
from pjax.weights import row_bytes

_QUICK = flags.DEFINE_bool("quick", False, "The demo model and the smallest sizes only.")
_OUTPUT = flags.DEFINE_string("output", "runs/placement_compare", "Folder for the tables and the picture.")

POLICIES = ("layers", "random", "greedy", "impact", "latency")

PC_HIGH, PC_LOW = "rtx4090-i9-13900k", "rtx2080ti-i7-12700k"
CASES = (
    (PC_HIGH, "opt-30b", "float16"), (PC_HIGH, "opt-66b", "float16"), (PC_HIGH, "opt-175b", "q4_0"),
    (PC_HIGH, "falcon-40b", "float16"), (PC_HIGH, "llama-70b", "q4_0"),
    (PC_LOW, "opt-13b", "float16"), (PC_LOW, "opt-66b", "q4_0"), (PC_LOW, "opt-30b", "float16"),
)  # fmt: skip
"""Those of Fig. 12, and two more of Figs. 10 to 13."""

DEMO_SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
SIZES = ((32, 172, 40), (80, 448, 100), (96, 768, 100))
"""Layers, groups of 64 neurons, and C in groups."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to place."""

    name: str
    stats: ActivationStats
    config: ModelConfig
    hardware: HardwareSpec
    dtype: str
    device_bytes: int


def attention_bytes(config: ModelConfig, dtype: str) -> int:
    """Of one layer: its four projections."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return (queries + 2 * keys) * row_bytes(dtype, config.model) + config.model * row_bytes(dtype, queries)


def place(policy: str, case: Case, seed: int = 0) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Masks of a policy, and what a solver says of them."""
    if policy in ("impact", "latency"):
        placement = solve_placement(
            case.stats, case.config, case.hardware, device_bytes=case.device_bytes, dtype=case.dtype,
            objective=policy,
        )  # fmt: skip
        return placement.hot_mask, {
            "solve_s": placement.solve_s, "gap": placement.gap, "status": placement.status,
        }  # fmt: skip
    size = neuron_bytes(case.config, case.dtype)
    widths = case.config.neurons
    capacity = case.device_bytes // size
    if policy == "layers":
        per_layer = size * widths[0] + attention_bytes(case.config, case.dtype)
        first = len(widths) - case.device_bytes // per_layer
        return tuple(np.full(width, layer >= first) for layer, width in enumerate(widths)), {}
    frequency = np.concatenate(case.stats.frequencies)
    keys = np.random.default_rng(seed).random(len(frequency)) if policy == "random" else -frequency
    mask = np.zeros(len(frequency), bool)
    mask[np.argsort(keys, kind="stable")[:capacity]] = True
    return tuple(np.split(mask, np.cumsum(widths)[:-1])), {}


def read_share(policy: str, case: Case, masks: tuple[np.ndarray, ...]) -> float:
    """Share of the bytes read for a token that the device holds, with attention in the same memory."""
    size, attention = neuron_bytes(case.config, case.dtype), attention_bytes(case.config, case.dtype)
    frequencies, layers = case.stats.frequencies, case.config.layers
    read = sum(float(f.sum()) for f in frequencies) * size + layers * attention
    if policy == "random":
        return case.device_bytes / (layers * attention + size * sum(case.config.neurons))
    if policy == "layers":
        held = sum(
            float(f[m].sum()) * size + m.all() * attention for f, m in zip(frequencies, masks, strict=True)
        )
        return held / read
    left = case.device_bytes - layers * attention
    if left <= 0:
        return case.device_bytes / read
    masks, _ = place("greedy", dataclasses.replace(case, device_bytes=left))
    served = sum(float(f[m].sum()) for f, m in zip(frequencies, masks, strict=True)) * size
    return (layers * attention + served) / read


def demo_cases() -> Iterator[Case]:
    """The demo model, with its own statistics, at growing budgets."""
    import pjax
    from configs.quickstart import DEMO

    model, tokenizer = pjax.load_model(DEMO), pjax.load_tokenizer(DEMO)
    ids = encode_text(tokenizer, "stdlib:calibration", 16384)
    stats = pjax.collect_stats(model, profile_rows(ids, model.config.context))
    dtype = model.layers[0].ffn.weights.format
    total = neuron_bytes(model.config, dtype) * sum(model.config.neurons)
    for share in DEMO_SHARES:
        name, hardware = f"demo {share:.0%}", hardware_preset("demo")
        yield Case(name, stats, model.config, hardware, dtype, int(share * total))


def published_cases() -> Iterator[Case]:
    """The paper's machines and models, with synthetic statistics."""
    for machine, model, dtype in CASES:
        published, hardware = PUBLISHED[model], hardware_preset(machine)
        name = f"{model} {dtype} {'PC-High' if machine == PC_HIGH else 'PC-Low'}"
        budget = int(hardware.device_bytes * (1 - RESERVE))
        # The paper gives its machines more host memory than the models need; attention is there, too.
        yield Case(name, make_stats(published), published.config, hardware, dtype, budget)


def compare(case: Case) -> list[dict[str, Any]]:
    """One row a policy."""
    rows = []
    for policy in POLICIES:
        masks, solved = place(policy, case)
        served = sum(int(c[m].sum()) for c, m in zip(case.stats.counts, masks, strict=True))
        size = neuron_bytes(case.config, case.dtype)
        used = size * sum(int(m.sum()) for m in masks)
        cold = tuple(np.zeros_like(mask) for mask in masks)
        step_s, all_cold_s = (
            step_seconds(case.stats.frequencies, hot, [size] * case.config.layers, case.hardware)
            for hot in (masks, cold)
        )
        rows.append({
            "case": case.name, "policy": policy, "layers": case.config.layers,
            "neurons": case.config.neurons[0], "ffn_bytes": size * sum(case.config.neurons),
            "device_bytes": used, "budget_bytes": case.device_bytes,
            "load_share": served / sum(int(c.sum()) for c in case.stats.counts),
            "read_share": read_share(policy, case, masks), "step_ms": 1e3 * step_s,
            "all_cold_ms": 1e3 * all_cold_s, **solved,
        })  # fmt: skip
    return rows


def solver_row(layers: int, groups: int, least: int, objective: str, share: float) -> dict[str, Any]:
    """Time and gap of a program whose C is `least` groups; a power law of its own exponent in each layer."""
    config = PUBLISHED["opt-66b"].config.replace(neurons=(64 * groups,) * layers)
    rng = np.random.default_rng(0)
    decay = rng.uniform(0.4, 1.2, (layers, 1))
    law = np.minimum(1.0, (np.arange(1, 64 * groups + 1) / 200) ** -decay) * rng.uniform(0.3, 1, (layers, 1))
    stats = ActivationStats(tuple(np.rint(f * 10**6).astype(np.int64) for f in law), 10**6)
    size = neuron_bytes(config, "float16")
    machine = dataclasses.replace(hardware_preset(PC_HIGH), device_bytes=2**50, host_bytes=2**50)
    saved_s = size * (1 / machine.host_gather_bytes_per_s - 1 / machine.device_bytes_per_s)
    machine = dataclasses.replace(machine, sync_s=(64 * least - 0.5) * saved_s)
    start = time.perf_counter()
    placement = solve_placement(
        stats, config, machine, device_bytes=int(share * size * 64 * groups * layers), dtype="float16",
        objective=objective,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return {
        "layers": layers, "groups": groups, "least_groups": least, "objective": objective,
        "budget_share": share, "status": placement.status, "gap": placement.gap,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows, whose keys together are the columns."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Bars of the share and of the time that the policies leave, a group each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(1.1 * len(cases) + 2, 8), sharex=True)
    for place_, policy in enumerate(POLICIES):
        own = [row for row in rows if row["policy"] == policy]
        x = np.arange(len(cases)) + 0.16 * (place_ - 2)
        top.bar(x, [100 * row["load_share"] for row in own], 0.16, label=policy)
        bottom.bar(x, [row["all_cold_ms"] / row["step_ms"] for row in own], 0.16)
    top.set_ylabel("activations on the device, %")
    top.axhline(20, ls=":", c="gray", lw=1)
    top.axhline(70, ls="--", c="gray", lw=1)
    top.set_title(
        "dashed: the paper's 70 % (PC-High); dotted: its 20 % of layer offload; all but demo: synthetic"
    )
    top.legend(ncols=len(POLICIES), loc="upper left", fontsize=8)
    top.set_ylim(0, 110)
    bottom.set_ylabel("FFN step, times faster than\nall on the host (model)")
    bottom.set_xticks(np.arange(len(cases)), [name.replace(" ", "\n") for name in cases], fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    """Compares, prints and writes."""
    del argv
    folder = Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for case in demo_cases() for row in compare(case)]
    if not _QUICK.value:
        rows += [row for case in published_cases() for row in compare(case)]
    print("share of activations (of all weights read), FFN time of a step")
    print(f"| case | {' | '.join(POLICIES)} |\n{'|---' * (len(POLICIES) + 1)}|")
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        cells = (f"{row['load_share']:.0%} ({row['read_share']:.0%}), {row['step_ms']:.3g} ms" for row in own)
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)
    write_csv(folder / "placement_compare.csv", rows)
    sizes = SIZES[:1] if _QUICK.value else SIZES
    solver_rows = [
        solver_row(*size, objective, share)
        for size in sizes for objective in ("impact", "latency") for share in (0.1, 0.3, 0.6)
    ]  # fmt: skip
    for row in solver_rows:
        print(
            ", ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
            )
        )
    write_csv(folder / "solver.csv", solver_rows)
    try:
        draw(folder / "placement_compare.png", rows)
    except ImportError:
        print("no picture: pip install matplotlib")


if __name__ == "__main__":
    app.run(main)
