"""What a long training keeps, so that a kill costs a minute and not the result (Orbax)."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

CHECKPOINT_S = 60.0
"""Between two of them: writing one takes a second at most, and a killed run loses no more than this."""


def _manager(folder: Path):
    import orbax.checkpoint as ocp  # takes seconds to import, and only training needs it

    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    return ocp, ocp.CheckpointManager(folder.absolute(), options=options)


def save_checkpoint(folder: Path, step: int, record: dict[str, Any], arrays: Any) -> None:
    """Writes a checkpoint, whole or not at all, and removes the one before.

    Args:
        folder: of the checkpoints; it is made.
        step: larger than that of the one before.
        record: what JSON can write.
        arrays: a pytree of arrays.
    """
    ocp, manager = _manager(folder)
    parts = ocp.args.Composite(record=ocp.args.JsonSave(record), arrays=ocp.args.StandardSave(arrays))
    with manager:
        manager.save(step, args=parts)


def load_checkpoint(
    folder: Path, wanted: dict[str, Any], like_fn: Callable[[dict[str, Any]], Any]
) -> tuple[dict[str, Any], Any] | None:
    """The last checkpoint, if it belongs to this training.

    Args:
        folder: of the checkpoints.
        wanted: keys and values that its record must have; another one is removed.
        like_fn: from the record to a pytree of arrays of the shapes and types to read.

    Returns:
        The record and the arrays; None if there is none, or with a note in the log if it is damaged.
    """
    if not folder.is_dir():
        return None
    ocp, manager = _manager(folder)
    try:
        with manager:
            if (step := manager.latest_step()) is None:
                return None
            record = manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
            if any(record.get(key) != value for key, value in wanted.items()):
                shutil.rmtree(folder)
                return None
            like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), like_fn(record))
            parts = ocp.args.Composite(arrays=ocp.args.StandardRestore(like))
            return record, manager.restore(step, args=parts)["arrays"]
    except Exception as error:  # a damaged checkpoint raises any of a dozen types
        logging.warning("%s is damaged (%s) and is not used", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
