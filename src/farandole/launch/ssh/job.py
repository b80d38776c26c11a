"""A job on many hosts: connects to all, arranges the rendezvous, and starts the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..job.contract import RankSpec
from ..output import Output
from ..supervise.fixed_job import FixedJob
from .host import Connections, RemoteJobSpec, SshHost
from .link.host_link import HostLink
from .link.protocol import SUSPECT_SECONDS


@dataclass(frozen=True)
class HostPlaces:
    """A host of the job, what connects us to it, and its ranks."""

    name: str
    places: Sequence[RankSpec]
    command: Sequence[str]


class RemoteJob(FixedJob):
    """Runs one command as the ranks of many hosts; when it has ended, all files are here."""

    def __init__(
        self, wanted: Sequence[HostPlaces], work: RemoteJobSpec, output: Output,
        status: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(output, work.job, status)
        self._wanted, self._work = wanted, work
        self._ssh_hosts: list[SshHost] = []
        self._is_running = False

    def _begin(self, at_last: ExitStack) -> None:
        shared = Connections(self._work)
        at_last.callback(shared.close)
        for each in self._wanted:
            link = HostLink(each.name, each.command)
            host = shared.connect(link, self, aside=each.name, find_peers=None)
            self._ssh_hosts.append(host)
            self.hosts.add(host, each.name)
        shared.beats.start()

    def _needs(self, names: set[str]) -> bool:
        return not self._is_running

    def _decide(self, now: float) -> None:
        super()._decide(now)
        if not self._is_ending and not self._is_running:
            self._advance()

    def _advance(self) -> None:
        """Go on to the next phase when all hosts are ready for it."""
        phases = {host.link.phase for host in self._ssh_hosts}
        if phases == {"ready"}:
            addresses = [str(host.address) for host in self._ssh_hosts]
            for index, host in enumerate(self._ssh_hosts):
                # The first is met by all: its way to the second is its way to all of them.
                host.ask_route(addresses[1:] if index == 0 else addresses[:1], is_first=index == 0)
        elif phases == {"routed"}:
            self._is_running = True
            first = self._ssh_hosts[0].link.route
            job = replace(self._work.job, address=first["address"], port=first["port"])
            for host, each in zip(self._ssh_hosts, self._wanted, strict=True):
                self.hosts.add(host, each.name, [place.rank for place in each.places])
                host.begin(job, each.places)

    def _may_be_a_host(self, now: float) -> bool:
        links = [host.link for host in self._ssh_hosts]
        return any(link.is_open and link.silent_seconds(now) > SUSPECT_SECONDS for link in links)
