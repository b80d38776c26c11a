"""Announcements of pretend ranks in any order: all find the same partners, and nobody is forgotten."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.horovod.named_ops.matcher import Announcement, Match, Matcher, disagreement
from farandole.horovod.named_ops.operations import Signature


@dataclass(eq=False)
class Own:
    members: tuple[int, ...]
    signature: Signature


@dataclass
class Rank:
    """A rank that submits what it is told, and one stream from it to each rank."""

    rank: int
    size: int
    matcher: Matcher = field(init=False)
    streams: list[deque[Signature | None]] = field(init=False)
    matches: list[tuple[str, tuple[tuple[int, Signature], ...], tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.matcher = Matcher(self.rank, self.size)
        self.streams = [deque() for _ in range(self.size)]

    def submit(self, signature: Signature, members: tuple[int, ...]) -> None:
        for member in members:
            if member != self.rank:
                self.streams[member].append(signature)
        self.hear(self.rank, signature, Own(members, signature))

    def join(self) -> None:
        for member in range(self.size):
            if member != self.rank:
                self.streams[member].append(None)
        self.hear(self.rank, None)

    def hear(self, rank: int, signature: Signature | None, own: Own | None = None) -> None:
        matcher = self.matcher
        if signature is None:
            for slot in matcher.joined(rank):
                while (match := matcher.take(slot)) is not None:
                    self._note(match)
                matcher.release(slot)
            return
        slot = matcher.slot(signature.key)
        matcher.add(slot, rank, Announcement(signature, matcher.epochs[rank], own=own))
        while (match := matcher.take(slot)) is not None:
            self._note(match)
        matcher.release(slot)

    def _note(self, match: Match) -> None:
        told = tuple((rank, each.signature) for rank, each in match.told.items())
        self.matches.append((match.own.signature.name, told, match.absent))


@settings(max_examples=150)
@given(size=st.integers(1, 8), seed=st.integers(0, 10**6), epochs=st.integers(1, 3))
def test_all_ranks_find_the_same_partners(size: int, seed: int, epochs: int) -> None:
    chance = random.Random(seed)
    ranks = [Rank(rank, size) for rank in range(size)]
    everyone = tuple(range(size))
    sets = [everyone, *(tuple(sorted(chance.sample(everyone, chance.randint(1, size)))) for _ in range(2))]
    todo: list[deque[tuple[Signature, tuple[int, ...]] | None]] = [deque() for _ in ranks]
    for _ in range(epochs):
        names = [(f"n{chance.randrange(4)}", chance.randrange(len(sets))) for _ in range(chance.randint(0, 8))]
        for rank in everyone:
            mine = [(name, s) for name, s in names if rank in sets[s]]
            mine = mine[: chance.randint(0, len(mine))] if epochs > 1 else mine  # who joins early does less
            # Different names in any order; the same name keeps its own.
            order = sorted(mine, key=lambda each: chance.random() if epochs == 1 else 0)
            for name, s in order:
                shape = (chance.choice([3, 3, 3, 4]),)
                todo[rank].append((Signature(name, s, "allreduce", "float32", shape), sets[s]))
            if epochs > 1:
                todo[rank].append(None)
    joined = [0] * size
    while True:
        acts = [("do", r, r) for r in everyone if todo[r] and joined[r] == min(joined)]
        acts += [("hear", r, o) for r in everyone for o in everyone if ranks[o].streams[r]]
        if not acts:
            break
        act, rank, other = chance.choice(acts)
        if act == "hear":
            ranks[rank].hear(other, ranks[other].streams[rank].popleft())
            continue
        next_one = todo[rank].popleft()
        if next_one is None:
            joined[rank] += 1
            ranks[rank].join()
        else:
            ranks[rank].submit(*next_one)
    found: dict[tuple[str, tuple[int, ...]], list[list[Any]]] = {}
    for each in ranks:
        assert not each.matcher.slots, "nobody waits, and nothing is kept"
        by_name: dict[tuple[str, int], list[Any]] = {}
        for name, told, absent in each.matches:
            assert each.rank in dict(told)
            by_name.setdefault((name, told[0][1].process_set), []).append((told, absent))
        for (name, s), matches in by_name.items():
            found.setdefault((name, sets[s] + (s,)), []).append(matches)
    for matches_by_rank in found.values():
        # What a rank saw with absent members is not seen by those; of the rest all saw the same.
        seen = {repr(match) for matches in matches_by_rank for match in matches}
        for told_and_absent in {m for matches in matches_by_rank for m in matches}:
            told = told_and_absent[0]
            count = sum(told_and_absent in matches for matches in matches_by_rank)
            assert count == len(told), "all who took part saw it alike"
        assert seen


def test_the_words_do_not_depend_on_who_asks() -> None:
    told = {
        0: Signature("x", 0, "allreduce", "float32", (2, 3)),
        2: Signature("x", 0, "allreduce", "float32", (2, 4)),
        1: Signature("x", 0, "allreduce", "float32", (2, 3)),
    }
    text = disagreement(told, (), ["a", "a", "b"])
    assert text == (
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], but another rank sent a "
        "tensor of shape [2, 4]. ([2, 3] on ranks 0 and 1 (a); [2, 4] on rank 2 (b))"
    )
    assert not disagreement({0: told[0], 1: told[1]}, (), ["a", "a"])


def test_a_signature_survives_its_journey() -> None:
    told = Signature("x", 3, "alltoall", "bfloat16", (4, 2), prescale=0.1, splits=(1, 3), group=("x", "y"))
    assert Signature.decode(told.encode()) == told
    assert told.nbytes == 16
