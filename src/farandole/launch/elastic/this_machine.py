"""Hosts that are this machine: under several names, or as namespaces that ``farandole emulate`` made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...core.vocabulary.errors import FarandoleError
from ..job.contract import JobSpec, RankSpec
from ..job.emulated_hosts import HostNamespaces
from ..supervise.failure import Exit
from ..supervise.reaper import Reaper
from .control import Frame
from .worker_host import Reports
from .workers import Workers

Locate = Callable[[str], HostNamespaces | None]
"""Finds the namespaces of a host; None: this machine. Raises `FarandoleError` for a host it cannot reach."""


class ThisMachine:
    """The `WorkerHost` of all names that mean this machine."""

    def __init__(self, workers: Workers, locate: Locate, reports: Reports) -> None:
        self._workers, self._locate, self._reports = workers, locate, reports
        self.is_open = True

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._workers.fileno()

    def poll(self) -> None:
        """Deal with what has come."""
        self._workers.poll()

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._workers.tick(now)

    def start(self, worker: int, host_name: str, variables: Mapping[str, str]) -> None:
        """Start a worker here, or in the namespaces of its host."""
        try:
            self._workers.start(worker, RankSpec(0, 1, 0, 1, host=self._locate(host_name)), variables)
        except FarandoleError as problem:
            self._reports.ended(
                Exit(worker, problem.exit_code, time.monotonic(), held=str(problem)), (), out_of_memory=False
            )

    def tell(self, worker: int, frame: Frame) -> None:
        """Send a frame to a worker."""
        self._workers.tell(worker, frame)

    def signal(self, worker: int, number: int) -> None:
        """Send a signal to a worker and all that it has started."""
        self._workers.signal(worker, number)

    def leave(self) -> bool:
        """Nothing has to be brought from here."""
        self.close()
        return True

    def close(self) -> None:
        """Kill what runs."""
        if self.is_open:
            self.is_open = False
            self._workers.close()


class LocalHostPool:
    """Takes every name for this machine, or for a host that `locate` finds on it."""

    def __init__(
        self, command: Sequence[str], job: JobSpec, environment: Mapping[str, str],
        locate: Locate = lambda name: None,
    ) -> None:  # fmt: skip
        """Workers reach us at the job's address."""
        self._command, self._job, self._environment, self._locate = command, job, environment, locate
        self._reaper: Reaper | None = None
        self._machine: ThisMachine | None = None

    def hosts_are(self, names: Collection[str]) -> None:
        """All are here."""

    def reach(self, name: str, slots: int, reports: Reports) -> ThisMachine:
        """Return this machine, whatever `name` is; raise what `locate` raises."""
        self._locate(name)
        if self._reaper is None:
            self._reaper = Reaper(say=reports.say)
        if self._machine is None or not self._machine.is_open:
            workers = Workers(self._command, self._job, self._environment, self._reaper, reports)
            self._machine = ThisMachine(workers, self._locate, reports)
        return self._machine

    def close(self) -> None:
        """Let the reaper go; the driver has closed the one host there is."""
        if self._reaper is not None:
            self._reaper.dismiss()
