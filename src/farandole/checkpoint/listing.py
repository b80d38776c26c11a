"""What is in a directory of checkpoints, without reading tensors."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import CheckpointError
from ..core.vocabulary.text import in_columns
from ..core.vocabulary.units import format_bytes
from .directory import (
    DirectoryLock,
    Names,
    all_steps,
    names_of,
    read_manifest,
    remove_checkpoint,
    remove_leftovers,
    saved_steps,
    step_directory,
    steps_to_prune,
)
from .manifest import Manifest
from .shard_file import digest, tensor_bytes

COMPLETE = "complete"
UNFINISHED = "unfinished"
DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One step's directory."""

    step: int
    state: str
    """`COMPLETE`, `UNFINISHED` (without a manifest: no checkpoint) or `DAMAGED`."""
    nbytes: int = 0
    """Size of its files, by the manifest."""
    world_size: int = 0
    tensors: int = 0
    wall_time: str = ""
    problem: str = ""
    """What is damaged."""

    def to_mapping(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "step": self.step,
            "state": self.state,
            "bytes": self.nbytes,
            "world_size": self.world_size,
            "tensors": self.tensors,
            "time": self.wall_time,
            "problem": self.problem,
        }


def list_checkpoints(directory: Path, *, verify: bool = False, only: int | None = None) -> list[StepEntry]:
    """Return what is in `directory`, by step.

    Args:
        directory: of one run's checkpoints.
        verify: compare every byte with the manifest; otherwise only manifests and sizes of files.
        only: this step alone.

    Raises:
        CheckpointError: the directory, or the step, is not there.
    """
    require_directory(directory)
    complete = set(saved_steps(directory))
    steps = all_steps(directory)
    if only is not None and only not in steps:
        raise missing_step(directory, only)
    return [
        _describe(directory, step, verify) if step in complete else StepEntry(step, UNFINISHED)
        for step in steps
        if only is None or step == only
    ]


def require_directory(directory: Path) -> None:
    """Raise `CheckpointError` unless `directory` is one, and is not a step's own."""
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"{directory} {what}, expected a directory of checkpoints",
            is_input=True,
            remedy="name the directory that was given to fd.save or fd.Checkpointer",
        )
    if directory.name.startswith("step-") and not all_steps(directory):
        raise CheckpointError(
            f"{directory} is the directory of one checkpoint",
            is_input=True,
            remedy=f"name the one that holds it, {directory.parent}, and choose with --step",
        )


def choose_step(directory: Path, step: int | None) -> int:
    """Return the step that was asked for, or the last; raise `CheckpointError` if it is no checkpoint."""
    require_directory(directory)
    saved = saved_steps(directory)
    if step is None and saved:
        return saved[-1]
    if step is None:
        raise CheckpointError(f"{directory} has no checkpoint", is_input=True)
    if step not in saved:
        raise missing_step(directory, step)
    return step


def missing_step(directory: Path, step: int) -> CheckpointError:
    """Return the error for a step that is no checkpoint."""
    saved = saved_steps(directory)
    there = ", ".join(map(str, saved[-5:])) if saved else "none"
    return CheckpointError(
        f"{directory} has no checkpoint of step {step}; the last of {len(saved)} are: {there}"
        if len(saved) > 5
        else f"{directory} has no checkpoint of step {step}; there are: {there}",
        is_input=True,
    )


def to_text(entries: list[StepEntry]) -> str:
    """Return a table of at most 100 columns."""
    rows = [("step", "state", "size", "ranks", "tensors", "written")]
    for each in entries:
        known = each.state == COMPLETE or each.nbytes
        rows.append(
            (str(each.step), each.state, format_bytes(each.nbytes), str(each.world_size), str(each.tensors),
             each.wall_time)
            if known
            else (str(each.step), each.state, "", "", "", "")
        )  # fmt: skip
    lines = in_columns(rows, left=(1, 5))
    return "\n".join(lines + [f"step {each.step}: {each.problem}" for each in entries if each.problem])


def _describe(directory: Path, step: int, verify: bool) -> StepEntry:
    try:
        manifest = read_manifest(directory, step)
    except CheckpointError as problem:
        return StepEntry(step, DAMAGED, problem=problem.message)
    state, problem_text = COMPLETE, ""
    try:
        if verify:
            verify_checkpoint(directory, step)
        else:
            for name in manifest.files:
                require_file(step_directory(directory, step), name, manifest)
    except CheckpointError as problem:
        state, problem_text = DAMAGED, problem.message
    return StepEntry(
        step, state, manifest.nbytes, manifest.world_size, len(manifest.tensors), manifest.wall_time, problem_text
    )


# Verification of a checkpoint: every byte of every file against the manifest.


_THREADS = 4


def verify_checkpoint(directory: Path, step: int) -> Manifest:
    """Return the manifest of a step's checkpoint if all of it is as it was written.

    Raises:
        CheckpointError: it is missing, damaged or of a newer version; the message names the first file and tensor.
    """
    manifest = read_manifest(directory, step)
    folder = step_directory(directory, step)
    for name in manifest.files:
        require_file(folder, name, manifest)
    with ThreadPoolExecutor(_THREADS) as threads:
        for problem in threads.map(lambda name: _verify_file(folder, name, manifest), manifest.files):
            if problem is not None:
                raise problem
    return manifest


def require_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise `CheckpointError` if a file is missing, or has another size."""
    path, expected = folder / name, manifest.files[name].nbytes
    try:
        nbytes = path.stat().st_size
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True) from None
    if nbytes != expected:
        what = "truncated" if nbytes < expected else "longer than it was"
        raise CheckpointError(f"{path} is {what}: {nbytes} bytes, expected {expected}", is_input=True)


def last_good_step(directory: Path, before: int) -> int | None:
    """Return the last step before another whose checkpoint is as it was written; None if there is none."""
    for step in reversed([each for each in saved_steps(directory) if each < before]):
        try:
            verify_checkpoint(directory, step)
        except CheckpointError:
            continue
        return step
    return None


def damaged_piece(path: Path, tensor: str) -> CheckpointError:
    """Return the error for bytes that are not those that were written."""
    return CheckpointError(f"{path} is damaged: the bytes of {tensor!r} have changed", is_input=True)


def require_header(path: Path, content: bytes | memoryview, manifest: Manifest) -> None:
    """Raise `CheckpointError` if a file that begins with `content` has another header than was written."""
    entry = manifest.files[path.name]
    if digest(content[: entry.header_bytes]) != entry.header_sha256:
        raise CheckpointError(f"{path} is damaged: its header has changed", is_input=True)


def _verify_file(folder: Path, name: str, manifest: Manifest) -> CheckpointError | None:
    path = folder / name
    try:
        # Read and not mapped: a disk that fails under a mapping kills the process.
        with path.open("rb") as file:
            require_header(path, file.read(manifest.files[name].header_bytes), manifest)
            for tensor, entry in manifest.tensors.items():
                for piece in entry.pieces:
                    if piece.file != name:
                        continue
                    file.seek(piece.begin)
                    if digest(file.read(tensor_bytes(entry.dtype, piece.shape))) != piece.sha256:
                        return damaged_piece(path, tensor)
    except CheckpointError as problem:
        return problem
    except (OSError, ValueError) as problem:
        return CheckpointError(f"cannot read {path}: {problem}", is_input=True)
    return None


# Removal of old checkpoints, and of what unfinished saves left.


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
