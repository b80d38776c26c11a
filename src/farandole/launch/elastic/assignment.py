"""The members and ranks of the next generation. Pure: workers and hosts in, rank assignments out.

[Note: rank 0 holds the state] After a change the ranks copy their state from rank 0. So rank 0 must be a
worker that has it, and of those one with the newest commit: workers are ordered by their progress first
(all survivors of one generation have the same, as a rule), by age second. Ranks of a host are next to each
other, and a host's place is that of its best worker; so survivors keep their order, and those who
joined come last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..job.contract import RankSpec
from ..job.hosts import HostSlots
from ..job.placement import assign_ranks
from .generation import NO_STATE, Worker


@dataclass(frozen=True)
class Membership:
    """Who stays and who goes."""

    members: tuple[Worker, ...]
    leaving: tuple[Worker, ...]
    """Their host, or their slot on it, is no longer there."""


def choose(workers: Collection[Worker], slots: Mapping[str, int], max_ranks: int | None) -> Membership:
    """Choose the members among `workers`: at most a host's slots on each host, at most `max_ranks` in all.

    When only workers that should leave hold the state, the best of them stays for one more generation.
    """
    members: list[Worker] = []
    leaving: list[Worker] = []
    taken: dict[str, int] = {}
    for worker in sorted(workers, key=standing):
        used = taken.get(worker.host, 0)
        full = max_ranks is not None and len(members) >= max_ranks
        if used < slots.get(worker.host, 0) and not full:
            taken[worker.host] = used + 1
            members.append(worker)
        else:
            leaving.append(worker)
    if leaving and _best(leaving) > NO_STATE and members and _best(members) == NO_STATE:
        kept, *leaving = leaving
        if max_ranks is not None and len(members) >= max_ranks:
            leaving.append(members.pop())
        return Membership((*members, kept), tuple(leaving))
    return Membership(tuple(members), tuple(leaving))


def assign(members: Collection[Worker]) -> dict[int, RankSpec]:
    """Return the members' places by worker, in the order of ranks. See [Note: rank 0 holds the state]."""
    hosts: dict[str, list[Worker]] = {}
    for member in sorted(members, key=standing):
        hosts.setdefault(member.host, []).append(member)
    workers = [member.number for here in hosts.values() for member in here]
    slots = [HostSlots(host, len(here)) for host, here in hosts.items()]
    return dict(zip(workers, assign_ranks(slots, len(workers)), strict=True))


def vacancies(
    workers: Mapping[str, int], slots: Mapping[str, int], open_hosts: Collection[str], max_ranks: int | None
) -> list[str]:
    """Return a host for each worker to start: free slots of open hosts, in the hosts' order.

    `workers`: how many run on each host. `slots` is in the hosts' order, the longest known first.
    """
    room = float("inf") if max_ranks is None else max_ranks - sum(workers.values())
    found: list[str] = []
    for host, count in slots.items():
        if host in open_hosts:
            free = max(0, count - workers.get(host, 0))
            found += [host] * int(min(free, max(0, room - len(found))))
    return found


def update_kind(before: Sequence[int], after: Sequence[int]) -> int:
    """Return what changes from one set of workers to another: 0 nothing, 1 removed, 2 added, 3 both."""
    removed = bool(set(before) - set(after))
    added = bool(set(after) - set(before))
    return int(removed) + 2 * int(added)


def standing(worker: Worker) -> tuple[int, int]:
    """Return what workers are ordered by, the best first. See [Note: rank 0 holds the state]."""
    return -worker.progress, worker.number


def _best(workers: Collection[Worker]) -> int:
    return max(worker.progress for worker in workers)
