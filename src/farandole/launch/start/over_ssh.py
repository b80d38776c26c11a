"""Starting a job on hosts of which one at least is elsewhere: by `launch.ssh`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ..job.contract import RankSpec
from ..ssh.job import RemoteJob
from ..ssh.link.frames import MOST_BYTES
from ..ssh.link.host_link import HostLink
from ..ssh.link.remote_shell import HostSetup, connecting_command
from ..ssh.remote_job import RemoteJobSpec
from ..supervise.local import Outcome
from .placing import PlacedJob, variables_to_send
from .records import make_job, open_output, open_run, report_failure
from .request import JobRequest, RemoteOptions


def host_commands(placed: PlacedJob) -> list[tuple[str, list[RankSpec], list[str]]]:
    """Return, for each host that gets ranks, its name, their places, and the command that connects us to it."""
    found = []
    for host in placed.hosts:
        places = [place for place in placed.places if place.host_name == host.name]
        if places:
            found.append((host.name, places, connecting_command(host, placed.request.remote.ssh)))
    return found


def host_setup(options: RemoteOptions) -> HostSetup:
    """Return what every host is asked to do first; where the user says nothing, all is as here."""
    return HostSetup(options.directory or str(Path.cwd()), options.python or sys.executable, options.prelude)


def variables_there(request: JobRequest) -> dict[str, str]:
    """Return what hosts are sent of our environment; refuse more than they would take."""
    variables = variables_to_send(request)
    if len(json.dumps([variables, dict(request.environment), request.command])) > MOST_BYTES // 2:
        raise ConfigError(
            f"the command and the environment for the hosts are more than {MOST_BYTES // 2} bytes",
            remedy="put what is large into a file",
        )
    return variables


def remote_spec(placed: PlacedJob, directory: Path, variables: dict[str, str]) -> RemoteJobSpec:
    """Return what every host is asked to run."""
    request = placed.request
    return RemoteJobSpec(
        request.command, make_job(placed, directory, 0), request.plan.to_toml() if request.plan_given else None,
        host_setup(request.remote), variables, request.bind,
    )  # fmt: skip


def start_over_ssh(placed: PlacedJob, *, status: Callable[[Path], str | None]) -> tuple[Outcome, Path]:
    """Start the job on its hosts; return how it ended and its run directory."""
    variables = variables_there(placed.request)
    commands = host_commands(placed)
    size = len(placed.places)
    directory = open_run(placed.request, size=size, extra={"hosts": [name for name, _, _ in commands]})
    links = [HostLink(name, places, command) for name, places, command in commands]
    output = open_output(placed.request, directory, size)
    job = RemoteJob(links, remote_spec(placed, directory, variables), output, lambda: status(directory))
    try:
        outcome = job.run()
    finally:
        output.close()
    report_failure(outcome, directory)
    return outcome, directory
