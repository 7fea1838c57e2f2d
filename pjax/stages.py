"""Runs a stage, or takes what it made from the workdir if that was made from the same things."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pjax.base import ProgressFn
from pjax.workdir import Artefact, load, save

StageFn = Callable[[str], ProgressFn]
"""`stage_fn(name) -> progress_fn`: called when a stage begins to work; not called if it is reused."""


@dataclasses.dataclass
class Stages:
    """Where the stages keep their results and tell of their progress; remembers what each was made from.

    Attributes:
        workdir: an existing folder.
        stage_fn: see `StageFn`.
        made_from: the fingerprint of each stage's artefact, filled as they run.
    """

    workdir: Path
    stage_fn: StageFn
    made_from: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self, name: str, made_from: str, make_fn: Callable[[ProgressFn], Artefact]) -> Artefact:
        """The stage's artefact, made if it is not there.

        Args:
            name: of the stage.
            made_from: fingerprint of all that the artefact depends on.
            make_fn: makes it, and tells of its progress.
        """
        self.made_from[name] = made_from
        found = load(self.workdir, name, made_from)
        if found is None:
            found = make_fn(self.stage_fn(name))
            save(self.workdir, name, made_from, found)
        return found
