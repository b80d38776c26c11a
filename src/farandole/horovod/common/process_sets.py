"""Sets of ranks that run operations among themselves.

::

    even = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[even])
    hvd.allreduce(x, process_set=even)     # on ranks 0 and 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.vocabulary.errors import CommError, ConfigError
from .exceptions import from_comm_error
from .running import Running, get_running

_NO_RANKS = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
UNKNOWN = "Process set provided does not exist, or has not been registered."


class ProcessSet:
    """A subset of the ranks: `ranks`, ascending, and `process_set_id`, its number once it is registered.

    Args:
        ranks_or_comm: the ranks. A communicator of mpi4py is kept in `mpi_comm`, but cannot be registered: pass
            its ranks.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_rank") and hasattr(ranks_or_comm, "Get_size"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            ranks = list(ranks_or_comm)
        except TypeError:
            raise ValueError(f"{_NO_RANKS}, got {ranks_or_comm!r}") from None
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"{_NO_RANKS}, got {ranks!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of its ranks; None while it is not registered."""
        return None if self.process_set_id is None else len(self._registered_ranks())

    def rank(self) -> int | None:
        """Return this process's rank in the set; None while it is not registered.

        Raises ValueError when this process is no member.
        """
        if self.process_set_id is None:
            return None
        ranks = self._registered_ranks()
        if get_running().world.rank not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(get_running().world.rank)

    def included(self) -> bool | None:
        """Return whether this process is a member."""
        return None if self.ranks is None else get_running().world.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__

    def is_stale(self) -> bool:
        """Return whether its number belongs to another set now: it was registered before a shutdown."""
        if not self.process_set_id or self.ranks is None:
            return False
        registered = get_running().engine.process_sets.get(self.process_set_id)
        return registered is not None and registered != tuple(self.ranks)

    def _registered_ranks(self) -> tuple[int, ...]:
        sets = get_running().engine.process_sets
        if self.process_set_id not in sets or self.is_stale():
            raise ValueError(UNKNOWN)
        return sets[self.process_set_id]


global_process_set = ProcessSet([])
"""All ranks; its `ranks` are filled in by `init`."""
global_process_set.process_set_id = 0


def static_process_sets(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    """Return the sets that `init` was given; raise ValueError for what is no list of them."""
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return []
    if isinstance(process_sets, str) or any(not isinstance(each, ProcessSet) for each in process_sets):
        raise ValueError(f"process_sets={process_sets!r}: expected a list of ProcessSet objects or 'dynamic'")
    return list(process_sets)


def register_at_start(running: Running, process_sets: Sequence[ProcessSet]) -> None:
    """Give the sets of `init` their numbers, and the global set its ranks."""
    everybody = list(range(running.world.size))
    global_process_set.ranks = everybody
    seen = [everybody]
    for i, process_set in enumerate(process_sets):
        ranks = _checked_ranks(process_set, running.world.size)
        if ranks in seen:
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {i} is a duplicate: "
                f"{process_set}"
            )
        seen.append(ranks)
    for process_set in process_sets:
        process_set.process_set_id = None
    for process_set in process_sets:
        process_set.process_set_id = running.engine.add_process_set(process_set.ranks or ())


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set while the job runs. Call it on all ranks with the same set.

    It needs ``init(process_sets="dynamic")`` or HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Args:
        process_set: a `ProcessSet`, or its ranks.

    Returns:
        The registered set, with its number.

    Raises:
        ValueError: the set is registered already, or has ranks that do not exist.
        HorovodInternalError: the ranks pass different sets, or a rank is gone.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    running = get_running()
    _require_dynamic(running, "adding")
    ranks = _checked_ranks(process_set, running.world.size)
    if tuple(ranks) in running.engine.process_sets.values():
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    try:
        process_set.process_set_id = running.engine.add_process_set(ranks)
    except ConfigError as problem:
        raise ValueError(str(problem)) from problem
    except CommError as problem:
        raise from_comm_error(problem) from problem
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Call it on all ranks.

    Args:
        process_set: a set that was registered.

    Returns:
        Whether it was removed: False for the global set and for one that is not registered.
    """
    running = get_running()
    _require_dynamic(running, "removing")
    number = process_set.process_set_id
    if number is None or number == 0 or number not in running.engine.process_sets:
        return False
    try:
        removed = running.engine.remove_process_set(number)
    except CommError as problem:
        raise from_comm_error(problem) from problem
    process_set.process_set_id = None
    return removed


def _require_dynamic(running: Running, what: str) -> None:
    if not running.dynamic_process_sets:
        raise ValueError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {what} process sets after hvd.init(), "
            "or call hvd.init(process_sets='dynamic')."
        )


def _checked_ranks(process_set: ProcessSet, size: int) -> list[int]:
    if process_set.ranks is None:
        raise ValueError(
            f"{process_set}: sets made of an mpi4py Comm are not supported; give the ranks: "
            "ProcessSet(world.allgather(...)) or a list"
        )
    ranks = process_set.ranks
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{process_set}: a rank is there twice")
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"{process_set}: expected ranks from 0 to {size - 1}")
    return ranks
