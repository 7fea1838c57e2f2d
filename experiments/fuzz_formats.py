"""Does any damage to a model's files make a reader fail in another way than by saying which file is wrong?

    python -m experiments.fuzz_formats [--quick] [--inputs=100000] [--seconds=600] [--seed=0]

Sound files of every kind are damaged (`experiments.fuzz_inputs`) and opened in a process of little memory.
Each ends up as

    loaded    and what was loaded is consistent;
    refused   by a ValueError or FileNotFoundError that names the file;
    FAULT     anything else: another exception, more time or memory than files of some kilobytes are worth, a
              process that died, or a model that contradicts itself.

Inputs follow from the seed and their number. Those that fault are kept, and the exit status is then 1.
"""

import collections
import logging
import multiprocessing
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from absl import app, flags
from rich.console import Console
from rich.table import Table

from experiments.fuzz_readers import READERS, Reader

_INPUTS = flags.DEFINE_integer("inputs", 100_000, "How many, over all readers.", 1)
_QUICK = flags.DEFINE_bool("quick", False, "A few hundred inputs, to see that it runs.")
_SEED = flags.DEFINE_integer("seed", 0, "Of all damage.")
_SECONDS = flags.DEFINE_float("seconds", None, "Stop after so long, with fewer inputs.", 1)
_KEEP = flags.DEFINE_string("keep", "fuzz_faults", "Folder for inputs that fault.")

_MAX_CPU_S = 10  # For what sound files need milliseconds for.
_MAX_WALL_S = 120  # For a process that sleeps; far more, so that a busy machine is no fault.
_HEADROOM_BYTES = 1 << 30  # Above what the process has before; mostly the stacks and heaps of its threads.
_QUICK_INPUTS = 420


class Outcome(NamedTuple):
    """What became of one input.

    Attributes:
        number: of the input.
        kind: "loaded", "refused" or "FAULT".
        detail: the error.
        cpu_s: that it took.
    """

    number: int
    kind: str
    detail: str
    cpu_s: float


def fuzz(
    readers: Sequence[Reader], num_inputs: int, seed: int, deadline: float, keep: Path
) -> Iterator[Outcome]:
    """Opens damaged files, number n with reader n % len(readers), and yields what became of each.

    Args:
        readers: which.
        num_inputs: over all readers.
        seed: of the damage.
        deadline: of `time.monotonic`; nothing begins thereafter.
        keep: folder for the inputs that fault; made when there is one.
    """
    context = multiprocessing.get_context("spawn")
    number = 0
    while number < num_inputs and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as scratch:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, Path(scratch), readers, number, num_inputs, seed)
            )
            process.start()
            theirs.close()
            for outcome in _received(ours, process, number):
                number = outcome.number + 1
                if outcome.kind == "FAULT":
                    _keep_input(Path(scratch), readers, outcome.number, seed, keep)
                yield outcome
                if time.monotonic() >= deadline:
                    break
            process.kill()
            process.join()


def _received(connection: Connection, process: BaseProcess, number: int) -> Iterator[Outcome]:
    """What a process reports; at last, if it died or hangs, the input that it was at."""
    assert connection.recv() == "ready"
    while True:
        try:
            if not connection.poll(_MAX_WALL_S):
                yield Outcome(number, "FAULT", f"not done after {_MAX_WALL_S} s", _MAX_WALL_S)
                return
            outcome = connection.recv()
        except EOFError:
            process.join()
            died_of = -(process.exitcode or 0)
            reason = f"the process ended with status {process.exitcode}"
            if died_of > 0:
                reason = f"killed by {signal.Signals(died_of).name}"
            if died_of == signal.SIGPROF:
                reason = f"took more than {_MAX_CPU_S} s of a core"
            yield Outcome(number, "FAULT", reason, 0.0)
            return
        if outcome is None:
            return
        yield outcome
        number = outcome.number + 1


