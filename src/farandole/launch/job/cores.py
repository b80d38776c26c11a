"""Which cores a rank gets: an equal, contiguous share of those it may use; what to say of too few."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.environ.env import read_thread_count
from .contract import RankSpec


def available_cores() -> list[int]:
    """Return the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def divide_cores(cores: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Divide `cores` evenly over `ranks`; empty shares (no binding) when there are too few.

    >>> divide_cores([0, 1, 2, 3, 4], 2)
    [(0, 1), (2, 3)]
    """
    each = len(cores) // ranks
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def threads_per_rank(cores: Sequence[int], ranks: int) -> int:
    """Return how many compute threads each of `ranks` should use: its share of the cores.

    >>> threads_per_rank([0, 1, 2, 3, 4], 2), threads_per_rank([0, 1], 3)
    (2, 1)
    """
    return max(1, len(cores) // max(1, ranks))


def bind_ranks(places: Sequence[RankSpec], cores: list[int], *, bind: bool) -> list[RankSpec]:
    """Return the places of all ranks of a host, each with its share of `cores` when they are to be bound."""
    shares = divide_cores(cores, len(places)) if bind else [()] * len(places)
    spare = tuple(sorted(set(cores).difference(*shares)))
    return [replace(place, cores=share, spare_cores=spare) for place, share in zip(places, shares, strict=True)]


def crowding_warnings(
    ranks: int, cores: int, *, bind: bool, remedy: str, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return what to say, before the start, of more ranks or more threads than cores on a host.

    `remedy` has a place for how many ranks it has cores for; `environment` is that of the ranks, None: our own.
    """
    if ranks > cores:
        return (
            f"{ranks} ranks on {_core_word(cores)}: they share cores, none is bound, and a step takes the longer; "
            + remedy.format(cores),
        )
    own = cores // ranks
    asked = read_thread_count(environment)
    if not bind or asked is None or asked <= own:
        return ()
    return (
        f"OMP_NUM_THREADS={asked}, and each rank is bound to {_core_word(own)}: leave it out, or set it to {own}",
    )


def _core_word(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"
