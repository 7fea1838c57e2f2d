"""Measures what a mode does to a model's answers: perplexity and divergence from dense, on a text.

    python -m pjax.perplexity --config=configs/quickstart.py [--workdir=DIR] [--text=FILE] [--json]

Every scored position runs the mode's own FFN with per-token masks. The convention is llama.cpp's: chunks of
512 tokens that do not overlap, of which the second half is scored; +- is the standard error. Predictors come
from the workdir, and are made first if they are not there. Running estimates go to stderr, a table to stdout,
or with --json one JSON object: `model`, `text`, `chunk_tokens`, `chunks` and the report's key `quality`.
"""

import dataclasses
import json
from typing import Any

from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table

from pjax import cli
from pjax.base import MODES, Mode
from pjax.pipeline import fit, open_model
from pjax.quality import Quality, measure_layer_errors, measure_quality, mode_ways
from pjax.report.record import quality_part
from pjax.report.tables import QUALITY_COLUMNS, guard_warning, quality_rows

flags.adopt_module_key_flags(cli)
_TEXT = flags.DEFINE_string("text", None, "The text to score, instead of the config's quality.text.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object on stdout instead of the table.")

NAME = "pjax.perplexity"


def main(argv: list[str]) -> None:
    """Scores the config's text."""
    settings, workdir = cli.read_settings(argv)
    if _TEXT.value is not None:
        quality = dataclasses.replace(settings.quality, text=_TEXT.value)
        settings = dataclasses.replace(settings, quality=quality)
    console = Console(stderr=True)
    bars = cli.StageBars(console)
    with bars.progress:
        opened = open_model(settings, workdir, bars.begin)
        model, rows = opened.model, opened.quality_rows
        predictors = fit(settings, opened, bars.say).predictors
        modes: tuple[Mode, ...] = MODES if predictors else ("dense",)
        ways = mode_ways(model, modes, predictors)
        progress_fn = bars.begin("perplexity")
        found = measure_quality(
            model,
            rows,
            ways,
            progress_fn=progress_fn,
            report_fn=lambda so_far: console.print(running_line(so_far), highlight=False, soft_wrap=True),
        )
        errors = measure_layer_errors(model, rows, ways)
        bars.end()
    result: dict[str, Any] = {"model": model.config.name, "text": settings.quality.text}
    result |= {"chunk_tokens": rows.shape[1], "chunks": len(rows)}
    result |= quality_part(found, errors, settings.quality)
    if _JSON.value:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        Console().print(quality_table(result))
        if predictors:
            Console().print(layer_error_table(result))
    warning = guard_warning(result)
    if warning:
        console.print(warning, style="bold red", markup=False, highlight=False, soft_wrap=True)


def running_line(so_far: Quality) -> str:
    """The estimates after some of the text."""
    values = [f"{mode} {way.perplexity:.4f} +- {way.error:.4f}" for mode, way in so_far.modes.items()]
    return f"{so_far.tokens:8,} tokens: {', '.join(values)}"


def quality_table(result: dict[str, Any]) -> Table:
    """The modes, a row each, from the JSON object."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{result['model']} on {result['text']}",
        caption=f"{result['tokens']:,} tokens of {result['chunks']} chunks of {result['chunk_tokens']}",
    )
    for column in QUALITY_COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    for row in quality_rows(result):
        table.add_row(*row)
    return table


def layer_error_table(result: dict[str, Any]) -> Table:
    """How far each layer's FFN is from the dense one on the same input, from the JSON object."""
    errors = {mode: way["layer_error"] for mode, way in result["modes"].items() if way["layer_error"]}
    table = Table(box=box.SIMPLE_HEAD, title="relative error of the FFN's output")
    for column in ("layer", *errors):
        table.add_column(column, justify="right")
    for layer, values in enumerate(zip(*errors.values(), strict=True)):
        table.add_row(str(layer), *(f"{100 * value:.3g} %" for value in values))
    return table


if __name__ == "__main__":
    cli.run_app(NAME, main)
