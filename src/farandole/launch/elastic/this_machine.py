"""Hosts that are this machine: under several names, or as namespaces that ``farandole emulate`` made of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..job.contract import JobSpec, RankSpec
from ..job.hosts import HostNamespaces
from ..supervise.reaper import Reaper
from .worker_host import Reports
from .workers import Workers

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
