"""What the commands share: the flags that name a config, progress on stderr, and one-line complaints."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pjax.base import ProgressFn
from pjax.compiled import keep_compiled
from pjax.formats import expand_path
from pjax.hardware import find_hardware
from pjax.ops.ffi import unusable_reason
from pjax.settings import Settings, make_settings

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "What to run: a file in configs/.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results are kept; default runs/NAME_OF_THE_CONFIG.")


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


def read_settings(argv: list[str], **overrides: str | None) -> tuple[Settings, Path]:
    """The checked settings and the workdir that the flags name; sets up JAX for them.

    Args:
        argv: what is left of the command line.
        **overrides: top-level keys of the config; None keeps the config's own.

    Raises:
        ValueError: a flag is missing, or a value is not what it has to be.
    """
    logging.set_verbosity(logging.WARNING)
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}; options begin with --")
    if _CONFIG.value is None:
        raise ValueError("--config is missing; for example --config=configs/quickstart.py")
    values = _CONFIG.value.to_dict()
    settings = make_settings(values | {key: value for key, value in overrides.items() if value is not None})
    _stand_in(settings)
    keep_compiled()
    unusable_reason()  # raises if PJAX_CPU or PJAX_NUM_THREADS make no sense
    config_file = Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    return settings, expand_path(_WORKDIR.value or Path("runs") / config_file.stem)


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


def run_app(name: str, main: Callable[[list[str]], None]) -> None:
    """Parses the flags and runs; a fault of the user's is one line on stderr and exit code 2.

    Args:
        name: of the command, for complaints.
        main: takes what is left of the command line.
    """
    try:
        app.run(main, flags_parser=lambda argv: _parse_flags(name, argv))
    except (ValueError, OSError) as error:
        sys.exit(complain(name, str(error)))
    except KeyboardInterrupt:
        sys.exit(130)


def _parse_flags(name: str, argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(complain(name, str(error)))
    except (AttributeError, KeyError, TypeError, ImportError, SyntaxError, OSError, ValueError) as error:
        key = str(error).strip("'\"")
        # ml_collections says no more of an unknown key than its name.
        message = f"--config: {error}" if " " in key else f"--config.{key}: the config has no such key"
        sys.exit(complain(name, message))


def complain(name: str, message: str) -> int:
    """Prints a fault of the user's on one line of stderr, and returns the exit code for it."""
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return 2
