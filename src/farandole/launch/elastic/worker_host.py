"""What a host is to the driver: it starts workers, passes frames on, and reports.

How it is reached is its own affair. A host never waits and never raises for what happens elsewhere: a worker that
cannot be started has ended, and a host that cannot be reached, or not any more, is lost with all that was
asked of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ...core.vocabulary.run_files import Crash
from ..supervise.failure import Exit
from .control import Frame


class WorkerReports(Protocol):
    """Takes what workers do."""

    def heard(self, worker: int, frame: Frame) -> None:
        """A worker has sent a frame."""

    def printed(self, worker: int, is_error: bool, data: bytes) -> None:
        """A worker has printed something."""

    def ended(self, exited: Exit, crashes: Sequence[Crash], *, out_of_memory: bool) -> None:
        """A worker's process is gone; `crashes` are accounts of its own."""

    def say(self, text: str) -> None:
        """Tell the person who watches."""


class Reports(WorkerReports, Protocol):
    """Takes what happens on hosts: the driver."""

    def lost(self, host: WorkerHost, cause: str, *, remedy: str, exit_code: int) -> None:
        """A host is gone with all its workers, or cannot be reached. `exit_code`: of a job that ends of it."""


class WorkerHost(Protocol):
    """One host, or several that are reached as one."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""

    def poll(self) -> None:
        """Deal with what has come."""

    def tick(self, now: float) -> None:
        """Do what is due; called about ten times a second."""

    def start(self, worker: int, host_name: str, variables: Mapping[str, str]) -> None:
        """Start a worker, at once or as soon as the host can; `variables` are for it alone."""

    def tell(self, worker: int, frame: Frame) -> None:
        """Send a frame to a worker."""

    def signal(self, worker: int, number: int) -> None:
        """Send a signal to a worker and all that it has started."""

    def leave(self) -> bool:
        """There are no workers and there will be none; return whether the host has been let go.

        To be called again until it has: files may be on their way.
        """

    def close(self) -> None:
        """Let go at once; kill what runs."""


class HostPool(Protocol):
    """Finds hosts by their names."""

    def hosts_are(self, names: Collection[str]) -> None:
        """Take the names that there are from now on."""

    def reach(self, name: str, slots: int, reports: Reports) -> WorkerHost:
        """Return the host of a name, the same one as long as it is neither lost nor left.

        Raises `FarandoleError` for a name that cannot be reached from here.
        """

    def close(self) -> None:
        """The job is over: nothing of what hosts have in common stays."""
