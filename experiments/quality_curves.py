"""How much of a model is needed for its answers: perplexity by neurons kept, recall by neurons marked.

    python -m experiments.quality_curves [--quick] [--workdir=runs/quickstart] [--output=runs/quality_curves]

kept     In the form of Bamboo's table: of each token, each layer keeps the same share of its neurons, those
         that contribute the most to the output, |value| times the norm of the down row. That is an oracle,
         which computes everything first: no predictor of that density can be expected to do better.
recall   For each layer's predictor, which share of the active neurons it marks if it may mark so many. The
         dots are the thresholds of the workdir.
traded   The whole model in mode predicted, with every layer's threshold at the same recall.

Each is a .csv and, where matplotlib is installed (extra pjax[plots]), a .png. Recalls and densities are those
of the tokens that training held out; what is scored is another text.
"""

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from rich.console import Console

from experiments.curves import Curve, kept_curve, recall_curves, traded_curve
from pjax.llm import LLM
from pjax.pipeline import encode_text
from pjax.quality import chunks
from pjax.report.pictures import can_draw

_QUICK = flags.DEFINE_bool("quick", False, "A few points on little text, to see that it runs.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "A workdir prepared by pjax.run.")
_TEXT = flags.DEFINE_string("text", "configs/demo/evaluation.txt", "What is scored, as quality.text.")
_NUM_TOKENS = flags.DEFINE_integer("num_tokens", 16384, "At most so many of it.", 1)
_OUTPUT = flags.DEFINE_string("output", "runs/quality_curves", "Folder for the tables and pictures.")

KEPT = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
RECALLS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)


def draw_kept(table: Sequence[dict[str, Any]]):
    """Perplexity and divergence by the share of neurons kept."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(6, 6), layout="constrained")
    perplexity, divergence = figure.subplots(2, 1, sharex=True)
    x, dense = [100 * row["kept"] for row in table], table[-1]["perplexity"]
    perplexity.plot(x, [row["perplexity"] for row in table], marker="o")
    perplexity.axhline(dense, color="black", linestyle=":", label=f"dense, {dense:.3f}")
    perplexity.set(ylabel="perplexity", yscale="log", xscale="log")
    for which in ("major", "minor"):  # 24, not 2.4 x 10^1
        getattr(perplexity.yaxis, f"set_{which}_formatter")(LogFormatter(minor_thresholds=(2, 0.5)))
    perplexity.legend()
    divergence.plot(x[:-1], [row["kl_mean"] for row in table[:-1]], marker="o")
    divergence.set(ylabel="KL divergence from dense, nats", yscale="log")
    divergence.xaxis.set_major_formatter("{x:g}")
    divergence.set_xlabel("neurons kept of each layer, those with the largest contributions, %")
    return figure


def draw_recall(curves: Sequence[Curve]):
    """Recall by the share of neurons marked, a line a layer."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, curve in enumerate(curves):
        color = colormaps["viridis"](place / max(1, len(curves) - 1))
        axes.plot(100 * curve.density, 100 * curve.recall, color=color, label=f"layer {curve.layer}")
        axes.plot(100 * curve.now[1], 100 * curve.now[0], color=color, marker="o")
    axes.set(xlabel="neurons marked, %", ylabel="active neurons found (recall), %", xscale="log")
    axes.set_xlim(0.1, 110)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small", ncols=1 + len(curves) // 12)
    axes.grid(alpha=0.3)
    return figure


def draw_traded(table: Sequence[dict[str, Any]]):
    """What a higher recall costs in neurons, and what it gives."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    densities, rises = figure.subplots(2, 1, sharex=True)
    x = [100 * row["recall"] for row in table]
    densities.plot(x, [100 * row["density"] for row in table], marker="o")
    densities.set_ylabel("neurons marked, mean over layers, %")
    rise, error = ([100 * row[name] for row in table] for name in ("rise", "rise_error"))
    rises.errorbar(x, rise, yerr=error, marker="o")
    rises.axhline(0, color="black", linestyle=":")
    rises.set(xlabel="recall of every layer, %", ylabel="perplexity above dense, %")
    return figure


def main(argv: list[str]) -> None:
    """Measures the three curves."""
    del argv
    logging.set_verbosity(logging.WARNING)
    console, folder = Console(), Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(_WORKDIR.value)
    model, predictors = llm.model, llm.predictors
    if predictors is None or not predictors.histograms:
        raise app.UsageError(f"--workdir: {_WORKDIR.value} has no predictors that pjax.run trained")
    quick = _QUICK.value
    ids = encode_text(llm.tokenizer, _TEXT.value, 2048 if quick else _NUM_TOKENS.value)
    rows = chunks(ids, model.config.context, model.config.bos_id)
    kept = kept_curve(model, rows, KEPT[2::5] if quick else KEPT)
    curves = recall_curves(predictors)
    traded = traded_curve(model, predictors, rows, RECALLS[::5] if quick else RECALLS)
    points = [
        dict(zip(("layer", *Curve._fields[1:5]), (c.layer, *values), strict=True))
        for c in curves
        for values in zip(*(array.tolist() for array in c[1:5]), strict=True)
    ]
    drawn = {"kept": partial(draw_kept, kept), "recall": partial(draw_recall, curves)}
    drawn["traded"] = partial(draw_traded, traded)
    for name, table in (("kept", kept), ("recall", points), ("traded", traded)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        if can_draw():
            drawn[name]().savefig(folder / f"{name}.png", dpi=100)
    for name, table in (("kept", kept), ("recall", traded)):
        for row in table:
            console.print(
                f"{name} {row[name]:7.2%}: perplexity {row['perplexity']:9.3f} +- {row['error']:.3f}, "
                f"{row['rise']:+9.3%} +- {row['rise_error']:.3%}, KL {row['kl_mean']:.5f} nats, same best "
                f"token {row['top1_agreement']:.2%}"
                + (f", marked {row['density']:.2%}" if "density" in row else ""),
                highlight=False,
                soft_wrap=True,
            )
    console.print(f"in {folder}", highlight=False)


if __name__ == "__main__":
    app.run(main)
