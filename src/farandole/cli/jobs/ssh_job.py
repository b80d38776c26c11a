"""Starting a job on other hosts: from the options of the line to `launch.ssh`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.environ.env import inherited_environment
from ...core.vocabulary.errors import ConfigError
from ...launch.job.contract import RankSpec
from ...launch.job.emulated_hosts import read_hosts
from ...launch.job.host_access import backend_for, is_this_machine
from ...launch.job.host_list import HostSlots
from ...launch.job.placement import assign_ranks
from ...launch.job.variables import forwarded_variables
from ...launch.output.rank_output import Output
from ...launch.ssh.job import RemoteJob
from ...launch.ssh.link.frames import MOST_BYTES
from ...launch.ssh.link.host_link import HostLink
from ...launch.ssh.link.remote_shell import REMOTE_COMMAND, HostSetup, SshOptions, check_name, ssh_command
from ...launch.ssh.remote_job import RemoteJobSpec
from ...launch.supervise.local import Outcome
from .job import JobRequest, account_for, check_size, make_job, open_run

_HERE = ("/bin/sh", "-c", REMOTE_COMMAND)


@dataclass(frozen=True)
class RemoteOptions:
    """What the line says of hosts that are reached by ssh."""

    ssh: SshOptions = field(default_factory=SshOptions)
    python: str | None = None
    directory: str | None = None
    prelude: str = ""
    variables: tuple[str, ...] = ()
    bind: bool = True


def reached_by_ssh(hosts: Sequence[HostSlots], options: RemoteOptions) -> bool:
    """Return whether hosts of the list are elsewhere, or the line names what to reach all of them with."""
    emulated = read_hosts()
    if hosts and not emulated and options.ssh.command != SshOptions().command:
        return True
    return bool(hosts) and backend_for(hosts, emulated).over_ssh


def chosen_variables(options: RemoteOptions) -> dict[str, str]:
    """Return what ``-x`` sets, for ranks that inherit the rest."""
    return forwarded_variables({}, [text for text in options.variables if "=" in text])


def remote_request(
    request: JobRequest, options: RemoteOptions, size: int | None, hosts: Sequence[HostSlots]
) -> JobRequest:
    """Return `request` with its ranks placed on hosts, and the python of those hosts in its command."""
    places = [
        RankSpec(
            seat.rank, check_size(size, hosts), seat.local_rank, seat.local_size, seat.node_rank, seat.node_count,
            host_name=check_name(seat.host.name), cross_rank=seat.cross_rank, cross_size=seat.cross_size,
            visible_devices=seat.host.chosen,
        )
        for seat in assign_ranks(hosts, check_size(size, hosts))
    ]  # fmt: skip
    return replace(request, command=_command_there(request.command, options), places=places)


def _command_there(command: Sequence[str], options: RemoteOptions) -> list[str]:
    """Return the command as hosts are asked for it: with the python of the hosts."""
    command = list(command)
    if options.python is not None and Path(command[0]).name.startswith("python"):
        command[0] = options.python
    elif command[0] in ("python", "python3"):
        # The hosts' own search path may have another python first.
        command[0] = shutil.which(command[0]) or sys.executable
    return command


def host_commands(
    request: JobRequest, options: RemoteOptions, hosts: Sequence[HostSlots]
) -> list[tuple[str, list[RankSpec], list[str]]]:
    """Return, for each host that gets ranks, its name, their places, and the command that connects us to it."""
    found = []
    for host in hosts:
        places = [place for place in request.places if place.host_name == host.name]
        if places:
            found.append((host.name, places, connecting_command(host, options)))
    return found


def connecting_command(host: HostSlots, options: RemoteOptions) -> list[str]:
    """Return what connects us to a host: nothing but a shell when it is this machine."""
    plain = options.ssh.command == SshOptions().command and host.port is None
    return list(_HERE) if plain and is_this_machine(host.name) else ssh_command(host.name, host.port, options.ssh)


def host_setup(options: RemoteOptions) -> HostSetup:
    """Return what every host is asked to do first; where the line says nothing, all is as here."""
    return HostSetup(options.directory or str(Path.cwd()), options.python or sys.executable, options.prelude)


def variables_there(request: JobRequest, options: RemoteOptions) -> dict[str, str]:
    """Return what hosts are sent of our environment; refuse more than they would take."""
    variables = forwarded_variables(inherited_environment(), options.variables)
    if len(json.dumps([variables, dict(request.environment), request.command])) > MOST_BYTES // 2:
        raise ConfigError(
            f"the command and the environment for the hosts are more than {MOST_BYTES // 2} bytes",
            remedy="put what is large into a file",
        )
    return variables


def remote_work(
    request: JobRequest, directory: Path, options: RemoteOptions, variables: dict[str, str]
) -> RemoteJobSpec:
    """Return what every host is asked to run."""
    return RemoteJobSpec(
        _command_there(request.command, options), make_job(request, directory, 0), host_setup(options),
        variables, options.bind,
    )  # fmt: skip


def start_remote(
    request: JobRequest, options: RemoteOptions, hosts: Sequence[HostSlots], *, label: str, run_dir: str | None,
    json_output: bool = False, status: Any = None,
) -> tuple[Outcome, Path]:  # fmt: skip
    """Start a job on `hosts`; return how it ended and its run directory."""
    variables = variables_there(request, options)
    commands = host_commands(request, options, hosts)
    extra = {"hosts": [name for name, _, _ in commands]}
    directory = open_run(request, label=label, run_dir=run_dir, size=len(request.places), extra=extra)
    links = [HostLink(name, places, command) for name, places, command in commands]
    work = remote_work(request, directory, options, variables)
    output = Output(
        directory, len(request.places), out=sys.stderr.buffer if json_output else None, style=request.style
    )
    job = RemoteJob(links, work, output)
    if status is not None:
        job.status = lambda: status(directory)
    try:
        outcome = job.run()
    finally:
        output.close()
    account_for(outcome, directory)
    return outcome, directory
