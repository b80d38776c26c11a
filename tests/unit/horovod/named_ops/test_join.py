"""Pretend ranks that join, over streams of any speed: who is the last, and whom a join still needs."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.horovod.named_ops.channel import Frame
from farandole.horovod.named_ops.shutdown import Joins, PendingJoin


class Rank:
    """A rank's `Joins`, its epochs, and one stream from it to each rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.epochs = [0] * size
        self.streams: list[deque[tuple[Frame, int]]] = [deque() for _ in range(size)]
        self.joins = Joins(rank, self.epochs, self.send, self.joined)

    def send(self, rank: int, kind: Frame, data: bytes = b"", number: int = 0) -> None:
        if rank != self.rank:
            self.streams[rank].append((kind, number))

    def joined(self, rank: int) -> None:
        self.epochs[rank] += 1

    def begin(self) -> PendingJoin:
        return self.joins.begin(lambda: None)

    def hear(self, rank: int, kind: Frame, number: int) -> None:
        if kind == Frame.JOIN:
            self.joined(rank)
        elif kind == Frame.JOIN_WISH:
            self.joins.take_wish(rank)
        elif kind == Frame.JOIN_PLACE:
            self.joins.take_place(is_last=bool(number))
        else:
            assert kind == Frame.JOINED
            self.joins.take_joined(number)


class Job:
    """All ranks; somebody decides which stream moves next."""

    def __init__(self, size: int) -> None:
        self.ranks = [Rank(rank, size) for rank in range(size)]

    def deliver(self, source: int, target: int) -> bool:
        stream = self.ranks[source].streams[target]
        if stream:
            self.ranks[target].hear(source, *stream.popleft())
            return True
        return False

    def settle(self) -> None:
        everyone = range(len(self.ranks))
        while any(self.deliver(source, target) for source in everyone for target in everyone):
            pass


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.integers(1, 4))
def test_the_last_is_the_same_everywhere_and_nobody_who_knew_of_it_joined_before(
    data: st.DataObject, size: int
) -> None:
    job = Job(size)
    for round_number in range(2):
        order = data.draw(st.permutations(range(size)))
        knew: dict[int, set[int]] = {}
        tickets: dict[int, PendingJoin] = {}
        for rank in order:
            for source, target in data.draw(
                st.lists(st.tuples(st.sampled_from(range(size)), st.sampled_from(range(size))), max_size=8)
            ):
                job.deliver(source, target)
            epochs = job.ranks[rank].epochs
            knew[rank] = {other for other in range(size) if epochs[other] > round_number}
            tickets[rank] = job.ranks[rank].begin()
        job.settle()
        lasts = {ticket.wait() for ticket in tickets.values()}
        assert len(lasts) == 1
        (last,) = lasts
        assert [rank for rank in range(size) if tickets[rank].is_last()] == [last]
        assert not any(last in known for known in knew.values()), "whoever knew of the last join came later"


def test_slow_news_of_a_join_does_not_make_it_the_last() -> None:
    job = Job(3)
    job.ranks[1].begin()
    job.deliver(1, 0)  # its wish
    job.deliver(0, 1)  # its place
    job.deliver(1, 2)  # rank 2 hears of it, rank 0 does not yet
    assert job.ranks[2].epochs[1] == 1
    job.ranks[2].begin()
    job.deliver(2, 0)
    zero = job.ranks[0].begin()
    assert zero.is_last()
    assert zero.wait() == 0


def test_a_join_needs_those_that_have_not_joined_and_rank_0() -> None:
    job = Job(3)
    mine = job.ranks[1].begin()
    needs = job.ranks[1].joins.needs
    assert [needs(0), needs(2)] == [True, True]
    job.ranks[2].begin()
    for source, target in ((1, 0), (0, 1), (2, 0), (0, 2), (2, 1)):
        job.deliver(source, target)
    assert not needs(2), "it may leave: it is not waited for any more"
    assert needs(0)
    job.ranks[0].begin()
    job.settle()
    assert mine.wait() == 0
    assert not needs(0)
