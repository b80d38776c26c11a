"""Starting a job whose hosts come and go: from the options of the line to `launch.elastic`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.environ.env import inherited_environment
from ...core.vocabulary.errors import ConfigError
from ...launch.elastic.driver import ElasticJob, run_elastic
from ...launch.elastic.options import ElasticOptions
from ...launch.elastic.this_machine import LocalHostPool
from ...launch.elastic.worker_host import HostPool
from ...launch.job.cores import available_cores
from ...launch.job.emulated_hosts import EmulatedHost, read_hosts
from ...launch.job.host_access import LOOPBACK, backend_for
from ...launch.job.host_list import HostSlots
from ...launch.output.rank_output import Output
from ...launch.ssh.host_pool import SshHostPool
from ...launch.ssh.link.remote_shell import SshOptions
from ...launch.supervise.local import Outcome
from .job import JobRequest, account_for, make_job, open_run
from .ssh_job import RemoteOptions, chosen_variables, connecting_command, remote_work, variables_there


def elastic_request(request: JobRequest, options: ElasticOptions, size: int | None) -> JobRequest:
    """Return `request` for an elastic job: our own address, a share of the cores a rank."""
    here = socket.gethostname()
    address = next((host.address for host in read_hosts() if host.name == here), LOOPBACK)
    ranks = options.max_ranks or size or options.min_ranks
    return replace(
        request,
        threads=max(1, len(available_cores()) // ranks),
        address=address,
        environment={**request.environment, "HOROVOD_ELASTIC": "1"},
    )


def elastic_hosts(hosts: Sequence[HostSlots], options: ElasticOptions, size: int | None) -> Sequence[HostSlots]:
    """Return the hosts of a job without a script, by default this machine, or those of an emulation."""
    if hosts or options.discovery_script is not None:
        return hosts
    emulated = [HostSlots(host.name, host.slots) for host in read_hosts()]
    if not emulated and size is None and options.max_ranks is None:
        raise ConfigError(
            "an elastic job needs hosts, or -np for this machine alone",
            remedy="add --host-discovery-script, --hostfile or -H a:2,b:2",
        )
    return emulated or [HostSlots("localhost", size or options.max_ranks or options.min_ranks)]


def start_elastic(
    request: JobRequest, options: ElasticOptions, hosts: Sequence[HostSlots], remote: RemoteOptions, *,
    label: str, run_dir: str | None, json: bool = False, status: Any = None,
) -> tuple[Outcome, Path]:  # fmt: skip
    """Start an elastic job on `hosts`, or on those its script finds; return how it ended and its run directory."""
    emulated = read_hosts()

    def locate(name: str) -> EmulatedHost | None:
        return backend_for([HostSlots(name, 1)], emulated).host(name)

    def command_for(name: str) -> Sequence[str]:
        return connecting_command(known.get(name) or HostSlots(name, 1), remote)

    known = {host.name: host for host in hosts}
    for name in known:  # a name that makes no sense is refused now, not at its first start
        locate(name) if emulated else command_for(name)
    variables = {} if emulated else variables_there(request, remote)
    extra = {"elastic": True, "least_ranks": options.min_ranks}
    directory = open_run(request, label=label, run_dir=run_dir, size=None, extra=extra)
    job = make_job(request, directory, 0)
    environment = {**inherited_environment(), **chosen_variables(remote)}
    fleet: HostPool = LocalHostPool(request.command, job, environment, locate)
    if not emulated:
        always = remote.ssh.command != SshOptions().command
        fleet = SshHostPool(remote_work(request, directory, remote, variables), command_for, fleet, always=always)
    asked = ElasticJob(options, job, fleet, environment, {host.name: host.slots for host in hosts})
    output = Output(directory, 0, out=sys.stderr.buffer if json else None, style=request.style)
    try:
        outcome = run_elastic(
            asked, output, status=(lambda: None) if status is None else lambda: status(directory)
        )
    finally:
        output.close()
    account_for(outcome, directory)
    return outcome, directory
