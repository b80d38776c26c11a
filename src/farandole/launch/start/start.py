"""Starting a job that was placed: on this machine, or over ssh where a host is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...core.environ.env import inherited_environment
from ...core.vocabulary.notice import write_notice
from ..job.ports import GivenPort, ReservedPort
from ..supervise.local import Outcome, Supervisor
from ..supervise.warning_signal import passing_on_warnings
from .placing import PlacedJob
from .records import make_job, open_output, open_run, report_failure

Status = Callable[[Path], str | None]
"""Returns the latest progress of the run in a directory, a line for the user; None: there is none."""


def no_status(directory: Path) -> str | None:
    """Return no progress."""
    return None


def start_job(placed: PlacedJob, *, status: Status = no_status) -> tuple[Outcome, Path]:
    """Start a job; return how it ended and its run directory."""
    if placed.over_ssh:
        from .over_ssh import start_over_ssh

        return start_over_ssh(placed, status=status)
    for warning in placed.warnings:
        write_notice(f"warning: {warning}")
    request, places = placed.request, placed.places
    size = places[-1].rank + 1
    extra = {"verify_steps": request.verify_steps} if request.verify_steps else {}
    directory = open_run(request, size=size, node_rank=placed.node_rank, extra=extra)
    with (
        ReservedPort(placed.address, places[0].host)
        if placed.port is None
        else GivenPort(placed.address, placed.port)
    ) as port:
        job = make_job(placed, directory, port.port)
        output = open_output(request, directory, size, first=places[0].rank)
        supervisor = Supervisor(request.command, places, job, output, inherited_environment())
        supervisor.status = lambda: status(directory)
        try:
            with passing_on_warnings(lambda: supervisor.rank_processes().values()):
                outcome = supervisor.run()
        finally:
            output.close()
    report_failure(outcome, directory)
    return outcome, directory
