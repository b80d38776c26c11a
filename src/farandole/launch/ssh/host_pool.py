"""The hosts of an elastic job that may be anywhere: a `HostPool`.

As long as all names mean this machine there is no connection at all. Whether that is so is seen from the
first list of hosts, because it decides by which interface the workers meet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ...core.vocabulary.errors import ConfigError
from ..elastic.worker_host import HostPool, Reports, WorkerHost
from ..job.hosts import Host, need_ssh
from .agent.files import FileTaker
from .elastic_host import ElasticHost
from .link.handshake import Handshake
from .link.heartbeat import Heartbeat
from .link.host_link import HostLink
from .remote_job import RemoteJobSpec


class SshHostPool:
    """Reaches every host over ssh, or all of them as `alone` does when none is elsewhere."""

    def __init__(
        self,
        work: RemoteJobSpec,
        find: Callable[[str], Host],
        command_for: Callable[[Host], Sequence[str]],
        alone: HostPool,
    ) -> None:
        """`find` says how a host is reached by its name, `command_for` returns what connects us to it.

        `command_for` raises `ConfigError` for a name that is none.
        """
        self._work, self._find, self._command_for, self._alone = work, find, command_for, alone
        self._is_spread: bool | None = None
        self._handshake: Handshake | None = None
        self._beats = Heartbeat()
        self._hosts: dict[str, ElasticHost] = {}
        """The latest connection to each."""
        self._count: dict[str, int] = {}
        """How often each was connected to."""

    def hosts_are(self, names: Collection[str]) -> None:
        """Take the names that there are from now on; the first ones say whether any host is elsewhere."""
        if self._is_spread is None and names:
            self._is_spread = need_ssh(map(self._find, names))

    def reach(self, name: str, slots: int, reports: Reports) -> WorkerHost:
        """Return the connection to a host, or begin one."""
        if not self._is_spread:
            if need_ssh([self._find(name)]):
                raise ConfigError(
                    "this job began on this machine alone, where its ranks meet by the loopback interface",
                    remedy="have a host that is not this machine in the list when the job starts",
                )
            return self._alone.reach(name, slots, reports)
        known = self._hosts.get(name)
        if known is not None and known.is_usable:
            return known
        command = self._command_for(self._find(name))
        if self._handshake is None:
            self._handshake = Handshake(self._work.job.run_directory, self._work.environment.get("PYTHONPATH", ""))
            self._beats.start()
        count = self._count[name] = self._count.get(name, 0) + 1
        aside = name if count == 1 else f"{name}-{count}"
        files = FileTaker(self._work.job.run_directory, aside, reports.say)
        link = HostLink(name, (), command)
        host = ElasticHost(
            link, self._work, reports, slots=slots, handshake=self._handshake, find_peers=self._peers_of,
            files=files, stood_still_seconds=self._beats.pauses.recent_seconds,
        )  # fmt: skip
        self._hosts[name] = host
        self._beats.links = [each.link for each in self._hosts.values() if each.link.is_open]
        return host

    def close(self) -> None:
        """End the beats, and take the file away by which hosts see whether they share our directory."""
        self._beats.stop()
        if self._handshake is not None:
            self._handshake.close()
        self._alone.close()

    def _peers_of(self, host: ElasticHost) -> Sequence[str] | None:
        """Return addresses that `host` has to reach; None: wait for others, which are being connected to.

        A host elsewhere can take the way to the launcher. This machine cannot: it has to know another one.
        """
        others = [each for each in self._hosts.values() if each is not host and each.link.is_open]
        known = [each.address for each in others if each.address]
        if known or host.address:
            return known or [""]
        return None if any(each.address is None for each in others) else []