def _work(
    connection: Connection, scratch: Path, readers: Sequence[Reader], first: int, last: int, seed: int
) -> None:
    """Runs in a process of its own: opens inputs first..last-1 and sends an `Outcome` for each, then None."""
    logging.disable(logging.CRITICAL)
    seeds = [_prepare(reader, scratch / str(i)) for i, reader in enumerate(readers)]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _HEADROOM_BYTES, resource.RLIM_INFINITY))
    connection.send("ready")
    for number in range(first, last):
        which = number % len(readers)
        reader, folder = readers[which], scratch / str(which)
        path = _write_input(reader, folder, seeds[which], f"{seed}/{number}")
        # Its default action ends the process, so that not even a loop in C goes on.
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)
        start = time.process_time()
        kind, detail = outcome_of(reader, path, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(Outcome(number, kind, detail, time.process_time() - start))
    connection.send(None)


def _prepare(reader: Reader, folder: Path) -> Sequence:
    folder.mkdir()
    return reader.prepare_fn(folder)


def _write_input(reader: Reader, folder: Path, seeds: Sequence, seed: str) -> Path:
    files, path = reader.damage_fn(random.Random(seed), seeds)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / path


def outcome_of(reader: Reader, path: Path, folder: Path) -> tuple[str, str]:
    """Opens an input; returns the kind of `Outcome`, and the error.

    Args:
        reader: opens it.
        path: what it opens.
        folder: that a message has to name, with what is in it.
    """
    try:
        reader.open_fn(path)
    except (ValueError, FileNotFoundError) as error:
        if any(isinstance(cause, MemoryError) for cause in _causes(error)):
            return "FAULT", f"memory: {error}"
        is_named = str(folder) in str(error)
        return ("refused", str(error)) if is_named else ("FAULT", f"names no file: {error!r}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        trace = error.__traceback__
        while trace is not None and trace.tb_next:
            trace = trace.tb_next
        place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"
        return "FAULT", f"{type(error).__name__} at {place}: {str(error)[:200]}"
    return "loaded", ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _keep_input(scratch: Path, readers: Sequence[Reader], number: int, seed: int, keep: Path) -> None:
    """Makes an input again, in a folder of its own: its process may be at the next one by now."""
    reader = readers[number % len(readers)]
    folder = scratch / f"again{number}"
    path = _write_input(reader, folder, _prepare(reader, folder), f"{seed}/{number}")
    target = keep / f"{reader.name.replace(' ', '_')}-{seed}-{number}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (shutil.copytree if path.is_dir() else shutil.copy)(path, target / path.name)
    shutil.rmtree(folder)


def main(argv: Sequence[str]) -> None:
    """Fuzzes all readers and prints a table of what became of the inputs."""
    del argv
    logging.disable(logging.WARNING)  # of inputs that are made again
    num_inputs = _QUICK_INPUTS if _QUICK.value else _INPUTS.value
    start = time.monotonic()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    slowest: dict[str, float] = {}
    faults: collections.Counter[str] = collections.Counter()
    deadline = start + (_SECONDS.value or float("inf"))
    for outcome in fuzz(READERS, num_inputs, _SEED.value, deadline, Path(_KEEP.value)):
        name = READERS[outcome.number % len(READERS)].name
        counts[name, outcome.kind] += 1
        slowest[name] = max(outcome.cpu_s, slowest.get(name, 0.0))
        if outcome.kind == "FAULT":
            faults[f"{name}: {outcome.detail}"] += 1
    console = Console()
    table = Table("reader", "loaded", "refused", "FAULT", "slowest, CPU ms")
    for reader in READERS:
        figures = [str(counts[reader.name, kind]) for kind in ("loaded", "refused", "FAULT")]
        table.add_row(reader.name, *figures, f"{slowest.get(reader.name, 0.0) * 1e3:.0f}")
    console.print(table)
    seconds, total = time.monotonic() - start, counts.total()
    console.print(f"{total} inputs in {seconds:.0f} s ({total / seconds:.0f}/s), seed {_SEED.value}")
    for fault, count in faults.most_common():
        console.print(f"{count} x {fault}", markup=False, soft_wrap=True)
    if faults:
        console.print(f"The inputs are kept in {_KEEP.value}.")
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
