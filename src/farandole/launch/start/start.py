"""Starting a placed job: its run directory, its ranks here or over ssh, and why it stopped."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.environ.env import inherited_environment, read_frozen_seconds, read_typed_command
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.run_files import FAILURE, INTERRUPTED, PLAN, hide_secrets
from ...core.vocabulary.sync_spec import SyncSpec
from ..job.contract import FROZEN_SECONDS, JobSpec
from ..job.placement import ReservedPort
from ..job.run_directory import make_run_directory, write_run
from ..output import Output
from ..supervise.job_loop import Outcome
from ..supervise.local import Supervisor
from ..supervise.stacks import read_current_stacks
from .placing import PlacedJob, host_commands, host_setup, variables_there
from .request import JobRequest

if TYPE_CHECKING:
    from ..supervise.failure import Failure
    from ..supervise.interruption import Interruption

Status = Callable[[Path], str | None]
"""Returns the latest progress of the run in a directory, a line for the user; None: there is none."""


def no_status(directory: Path) -> str | None:
    """Return no progress."""
    return None


def start_job(placed: PlacedJob, *, status: Status = no_status) -> tuple[Outcome, Path]:
    """Start a job, over ssh where a host is elsewhere; return how it ended and its run directory."""
    if placed.over_ssh:
        return _start_over_ssh(placed, status)
    for warning in placed.warnings:
        write_notice(f"warning: {warning}")
    request, places = placed.request, placed.places
    size = places[-1].rank + 1
    extra = {"verify_steps": request.verify.steps} if request.verify.steps else {}
    directory = open_run(request, size=size, node_rank=placed.node_rank, extra=extra)

    def run(port: int, output: Output) -> Outcome:
        job = make_job(placed, directory, port)
        environment = inherited_environment()
        said = partial(status, directory)
        return Supervisor(request.command, places, job, output, environment, status=said).run()

    if placed.port is not None:  # all nodes know it, and rank 0 opens it
        return run_recorded(request, directory, size, partial(run, placed.port), first=places[0].rank)
    with ReservedPort(placed.address, places[0].host) as held:
        return run_recorded(request, directory, size, partial(run, held.port), first=places[0].rank)


def _start_over_ssh(placed: PlacedJob, status: Status) -> tuple[Outcome, Path]:
    from ..ssh.job import RemoteJob
    from ..ssh.link.host_link import HostLink
    from ..ssh.remote_job import RemoteJobSpec

    request, size = placed.request, len(placed.places)
    variables = variables_there(request)
    commands = host_commands(placed)
    directory = open_run(request, size=size, extra={"hosts": [name for name, _, _ in commands]})
    job = make_job(placed, directory, 0)
    work = RemoteJobSpec(request.command, job, host_setup(request.remote), variables, request.bind)
    links = [HostLink(name, places, command) for name, places, command in commands]
    return run_recorded(
        request, directory, size, lambda output: RemoteJob(links, work, output, lambda: status(directory)).run()
    )


def open_run(
    request: JobRequest, *, size: int | None, node_rank: int = 0, extra: Mapping[str, Any] | None = None
) -> Path:
    """Make the run directory and write down what is about to run. `size` is None when it may change.

    Every node has its own: nodes may share a file system, or not.
    """
    directory = make_run_directory(*_directory_names(request, node_rank))
    typed = read_typed_command() or list(request.typed_command)
    facts = {**({"typed_command": hide_secrets(typed)} if typed else {}), **(extra or {})}
    problem = write_run(directory, command=request.command, size=size, plan=request.plan, extra=facts)
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


def make_job(placed: PlacedJob, directory: Path, port: int) -> JobSpec:
    """Return what all ranks get alike."""
    request = placed.request
    starts_all = not placed.places or len(placed.places) == placed.places[0].size
    return JobSpec(
        secret=secrets.token_hex(32) if starts_all else "",
        address=placed.address,
        port=port,
        run_directory=directory,
        plan_file=None if request.plan is None else directory / PLAN,
        threads=placed.threads,
        verify_steps=request.verify.steps,
        verify_deep=request.verify.deep,
        outlives_ranks=request.plan is not None and SyncSpec.parse(request.plan.sync).is_server,
        grace_seconds=request.grace_seconds,
        frozen_seconds=read_frozen_seconds(FROZEN_SECONDS),
        environment=request.environment,
    )


def run_recorded(
    request: JobRequest, directory: Path, size: int, run: Callable[[Output], Outcome], *, first: int = 0
) -> tuple[Outcome, Path]:
    """Run a job of `size` ranks from `first` on; return how it ended and its run directory.

    `run` gets the output of the ranks. Why the job stopped is printed, and left in the run directory.
    """
    out = sys.stderr.buffer if request.output_to_stderr else None
    output = Output(directory, size, out=out, style=request.style, first=first)
    try:
        outcome = run(output)
    finally:
        output.close()
    report_failure(outcome, directory, size=size)
    return outcome, directory


def report_failure(outcome: Outcome, directory: Path, *, size: int | None = None) -> None:
    """Say why a job of `size` ranks (None: not known) stopped, and leave it in the run directory."""
    step = None if outcome.failure is None else outcome.failure.step
    stacks = read_current_stacks(directory, step)  # of a job that ended in another way, only files without a word
    account: Failure | Interruption
    if outcome.failure is not None:
        account, file = replace(outcome.failure, stacks=stacks), FAILURE
    elif outcome.signal is not None:
        from ..supervise.interruption import interruption_of

        account, file = interruption_of(directory, outcome.signal, outcome.positions, size), INTERRUPTED
    else:
        return
    sys.stderr.write(account.to_text(directory) + "\n")
    try:
        account.write(directory)
    except OSError as problem:
        write_notice(f"no {file} was written: {problem.strerror}")
