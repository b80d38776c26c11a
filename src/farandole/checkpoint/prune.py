"""Removal of old checkpoints, and of what unfinished saves left."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ..core.vocabulary.errors import CheckpointError
from .directory import all_steps, remove_checkpoint, remove_leftovers, saved_steps, steps_to_prune
from .listing import require_directory
from .lock import DirectoryLock


@dataclass(frozen=True, slots=True)
class Pruned:
    """Steps, ascending."""

    removed: list[int]
    unfinished: list[int]
    """Without a manifest: no checkpoints. Removed too."""
    kept: list[int]


def prune_checkpoints(
    directory: Path, *, keep: int, keep_every: int | None = None, dry_run: bool = False
) -> Pruned:
    """Remove all checkpoints but the last `keep`, and those of steps that `keep_every` divides.

    Args:
        directory: of one run's checkpoints. No job may be writing to it.
        keep: how many of the last to keep.
        keep_every: the others to keep.
        dry_run: remove nothing.

    Raises:
        CheckpointError: the directory is not there, a job writes to it, or a file cannot be removed.
    """
    require_directory(directory)
    saved = saved_steps(directory)
    removed = steps_to_prune(saved, keep, keep_every)
    unfinished = [step for step in all_steps(directory) if step not in saved]
    result = Pruned(removed, unfinished, [step for step in saved if step not in removed])
    if dry_run:
        return result
    lock = DirectoryLock(directory, socket.gethostname(), os.urandom(8).hex())
    try:
        for step in removed:
            remove_checkpoint(directory, step)
        for step in unfinished:
            remove_leftovers(directory, step)
    except OSError as problem:
        raise CheckpointError(f"cannot remove {problem.filename}: {problem.strerror}", is_input=True) from None
    finally:
        lock.release()
    return result
