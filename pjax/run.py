"""Prepares a model stage by stage, and generates text with it.

    python -m pjax.run --config=configs/quickstart.py [--workdir=DIR] [--prompt=TEXT] [--config.a.b=value]

Text goes to stdout, everything else to stderr; with --json stdout gets one JSON object instead, which
is also `report.json` in the workdir.
"""

import json
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import jax
from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pjax.base import Mode, ProgressFn
from pjax.compiled import keep_compiled
from pjax.executor import make_executor
from pjax.formats import expand_path, read_checkpoint
from pjax.generate import Generation, generate
from pjax.hardware import find_hardware
from pjax.ops.ffi import unusable_reason
from pjax.pipeline import Prepared, prepare
from pjax.plan import make_plan
from pjax.report import draw_placement, layer_table, plan_table, summary_table
from pjax.sampling import check_integer, make_sampler
from pjax.settings import Settings, make_settings
from pjax.stages import Stages
from pjax.textio import check_stop
from pjax.workdir import write_atomically

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "What to run: a file in configs/.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results are kept; default runs/NAME_OF_THE_CONFIG.")
_PROMPT = flags.DEFINE_string(
    "prompt", None, "Text to continue or question to answer, instead of the config's."
)
_JSON = flags.DEFINE_bool("json", False, "Print the report as JSON on stdout instead of the text.")
_PLAN = flags.DEFINE_bool("plan", False, "Print what would go where in memory, and stop before any weight.")
_VERIFY = flags.DEFINE_bool("verify", False, "Compare every byte of the weights with the workdir's.")


SHORT = 24
"""Layers whose table still fits on a screen; of more it is in the report."""


class StageBars:
    """One progress bar a stage on a terminal, one line a stage elsewhere."""

    def __init__(self, console: Console):
        self._console, self._start = console, time.perf_counter()
        columns = (TextColumn("{task.description:12}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = None

    def begin(self, name: str) -> ProgressFn:
        """Ends the bar of the stage before and begins one; see `stages.StageFn`."""
        self.end()
        if not self._console.is_terminal:
            self._console.print(f"[{time.perf_counter() - self._start:6.1f} s] {name}", highlight=False)
        task = self._task = self.progress.add_task(name, total=None)
        return lambda done, total: self.progress.update(task, completed=done, total=total)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, style="dim", highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Shows the stage as done."""
        if self._task is not None:
            self.progress.update(self._task, completed=1, total=1)
            self.progress.stop_task(self._task)


def main(argv: list[str]) -> None:
    """Runs the config."""
    logging.set_verbosity(logging.WARNING)
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}; options begin with --")
    if _CONFIG.value is None:
        raise ValueError("--config is missing; for example --config=configs/quickstart.py")
    values = _CONFIG.value.to_dict()
    if _PROMPT.value is not None:
        values["prompt"] = _PROMPT.value
    settings = make_settings(values)
    _stand_in(settings)
    keep_compiled()
    _check_generate(settings)
    unusable_reason()  # raises if PJAX_CPU or PJAX_NUM_THREADS make no sense
    config_file = Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    workdir = expand_path(_WORKDIR.value or Path("runs") / config_file.stem)
    console = Console(stderr=True)
    bars = StageBars(console)
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
    if report["placement"] and draw_placement(report["placement"], workdir / "placement.png"):
        console.print(f"picture: {workdir / 'placement.png'}", highlight=False)
    console.print(f"report: {workdir / 'report.json'}", highlight=False)


def _check_generate(settings: Settings) -> None:
    """Refuses bad options before the stages have done their work."""
    options = vars(settings.generate)
    check_stop(options["stop"])
    check_integer("max_new_tokens", options["max_new_tokens"], 0)
    sampling = {name: value for name, value in options.items() if name not in ("stop", "max_new_tokens")}
    make_sampler([[0]], [settings.seed], 1, **sampling)


def _stand_in(settings: Settings) -> None:
    """Gives simulated hardware a second emulated CPU device, to run the split on."""
    if settings.hardware == "measured":
        return
    try:
        hardware = find_hardware(settings.hardware)
    except ValueError as error:
        raise ValueError(f"config.hardware: {error}") from error
    if hardware.source == "simulated":
        jax.config.update("jax_num_cpu_devices", 2)


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
    if prepared.report["quality"]["guard"] == "failed":
        console.print(
            "[bold red]quality guard failed:[/] predicted is further from dense than "
            f"{settings.quality.max_perplexity_rise:.1%} in perplexity; mode=None falls back to exact.",
            soft_wrap=True,
        )


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
    return generation


def run_app() -> None:
    """Parses the flags and runs; a fault of the user's is one line on stderr and exit code 2."""
    try:
        app.run(main, flags_parser=_parse_flags)
    except (ValueError, OSError) as error:
        sys.exit(_complain(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_complain(str(error)))
    except (AttributeError, KeyError, TypeError, ImportError, SyntaxError, OSError, ValueError) as error:
        name = str(error).strip("'\"")
        # ml_collections says no more of an unknown key than its name.
        message = f"--config: {error}" if " " in name else f"--config.{name}: the config has no such key"
        sys.exit(_complain(message))


def _complain(message: str) -> int:
    print(f"pjax.run: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    run_app()
