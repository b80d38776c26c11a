"""Records of a started job in its run directory: what was about to run, and why it stopped."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.environ.env import read_frozen_seconds
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.run_files import FAILURE, PLAN
from ..job.contract import FROZEN_SECONDS, JobSpec
from ..job.run_directory import make_run_directory, write_run
from ..output.rank_output import Output
from ..supervise.local import Outcome
from ..supervise.stacks import read_stacks
from .placing import PlacedJob
from .request import JobRequest


def open_run(
    request: JobRequest, *, size: int | None, node_rank: int = 0, extra: Mapping[str, Any] | None = None
) -> Path:
    """Make the run directory and write down what is about to run. `size` is None when it may change.

    Every node has its own: nodes may share a file system, or not.
    """
    directory = make_run_directory(*_directory_names(request, node_rank))
    problem = write_run(
        directory,
        command=request.command,
        size=size,
        plan=request.plan,
        plan_given=request.plan_given,
        extra=extra or {},
    )
    if problem:
        write_notice(f"warning: {problem}")
    return directory


def planned_directory(placed: PlacedJob) -> Path:
    """Return the run directory as `open_run` would name it, with nothing made."""
    chosen, label = _directory_names(placed.request, placed.node_rank)
    return Path(chosen or f"runs/TIME-{label}").resolve()


def _directory_names(request: JobRequest, node_rank: int) -> tuple[str | None, str]:
    chosen, label = request.run_dir, request.label
    if not node_rank:
        return chosen, label
    return None if chosen is None else f"{chosen.rstrip('/')}-node{node_rank}", f"{label}-node{node_rank}"


def open_output(request: JobRequest, directory: Path, size: int, *, first: int = 0) -> Output:
    """Return what takes all that ranks print; `first` is the lowest of them."""
    out = sys.stderr.buffer if request.output_to_stderr else None
    return Output(directory, size, out=out, style=request.style, first=first)


def make_job(placed: PlacedJob, directory: Path, port: int) -> JobSpec:
    """Return what all ranks are told alike."""
    request = placed.request
    starts_all = not placed.places or len(placed.places) == placed.places[0].size
    return JobSpec(
        secret=secrets.token_hex(32) if starts_all else "",
        address=placed.address,
        port=port,
        run_directory=directory,
        plan_file=directory / PLAN if request.plan_given else None,
        threads=placed.threads,
        verify_steps=request.verify_steps,
        verify_deep=request.verify_deep,
        frozen_seconds=read_frozen_seconds(FROZEN_SECONDS),
        environment=request.environment,
    )


def report_failure(outcome: Outcome, directory: Path) -> None:
    """Say why a job stopped, and leave it in the run directory."""
    stacks = read_stacks(directory)  # by a job that ended in another way, only files without a word
    if outcome.failure is not None:
        failure = replace(outcome.failure, stacks=stacks)
        sys.stderr.write(failure.to_text(directory) + "\n")
        try:
            failure.write(directory)
        except OSError as problem:
            write_notice(f"no {FAILURE} was written: {problem.strerror}")
    elif outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        write_notice(f"stopped all ranks on {name}; logs in {directory / 'logs'}")
