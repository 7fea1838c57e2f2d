"""`workdir.json`, the last file that a run writes: what `LLM` needs to open the workdir."""

import json
from pathlib import Path
from typing import NamedTuple

from pjax.base import MODES, VERSION, Mode
from pjax.formats import read_json
from pjax.workdir import FORMAT, write_atomically

MANIFEST_FILE = "workdir.json"


class Manifest(NamedTuple):
    """What a workdir was prepared from, and how it is used.

    Attributes:
        model: path of the model's folder or file.
        dtype: as `Settings.dtype`.
        activation: as `Settings.activation`.
        fingerprint: of the model, see `storage.model_fingerprint`.
        mode: the default one.
        made_from: of each artefact, by its name: the fingerprint of what it was made from.
    """

    model: str
    dtype: str | None
    activation: str | None
    fingerprint: str
    mode: Mode
    made_from: dict[str, str]


def write_manifest(workdir: Path, manifest: Manifest) -> None:
    """Writes it, whole or not at all."""
    record = {"version": VERSION, "format": FORMAT, **manifest._asdict()}
    write_atomically(workdir / MANIFEST_FILE, json.dumps(record, indent=1).encode())


def read_manifest(workdir: Path) -> Manifest | None:
    """The manifest; None if there is no such file.

    Raises:
        ValueError: it is damaged, or another version of pjax wrote it.
    """
    file = workdir / MANIFEST_FILE
    if not file.exists():
        return None
    found, again = read_json(file), f"run pjax.run on {workdir} again"
    if (found.get("version"), found.get("format")) != (VERSION, FORMAT):
        raise ValueError(
            f"{file}: expected the manifest of a workdir that pjax {VERSION} prepared, in format {FORMAT}, "
            f"got one of version {found.get('version')!r}, format {found.get('format')!r}; {again}"
        )
    made_from = found.get("made_from")
    good = {
        **{name: isinstance(found.get(name), str) for name in ("model", "fingerprint")},
        **{name: isinstance(found.get(name, 0), str | None) for name in ("dtype", "activation")},
        "mode": found.get("mode") in MODES,
        "made_from": isinstance(made_from, dict) and all(isinstance(v, str) for v in made_from.values()),
    }
    for name in Manifest._fields:
        if not good[name]:
            raise ValueError(f"{file}: {name} is {found.get(name)!r}, which pjax does not write; {again}")
    return Manifest(**{name: found[name] for name in Manifest._fields})
