"""The timelines of an engine: one from the start, or started and stopped while it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...comm.named_ops.operations.request import Kind, OperationLog
from ...observe.trace.operation_timeline import OperationTimeline


class SwitchedLog(OperationLog):
    """Passes what happens on to a timeline while there is one."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._target: OperationTimeline | None = None

    def start(self, path: str | os.PathLike[str], *, mark_cycles: bool) -> None:
        """Write to `path` from now on; the timeline so far, if any, is finished."""
        self.stop()
        self._target = OperationTimeline(path, self._rank, self._size, mark_cycles)

    def stop(self) -> None:
        """Finish the file. May be called twice."""
        target, self._target = self._target, None
        if target is not None:
            target.close()

    @property
    def is_on(self) -> bool:
        """See `OperationLog`."""
        return self._target is not None

    def submitted(self, name: str, kind: Kind, at_seconds: float) -> None:
        """See `OperationLog`, as for all others."""
        if (target := self._target) is not None:
            target.submitted(name, kind, at_seconds)

    def rank_ready(self, name: str, rank: int, at_seconds: float) -> None:
        """See `OperationLog`."""
        if (target := self._target) is not None:
            target.rank_ready(name, rank, at_seconds)

    def begun(self, name: str, kind: Kind, at_seconds: float) -> None:
        """See `OperationLog`."""
        if (target := self._target) is not None:
            target.begun(name, kind, at_seconds)

    def activity(self, names: Sequence[str], activity: str, begin_seconds: float, end_seconds: float) -> None:
        """See `OperationLog`."""
        if (target := self._target) is not None:
            target.activity(names, activity, begin_seconds, end_seconds)

    def finished(self, name: str, dtype: str, shape: Sequence[int], at_seconds: float, error: str = "") -> None:
        """See `OperationLog`."""
        if (target := self._target) is not None:
            target.finished(name, dtype, shape, at_seconds, error)
