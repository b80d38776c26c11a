"""Which operations are complete: every member has said that it is ready. Pure; no sockets, no clock.

[Note: all members are told] A rank announces an operation to all members of its set, itself included.
What a member announces reaches each other member in the same order. So every member finds the same partners
for each operation, and comes to the same verdict without a coordinator. The n-th announcement of a
name by one member meets the n-th by every other.

[Note: epochs of join] A rank that joins says so in the same stream. What it announces afterwards belongs to
its next epoch. An operation of epoch e is complete when each member has announced it in e or has left e by
joining: then that member is absent. All members see the same members absent. What others announce in an epoch that
this rank has left, and in which it has nothing more to offer, is dropped here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..operations.signature import Signature

Key = tuple[int, str]


@dataclass(eq=False, slots=True)
class Announcement:
    """One member is ready."""

    signature: Signature
    epoch: int
    payload: bytearray | None = None
    """Its data, when it came along; None: it did not."""
    own: Any = None
    """This rank's operation; None for other ranks."""


@dataclass(eq=False, slots=True)
class MatchSlot:
    """Announcements of one name that wait for their partners, by rank, oldest first."""

    key: Key
    queues: dict[int, deque[Announcement]] = field(default_factory=dict)
    filled: int = 0
    """Members with at least one."""
    users: int = 0
    """Numbers of other ranks that stand for a signature of this name; see `numbers`."""

    @property
    def ready(self) -> list[int]:
        """Members with at least one."""
        return [rank for rank, queue in self.queues.items() if queue]


@dataclass(eq=False, slots=True)
class Match:
    """An operation whose members are all ready."""

    own: Any
    told: dict[int, Announcement]
    """By rank, ascending; without absent members."""
    absent: tuple[int, ...]


class Matcher:
    """The announcements of all ranks, seen from one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.slots: dict[Key, MatchSlot] = {}
        self.epochs = [0] * size
        """Joins so far, by rank."""
        self._has_joins = False

    def slot(self, key: Key) -> MatchSlot:
        """Return the slot of a name."""
        found = self.slots.get(key)
        if found is None:
            found = self.slots[key] = MatchSlot(key)
        return found

    def release(self, slot: MatchSlot) -> None:
        """Forget a slot that is unused and in which no operation waits."""
        if not slot.users and not slot.filled:
            self.slots.pop(slot.key, None)

    def add(self, slot: MatchSlot, rank: int, announcement: Announcement) -> None:
        """Take an announcement of `rank`; `take` then returns what it completes."""
        if announcement.epoch < self.epochs[self.rank] and not slot.queues.get(self.rank):
            return  # this rank is absent
        queue = slot.queues.get(rank)
        if queue is None:
            queue = slot.queues[rank] = deque()
        if not queue:
            slot.filled += 1
        queue.append(announcement)

    def take(self, slot: MatchSlot) -> Match | None:
        """Return the next complete operation of the slot, or None."""
        mine = slot.queues.get(self.rank)
        if not mine:
            return None
        first = mine[0]
        members = first.own.members
        if not self._has_joins:
            return self._take_from_all(slot, first.own, members)
        epoch, epochs = first.epoch, self.epochs
        if slot.filled < len(members) and max(epochs) <= epoch:
            return None
        told: dict[int, Announcement] = {}
        absent = []
        for member in members:
            queue = slot.queues.get(member)
            while queue and queue[0].epoch < epoch:
                self._pop(slot, queue)  # this rank was absent
            if queue and queue[0].epoch == epoch:
                told[member] = queue[0]
            elif epochs[member] > epoch:
                absent.append(member)
            else:
                return None
        for member in told:
            self._pop(slot, slot.queues[member])
        if self.epochs[self.rank] and not mine:
            self._drop_left_epochs(slot)
        return Match(first.own, told, tuple(absent))

    def _take_from_all(self, slot: MatchSlot, own: Any, members: tuple[int, ...]) -> Match | None:
        """Return what is complete if no rank has ever joined: the usual case."""
        if slot.filled < len(members):
            return None
        told = {}
        for member in members:
            queue = slot.queues[member]
            told[member] = queue.popleft()
            if not queue:
                slot.filled -= 1
        return Match(own, told, ())

    def _pop(self, slot: MatchSlot, queue: deque[Announcement]) -> None:
        queue.popleft()
        if not queue:
            slot.filled -= 1

    def missing(self, own: Any, slot: MatchSlot) -> list[int]:
        """Return the members that an operation of this rank, the oldest of its slot, waits for."""
        mine = slot.queues.get(self.rank)
        if not mine or mine[0].own is not own:
            return []
        epoch = mine[0].epoch
        return [
            member
            for member in own.members
            if self.epochs[member] <= epoch
            and not ((queue := slot.queues.get(member)) and queue[0].epoch == epoch)
        ]

    def joined(self, rank: int) -> Iterator[MatchSlot]:
        """Note that `rank` joined; yield the slots that may be complete now."""
        self.epochs[rank] += 1
        self._has_joins = True
        for slot in list(self.slots.values()):
            if slot.queues.get(self.rank):
                yield slot
            elif rank == self.rank:
                self._drop_left_epochs(slot)
                self.release(slot)

    def _drop_left_epochs(self, slot: MatchSlot) -> None:
        for queue in slot.queues.values():
            while queue and queue[0].epoch < self.epochs[self.rank]:
                self._pop(slot, queue)
