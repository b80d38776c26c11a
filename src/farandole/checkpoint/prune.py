"""Removal of old checkpoints, and of what unfinished saves left."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ..core.vocabulary.errors import CheckpointError
from .directory import (
    Names,
    all_steps,
    names_of,
    remove_checkpoint,
    remove_leftovers,
    saved_steps,
    step_directory,
    steps_to_prune,
)
from .listing import require_directory
from .lock import DirectoryLock
from .verify import verify_checkpoint


@dataclass(frozen=True, slots=True)
class Pruned:
    """Steps, ascending."""

    removed: list[int]
    unfinished: list[int]
    """Without a manifest: no checkpoints. Removed too."""
    kept: list[int]
    stays: dict[str, list[str]]
    """Directories of removed or unfinished steps that stay, for files in them that no save of ours made."""


def prune_checkpoints(
    directory: Path, *, keep: int, keep_every: int | None = None, dry_run: bool = False
) -> Pruned:
    """Remove all checkpoints but the last `keep`, and those of steps that `keep_every` divides.

    If none of those is whole, the last one that is stays too. Files that no save made stay, and so does what is
    behind a symbolic link.

    Args:
        directory: of one run's checkpoints. No job may be writing to it.
        keep: how many of the last to keep.
        keep_every: the others to keep.
        dry_run: remove nothing.

    Raises:
        CheckpointError: the directory is not there, a job writes to it, or a file cannot be removed.
    """
    require_directory(directory)
    names = {step: found for step in all_steps(directory) if (found := _names_of(directory, step)) is not None}
    saved = [step for step in saved_steps(directory) if step in names]
    removed = steps_to_prune(saved, keep, keep_every)
    if removed and not any(_is_whole(directory, step) for step in reversed(saved) if step not in removed):
        # What is to stay is damaged: the last that is whole stays, too.
        whole = next((step for step in reversed(removed) if _is_whole(directory, step)), None)
        removed = [step for step in removed if step != whole]
    without = [step for step in names if step not in saved]
    result = Pruned(
        removed,
        [step for step in without if names[step].ours or not names[step].others],
        [step for step in saved if step not in removed],
        {
            step_directory(directory, step).name: names[step].others
            for step in sorted([*removed, *without])
            if names[step].others
        },
    )
    if dry_run:
        return result
    lock = DirectoryLock(directory, socket.gethostname(), os.urandom(8).hex())
    try:
        for step in removed:
            remove_checkpoint(directory, step)
        for step in result.unfinished:
            remove_leftovers(directory, step)
    except OSError as problem:
        raise CheckpointError(f"cannot remove {problem.filename}: {problem.strerror}", is_input=True) from None
    finally:
        lock.release()
    return result


def _is_whole(directory: Path, step: int) -> bool:
    try:
        verify_checkpoint(directory, step)
    except CheckpointError:
        return False
    return True


def _names_of(directory: Path, step: int) -> Names | None:
    try:
        return names_of(directory, step)
    except OSError:  # a symbolic link, or gone by now
        return None
