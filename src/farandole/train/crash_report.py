"""The account of a process that ends by an uncaught exception, and where it stands when the launcher asks.

These belong to the process and not to a world: meeting the other ranks may fail, or hang, before there is one.
`init` opens them, `shutdown` closes them, and a forked child forgets them.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ..comm.world.world import has_world, world
from ..core.environ.env import read_elastic_settings
from ..core.failures import is_peer_lost
from ..core.host.process_status import memory_limit
from ..core.host.stacks import StackWriter, end_with_code_of, hook_before
from ..core.launchers.rank_variables import read_rank_variables
from ..core.vocabulary.errors import ConfigError, FarandoleError, PeerLost, Stalled
from ..core.vocabulary.run_files import Crash
from ..core.vocabulary.text import write_notice


class CrashReport:
    """Writes into a run directory while it is open."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.parents_directory: Path | None = None
        """In a forked child: where the parent writes."""
        self._previous_hook: Any = None
        self._reporting = False
        """Whether an uncaught exception is being printed."""
        self.has_crashed = False
        """Whether an uncaught exception ends this process."""
        self.stacks: StackWriter | None = None

    def open(self, directory: Path | None) -> None:
        """Report uncaught exceptions, into `directory` if there is one, and answer the launcher from now on."""
        self.directory = directory
        if self._previous_hook is None:
            self._previous_hook = hook_before()
            sys.excepthook = self.crashed
        if directory is not None and self.stacks is None:
            with suppress(OSError):  # a run directory that cannot be written is reported by its events
                self.stacks = StackWriter(directory, _place()[0])

    def close(self) -> None:
        """Leave everything as it was before `open`."""
        if self.stacks is not None:
            self.stacks.close()
        self.directory = self.stacks = None
        self._release()

    def forget(self) -> None:
        """In a forked child: write nothing that is the parent's."""
        if self.directory is not None:
            self.parents_directory = self.directory
        if self.stacks is not None:
            self.stacks.forget()
        self.directory = self.stacks = None
        self._release()

    def crashed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leave the account of an uncaught exception, then print it."""
        if self._reporting:  # the hook before ours leads to ours: other code wrapped it in an earlier world
            sys.__excepthook__(kind, error, trace)
            return
        self._reporting = self.has_crashed = True
        try:
            self._report(kind, error, trace)
        finally:
            self._reporting = False
        if sys.excepthook == self.crashed:
            end_with_code_of(error)

    def _release(self) -> None:
        if self._previous_hook is not None and sys.excepthook == self.crashed:
            sys.excepthook = self._previous_hook
        self._previous_hook = None

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = isinstance(error, FarandoleError)
        if self.directory is not None and not issubclass(kind, KeyboardInterrupt):
            rank, steps, host = _place()
            if self.stacks is not None and isinstance(error, Stalled):
                self.stacks.write(error, trace)
            crash = Crash.from_exception(
                error, trace, rank=rank, host=host, step=steps, ours=ours,
                consequence=only_a_consequence(error),
                exit_code=error.exit_code if isinstance(error, FarandoleError) else 1,
            )  # fmt: skip
            replace(crash, memory_limit=memory_limit()).write(self.directory)
        if ours:
            write_notice(str(error))
        else:
            (self._previous_hook or sys.__excepthook__)(kind, error, trace)


def _place() -> tuple[int, int, str]:
    elastic = read_elastic_settings()
    if elastic is not None:  # the launcher of such a job knows processes by their number, not by a passing rank
        return elastic.worker, world().session.steps.done if has_world() else 0, socket.gethostname()
    if has_world():
        here = world()
        return here.rank, here.session.steps.done, here.host
    try:
        variables = read_rank_variables()
    except ConfigError:
        variables = None
    return (variables.rank if variables else 0), 0, socket.gethostname()


def only_a_consequence(error: BaseException) -> bool:
    """Return whether `error` says no more than that another rank is gone."""
    if isinstance(error, (PeerLost, Stalled)):
        return True
    return isinstance(error, RuntimeError) and is_peer_lost(str(error), any_origin=True)
