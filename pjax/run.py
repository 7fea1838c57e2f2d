"""Prepares a model stage by stage, and generates text with it.

    python -m pjax.run --config=configs/quickstart.py [--workdir=DIR] [--prompt=TEXT] [--config.a.b=value]

Text goes to stdout, everything else to stderr; with --json stdout gets one JSON object instead, which
is also `report.json` in the workdir.
"""

import json
from operator import itemgetter
from typing import Any, cast

from absl import flags
from rich.console import Console

from pjax import cli
from pjax.base import Mode
from pjax.executor import make_executor
from pjax.formats import read_checkpoint
from pjax.generate import Generation, generate
from pjax.pipeline import Prepared, prepare
from pjax.plan import make_plan
from pjax.report.page import report_page
from pjax.report.pictures import can_draw, draw_placement
from pjax.report.tables import decode_line, guard_warning, layer_table, plan_table, summary_table
from pjax.sampling import check_integer, make_sampler
from pjax.settings import Settings
from pjax.stages import Stages
from pjax.textio import check_stop
from pjax.workdir import write_atomically

flags.adopt_module_key_flags(cli)
_PROMPT = flags.DEFINE_string(
    "prompt", None, "Text to continue or question to answer, instead of the config's."
)
_JSON = flags.DEFINE_bool("json", False, "Print the report as JSON on stdout instead of the text.")
_PLAN = flags.DEFINE_bool("plan", False, "Print what would go where in memory, and stop before any weight.")
_VERIFY = flags.DEFINE_bool("verify", False, "Compare every byte of the weights with the workdir's.")


SHORT = 24
"""Layers whose table still fits on a screen; of more it is in the report."""


def main(argv: list[str]) -> None:
    """Runs the config."""
    settings, workdir = cli.read_settings(argv, prompt=_PROMPT.value)
    _check_generate(settings)
    console = Console(stderr=True)
    bars = cli.StageBars(console)
    if _PLAN.value:
        workdir.mkdir(parents=True, exist_ok=True)
        checkpoint = read_checkpoint(settings.model, activation=settings.activation)
        planned = make_plan(settings, checkpoint, Stages(workdir, bars.begin))
        Console().print(plan_table(planned.memory, planned.hardware))
        return
    with bars.progress:
        prepared = prepare(settings, workdir, bars.begin, verify=_VERIFY.value, say_fn=bars.say)
        bars.end()
    warn(console, settings, prepared)
    generation = _generate(settings, prepared, console)
    report: dict[str, Any] = prepared.report | {"text": _shown_prompt(settings) + generation.text}
    text = json.dumps(report, indent=1, allow_nan=False)
    write_atomically(workdir / "report.json", text.encode())
    if _JSON.value:
        print(text)
    console.print(summary_table(report))
    if report["placement"] and report["model"]["layers"] <= SHORT:
        console.print(layer_table(report["placement"]))
    write_atomically(workdir / "report.html", report_page(report, prepared.stats).encode())
    if report["placement"] and can_draw():
        draw_placement(report["placement"]).savefig(workdir / "placement.png", dpi=200)
        console.print(f"picture: {workdir / 'placement.png'}", highlight=False)
    console.print(f"report: {workdir / 'report.json'}, {workdir / 'report.html'}", highlight=False)


def _check_generate(settings: Settings) -> None:
    """Refuses bad options before the stages have done their work."""
    options = vars(settings.generate)
    check_stop(options["stop"])
    check_integer("max_new_tokens", options["max_new_tokens"], 0)
    sampling = {name: value for name, value in options.items() if name not in ("stop", "max_new_tokens")}
    make_sampler([[0]], [settings.seed], 1, **sampling)


def warn(console: Console, settings: Settings, prepared: Prepared) -> None:
    """Says loudly what a reader of the figures must know."""
    if prepared.simulated and prepared.report["executor"]["kind"] == "two programs":
        console.print(
            f"[yellow]hardware {settings.hardware} is simulated:[/] the placement is for a device that is "
            "not here; an emulated CPU device stands in for it, so the split runs, but no faster.",
            soft_wrap=True,
        )
    placement = prepared.report["placement"]
    if placement and not sum(placement["hot_neurons"]):
        reason = "its device gets no memory" if not placement["budget_bytes"] else "nothing is worth moving"
        if set(map(itemgetter("limit"), placement["per_layer"])) == {"no gain"}:
            reason = "its device reads no faster than the host, so that nothing is worth moving"
        console.print(
            f"hardware {prepared.report['hardware']['name']}: {reason}; all neurons stay on the host.",
            soft_wrap=True,
            highlight=False,
        )
    warning = guard_warning(prepared.report["quality"])
    if warning:
        console.print(warning, style="bold red", markup=False, highlight=False, soft_wrap=True)


def _shown_prompt(settings: Settings) -> str:
    """An answer begins on a line of its own, a continuation where the prompt ends."""
    return settings.prompt + ("\n" if settings.chat else "")


def _generate(settings: Settings, prepared: Prepared, console: Console) -> Generation:
    executor = make_executor(
        prepared.model,
        prepared.placement,
        mode=cast(Mode, settings.mode or prepared.mode),
        predictors=prepared.predictors,
        simulated=prepared.simulated,
    )
    options: dict[str, Any] = {**vars(settings.generate), "seed": settings.seed}

    def show(text: str) -> None:
        if not _JSON.value:
            print(text, end="", flush=True)

    show(_shown_prompt(settings))
    generation = generate(executor, prepared.tokenizer, prepared.prompt, on_text=show, **options)
    show("\n")
    assert isinstance(generation, Generation)  # one prompt gives one
    timings = generation.timings
    rate = f"{timings.tokens_per_s:,.0f} tokens/s" if timings.tokens_per_s else "-"
    console.print(
        f"{timings.tokens} tokens, {executor.kind} on {', '.join(map(str, executor.devices))}, "
        f"mode {settings.mode or prepared.mode}, first token {timings.first_token_s:.2f} s, {rate}, "
        "with compiling",
        highlight=False,
        soft_wrap=True,
    )
    where = decode_line(prepared.report)
    if where:
        console.print(where, highlight=False, soft_wrap=True)
    return generation


if __name__ == "__main__":
    cli.run_app("pjax.run", main)
