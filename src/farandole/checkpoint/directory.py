"""The directory of a run's checkpoints: which there are, and how one is added or removed.

[Note: one rename] The files of a checkpoint are complete and on the disk (fsync of each file and of its
directory) before the manifest exists. The manifest is written under another name, fsynced, and renamed: that one
system call makes the checkpoint. To remove one, its manifest goes first. So a crash at any moment leaves whole
checkpoints, and files without a manifest that the next save clears away.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ..core.vocabulary.errors import CheckpointError
from .manifest import NAME, Manifest, parse_manifest

_STEP = re.compile(r"step-(\d{8,})")
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return directory / f"step-{step:08d}"


def shard_name(rank: int, size: int, nonce: str) -> str:
    """Return the name of a rank's file. The nonce is the save's: a later save of the step changes no old file."""
    return f"rank-{rank:05d}-of-{size:05d}.{nonce}.safetensors"


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `directory`, ascending; none if there is no directory."""
    return [step for step in _steps(directory) if (step_directory(directory, step) / NAME).is_file()]


def read_manifest(directory: Path, step: int) -> Manifest:
    """Return the manifest of a step's checkpoint; raise `CheckpointError` if it is missing or damaged."""
    where = str(step_directory(directory, step) / NAME)
    return parse_manifest(read_manifest_bytes(directory, step), where, step)


def read_manifest_bytes(directory: Path, step: int) -> bytes:
    """Return the content of a step's manifest; raise `CheckpointError` if it cannot be read."""
    path = step_directory(directory, step) / NAME
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True) from None


def make_step_directory(directory: Path, step: int) -> Path:
    """Make the directory of a step, and those above it, so that they outlive a crash. It may be there."""
    path = step_directory(directory, step)
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    sync_directory(directory)
    return path


def commit_manifest(directory: Path, manifest: Manifest, nonce: str) -> None:
    """Make the checkpoint: write its manifest aside, fsync, rename, fsync. See [Note: one rename]."""
    path = step_directory(directory, manifest.step)
    aside = path / f".{NAME}.{nonce}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path / NAME)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
    sync_directory(path)


def remove_checkpoint(directory: Path, step: int) -> None:
    """Remove the checkpoint of a step, its manifest first. Raises `OSError`."""
    path = step_directory(directory, step)
    with suppress(FileNotFoundError):
        (path / NAME).unlink()
        sync_directory(path)
    for name in path.iterdir():
        name.unlink()
    path.rmdir()
    sync_directory(directory)


def remove_leftovers(directory: Path, step: int) -> None:
    """Remove files of a step that its manifest does not name.

    To be called by who holds the directory's lock. Without a manifest all of them go, and the directory with them.
    Raises `OSError`, and `CheckpointError` if the manifest is damaged; then nothing is removed.
    """
    path = step_directory(directory, step)
    named = set()
    if (path / NAME).is_file():
        named = {NAME, *read_manifest(directory, step).files}
    for file in list(path.iterdir()):
        if file.name not in named:
            file.unlink()
    with suppress(OSError):  # not empty: it is a checkpoint
        path.rmdir()


def all_steps(directory: Path) -> list[int]:
    """Return the steps that have a directory, complete or not, ascending."""
    return _steps(directory)


def steps_to_prune(steps: list[int], keep: int | None, keep_every: int | None) -> list[int]:
    """Return which of the ascending `steps` to remove: all but the last `keep` and multiples of `keep_every`."""
    if keep is None:
        return []
    return [step for step in steps[: max(0, len(steps) - keep)] if not keep_every or step % keep_every]


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on the disk. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _steps(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"cannot read {directory}: {problem.strerror or problem}", is_input=True) from None
    return sorted(int(match.group(1)) for name in names if (match := _STEP.fullmatch(name)))
