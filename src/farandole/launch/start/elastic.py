"""Starting a job whose hosts come and go: by `launch.elastic`, over ssh where hosts are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...core.environ.env import inherited_environment
from ...core.vocabulary.errors import ConfigError
from ..elastic.driver import ElasticJob
from ..elastic.options import ElasticOptions
from ..elastic.this_machine import LocalHostPool
from ..elastic.worker_host import HostPool
from ..job.hosts import EmulatedHost, Host, HostNamespaces, HostSlots
from ..job.placement import available_cores, threads_per_rank
from ..output.rank_output import Output
from ..ssh.elastic_host import SshHostPool
from ..ssh.link.remote_shell import connecting_command
from ..ssh.remote_job import RemoteJobSpec
from ..supervise.job_loop import Outcome
from .placing import PlacedJob, chosen_variables, command_there, find_hosts, host_setup, variables_there
from .request import JobRequest
from .start import Status, make_job, open_run, run_recorded


def start_elastic(request: JobRequest, options: ElasticOptions, *, status: Status) -> tuple[Outcome, Path]:
    """Start an elastic job on its hosts, or those its script finds; return how it ended and its run directory."""
    finder = find_hosts(request.remote)
    listed = request.hosts if options.discovery_script is not None else _fixed_hosts(request, options)
    known = {host.name: host for host in listed}

    def find(name: str) -> Host:
        return finder.find(known.get(name) or HostSlots(name, 1))

    def namespaces_of(name: str) -> HostNamespaces | None:
        host = find(name)
        return host.namespaces if isinstance(host, EmulatedHost) else None

    command_for = partial(connecting_command, options=request.remote.ssh)
    for name in known:  # a name that makes no sense is refused now, not at its first start
        namespaces_of(name) if finder.emulated else command_for(find(name))
    request = replace(request, environment={**request.environment, "HOROVOD_ELASTIC": "1"})
    variables = {} if finder.emulated else variables_there(request)
    directory = open_run(request, size=None, extra={"elastic": True, "least_ranks": options.min_ranks})
    ranks = options.max_ranks or request.size or options.min_ranks
    threads = threads_per_rank(available_cores(), ranks)
    placed = PlacedJob(request, (), threads=threads, address=finder.own_address)
    job = make_job(placed, directory, 0)
    environment = {**inherited_environment(), **chosen_variables(request.remote)}
    pool: HostPool = LocalHostPool(request.command, job, environment, namespaces_of)
    if not finder.emulated:
        command = command_there(request.command, request.remote)
        work = RemoteJobSpec(command, job, host_setup(request.remote), variables)
        pool = SshHostPool(work, find, command_for, pool)

    def run(output: Output) -> Outcome:
        hosts = {host.name: host.slots for host in listed}
        said = partial(status, directory)
        return ElasticJob(options, job, pool, output, environment=environment, hosts=hosts, status=said).run()

    return run_recorded(request, directory, 0, run)


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
