"""What is in a directory of checkpoints, without reading tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import CheckpointError
from ..core.vocabulary.units import format_bytes
from .directory import all_steps, read_manifest, saved_steps, step_directory
from .verify import require_file, verify_checkpoint

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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = {0, 2, 3, 4}
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
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
