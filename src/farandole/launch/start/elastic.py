"""Starting a job whose hosts come and go, and how these are reached: here, or over ssh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...core.env import inherited_environment
from ...core.vocabulary.errors import ConfigError
from ..elastic.driver import ElasticJob
from ..elastic.options import ElasticOptions
from ..elastic.workers import WorkerHost, Workers
from ..job.contract import JobSpec, RankSpec
from ..job.hosts import EmulatedHost, Host, HostNamespaces, HostSlots, need_ssh
from ..job.placement import available_cores, threads_per_rank
from ..output import Output
from ..ssh.host import HostConnections, RemoteHost, RemoteJobSpec
from ..ssh.host_link import HostLink
from ..ssh.remote_shell import connecting_command
from ..supervise.job_loop import HostReports, Outcome
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
    here = ThisMachine(request.command, job, environment, namespaces_of)
    command = command_there(request.command, request.remote)
    work = RemoteJobSpec(command, job, host_setup(request.remote), variables)
    pool = ElasticHosts(work, find, command_for, here)

    def run(output: Output) -> Outcome:
        hosts = {host.name: host.slots for host in listed}
        said = partial(status, directory)
        return ElasticJob(options, job, pool, output, environment=environment, hosts=hosts, status=said).run()

    return run_recorded(request, directory, 0, run)


def _fixed_hosts(request: JobRequest, options: ElasticOptions) -> Sequence[HostSlots]:
    """Return the hosts of a job without a script, by default this machine, or those of an emulation."""
    hosts = request.hosts or find_hosts(request.remote).find_all(())
    if hosts:
        slots = sum(host.slots for host in hosts)
        spares, ranks = options.spares, options.max_ranks or 0
        if spares and spares + ranks > slots:
            raise ConfigError(
                f"--spares {spares}: the hosts have {slots} slots, and {ranks} ranks take theirs",
                remedy="name more hosts or slots, or give -np (or --max-np) fewer ranks",
            )
        return hosts
    if request.size is None and options.max_ranks is None:
        raise ConfigError(
            "an elastic job needs hosts, or -np for this machine alone",
            remedy="add --host-discovery-script, --hostfile or -H a:2,b:2",
        )
    ranks = request.size or options.max_ranks or options.min_ranks
    return [HostSlots("localhost", ranks + options.spares)]


# How the hosts are reached.


class ElasticHosts:
    """Reaches every host over ssh, or all of them as this machine when none is elsewhere: a `HostPool`.

    As long as all names mean this machine there is no connection at all. Whether that is so is seen from the first
    list of hosts, because it decides by which interface the workers meet.
    """

    def __init__(
        self, work: RemoteJobSpec, find: Callable[[str], Host], command_for: Callable[[Host], Sequence[str]],
        here: ThisMachine,
    ) -> None:  # fmt: skip
        """`find` says how a host is reached by its name, `command_for` returns what connects us to it.

        `command_for` raises `ConfigError` for a name that is none.
        """
        self._find, self._command_for, self._here = find, command_for, here
        self._is_spread: bool | None = None
        self._connections = HostConnections(work)
        self._hosts: dict[str, RemoteHost] = {}
        """The latest connection to each."""
        self._count: dict[str, int] = {}
        """How often each was connected to."""

    def hosts_are(self, names: Collection[str]) -> None:
        """Take the names that there are from now on; the first ones say whether any host is elsewhere."""
        if self._is_spread is None and names:
            self._is_spread = need_ssh(map(self._find, names))
            if self._is_spread:
                self._connections.beats.start()

    def reach(self, name: str, slots: int, reports: HostReports) -> WorkerHost:
        """Return the connection to a host, or begin one."""
        if not self._is_spread:
            if need_ssh([self._find(name)]):
                raise ConfigError(
                    "this job began on this machine alone, where its ranks meet by the loopback interface",
                    remedy="have a host that is not this machine in the list when the job starts",
                )
            return self._here.reach(name, reports)
        known = self._hosts.get(name)
        if known is not None and known.is_usable:
            return known
        link = HostLink(name, self._command_for(self._find(name)))
        count = self._count[name] = self._count.get(name, 0) + 1
        aside = name if count == 1 else f"{name}-{count}"
        host = self._connections.connect(link, reports, aside=aside, find_peers=self._peers_of)
        host.slots = slots
        self._hosts[name] = host
        return host

    def close(self) -> None:
        """Let go of what hosts have in common."""
        self._connections.close()
        self._here.close()

    def _peers_of(self, host: RemoteHost) -> Sequence[str] | None:
        """Return addresses that `host` has to reach; None: wait for others, which are being connected to.

        A host elsewhere can take the way to the launcher. This machine cannot: it has to know another one.
        """
        others = [each for each in self._hosts.values() if each is not host and each.link.is_open]
        known = [each.address for each in others if each.address]
        if known or host.address:
            return known or [""]
        return None if any(each.address is None for each in others) else []


Locate = Callable[[str], HostNamespaces | None]
"""Finds the namespaces of a host; None: this machine. Raises `FarandoleError` for a host it cannot reach."""


class ThisMachine:
    """Takes every name for this machine, or for a host that `locate` finds on it."""

    def __init__(
        self, command: Sequence[str], job: JobSpec, environment: Mapping[str, str],
        locate: Locate = lambda name: None,
    ) -> None:  # fmt: skip
        """Workers reach us at the job's address."""
        self._command, self._job, self._environment, self._locate = command, job, environment, locate
        self._reaper: Reaper | None = None
        self._workers: Workers | None = None

    def reach(self, name: str, reports: HostReports) -> Workers:
        """Return this machine, whatever `name` is; raise what `locate` raises."""
        self._locate(name)
        if self._reaper is None:
            self._reaper = Reaper(say=reports.say)
        if self._workers is None or not self._workers.is_open:
            self._workers = Workers(
                self._command, self._job, self._environment, self._reaper, reports=reports, place=self._place
            )
        return self._workers

    def _place(self, host_name: str) -> RankSpec:
        return RankSpec(0, 1, 0, 1, host=self._locate(host_name))

    def close(self) -> None:
        """Let the reaper go; the job has closed the one host there is."""
        if self._reaper is not None:
            self._reaper.dismiss()
