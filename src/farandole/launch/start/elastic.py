"""Starting a job whose hosts come and go: by `launch.elastic`, over ssh where hosts are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...core.env import inherited_environment
from ...core.vocabulary.errors import ConfigError
from ..elastic.driver import ElasticJob
from ..elastic.options import ElasticOptions
from ..elastic.workers import HostPool, Reports, Workers
from ..job.contract import JobSpec, RankSpec
from ..job.hosts import EmulatedHost, Host, HostNamespaces, HostSlots
from ..job.placement import available_cores, threads_per_rank
from ..output import Output
from ..ssh.elastic_host import SshHostPool
from ..ssh.job import RemoteJobSpec
from ..ssh.link.remote_shell import connecting_command
from ..supervise.job_loop import Outcome
from ..supervise.process import Reaper
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


# Hosts that are this machine: under several names, or as namespaces that ``farandole emulate`` made of it.


Locate = Callable[[str], HostNamespaces | None]
"""Finds the namespaces of a host; None: this machine. Raises `FarandoleError` for a host it cannot reach."""


class LocalHostPool:
    """Takes every name for this machine, or for a host that `locate` finds on it."""

    def __init__(
        self, command: Sequence[str], job: JobSpec, environment: Mapping[str, str],
        locate: Locate = lambda name: None,
    ) -> None:  # fmt: skip
        """Workers reach us at the job's address."""
        self._command, self._job, self._environment, self._locate = command, job, environment, locate
        self._reaper: Reaper | None = None
        self._machine: Workers | None = None

    def hosts_are(self, names: Collection[str]) -> None:
        """All are here."""

    def reach(self, name: str, slots: int, reports: Reports) -> Workers:
        """Return this machine, whatever `name` is; raise what `locate` raises."""
        self._locate(name)
        if self._reaper is None:
            self._reaper = Reaper(say=reports.say)
        if self._machine is None or not self._machine.is_open:
            self._machine = Workers(
                self._command, self._job, self._environment, self._reaper, reports=reports, place=self._place
            )
        return self._machine

    def _place(self, host_name: str) -> RankSpec:
        return RankSpec(0, 1, 0, 1, host=self._locate(host_name))

    def close(self) -> None:
        """Let the reaper go; the driver has closed the one host there is."""
        if self._reaper is not None:
            self._reaper.dismiss()
