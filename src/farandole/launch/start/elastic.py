"""Starting a job whose hosts come and go: by `launch.elastic`, over ssh where hosts are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.environ.env import inherited_environment
from ...core.vocabulary.errors import ConfigError
from ..elastic.driver import ElasticJob, run_elastic
from ..elastic.options import ElasticOptions
from ..elastic.this_machine import LocalHostPool
from ..elastic.worker_host import HostPool
from ..job.cores import available_cores
from ..job.emulated_hosts import HostNamespaces
from ..job.host_list import HostSlots
from ..job.hosts import EmulatedHost, Host
from ..ssh.host_pool import SshHostPool
from ..ssh.link.remote_shell import connecting_command
from ..supervise.local import Outcome
from .over_ssh import remote_spec, variables_there
from .placing import PlacedJob, chosen_variables, command_there, find_hosts
from .records import make_job, open_output, open_run, report_failure
from .request import JobRequest


def start_elastic(
    request: JobRequest, options: ElasticOptions, *, status: Callable[[Path], str | None]
) -> tuple[Outcome, Path]:
    """Start an elastic job on its hosts, or those its script finds; return how it ended and its run directory."""
    finder = find_hosts(request.remote)
    listed = request.hosts if options.discovery_script is not None else _fixed_hosts(request, options)
    known = {host.name: host for host in listed}

    def find(name: str) -> Host:
        return finder.find(known.get(name) or HostSlots(name, 1))

    def namespaces_of(name: str) -> HostNamespaces | None:
        host = find(name)
        return host.namespaces if isinstance(host, EmulatedHost) else None

    def command_for(host: Host) -> Sequence[str]:
        return connecting_command(host, request.remote.ssh)

    for name in known:  # a name that makes no sense is refused now, not at its first start
        namespaces_of(name) if finder.emulated else command_for(find(name))
    request = replace(request, environment={**request.environment, "HOROVOD_ELASTIC": "1"})
    variables = {} if finder.emulated else variables_there(request)
    directory = open_run(request, size=None, extra={"elastic": True, "least_ranks": options.min_ranks})
    ranks = options.max_ranks or request.size or options.min_ranks
    placed = PlacedJob(request, (), threads=max(1, len(available_cores()) // ranks), address=finder.own_address)
    job = make_job(placed, directory, 0)
    environment = {**inherited_environment(), **chosen_variables(request.remote)}
    pool: HostPool = LocalHostPool(request.command, job, environment, namespaces_of)
    if not finder.emulated:
        there = replace(request, command=command_there(request.command, request.remote))
        pool = SshHostPool(
            remote_spec(replace(placed, request=there), directory, variables), find, command_for, pool
        )
    elastic_job = ElasticJob(options, job, pool, environment, {host.name: host.slots for host in listed})
    output = open_output(request, directory, 0)
    try:
        outcome = run_elastic(elastic_job, output, status=lambda: status(directory))
    finally:
        output.close()
    report_failure(outcome, directory)
    return outcome, directory


def _fixed_hosts(request: JobRequest, options: ElasticOptions) -> Sequence[HostSlots]:
    """Return the hosts of a job without a script, by default this machine, or those of an emulation."""
    if request.hosts:
        return request.hosts
    emulated = find_hosts(request.remote).find_all(())
    if not emulated and request.size is None and options.max_ranks is None:
        raise ConfigError(
            "an elastic job needs hosts, or -np for this machine alone",
            remedy="add --host-discovery-script, --hostfile or -H a:2,b:2",
        )
    return emulated or [HostSlots("localhost", request.size or options.max_ranks or options.min_ranks)]
