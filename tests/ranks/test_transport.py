"""Messages over our own connections: strangers, ranks that are gone or stuck, frames of a wrong length."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farandole as fd
from farandole.comm.autotune.probe import choose_connection_count
from farandole.comm.messages import GroupRank, Message, Reduction, recursive_doubling, reduce_scatter_all_gather
from farandole.comm.transport import connect
from farandole.comm.transport import connect as callers
from farandole.comm.transport.comm_thread import CommThread, SegmentWork
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.transport import Transport
from farandole.comm.world import rendezvous
from farandole.comm.world.store_sync import all_gather_json
from tests.ranks.pool import ranks


def everyone() -> RankGroup:
    world = fd.world()
    return RankGroup(tuple(range(world.size)), world.rank)


def open_transport(timeout_seconds: float = 10.0, lanes: int = 1) -> Transport:
    return Transport(fd.init(), timeout_seconds=timeout_seconds, lanes=lanes)


def meet(topic: str = "test/meet") -> None:
    all_gather_json(fd.world(), topic, 0)


@pytest.mark.full("further")
@pytest.mark.parametrize("lanes", [1, 3])
@ranks(3)
def test_messages_of_all_sizes_on_several_lanes(lanes: int) -> None:
    transport = open_transport(lanes=lanes)
    circle, rank = everyone(), fd.world().rank
    flights = []
    for tag, count in enumerate((1, 1000, 300_000, 0, 7)):
        mine = torch.arange(3.0 * count).view(3, count) + 100 * rank
        flights.append((mine, transport.start(Message(mine, "all_to_all"), tag, circle)))
        flights.append((mine[0], transport.start(Message(mine[0].clone(), "all_gather"), 100 + tag, circle)))
    for i, (mine, flight) in enumerate(flights):
        source = mine - 100 * rank
        rows = [(source if i % 2 else source[rank]) + 100 * r for r in range(3)]
        assert flight.wait().equal(torch.stack(rows))
    meet()
    transport.close()


@ranks(2)
def test_frames_that_come_early_are_kept_until_asked_for() -> None:
    transport = open_transport(lanes=3)
    circle, rank = everyone(), fd.world().rank
    tags = list(range(12))
    order = tags if rank == 0 else tags[::-1]
    flights = {
        tag: transport.start(Message(torch.full((5,), float(tag)), "all_gather"), tag, circle) for tag in order[:1]
    }
    if rank == 0:
        for tag in order[1:]:
            flights[tag] = transport.start(Message(torch.full((5,), float(tag)), "all_gather"), tag, circle)
    meet()
    flights[order[0]].wait()
    if rank == 1:  # all of them are there, or on their way, and nobody asked for them yet
        for tag in order[1:]:
            flights[tag] = transport.start(Message(torch.full((5,), float(tag)), "all_gather"), tag, circle)
    for tag, flight in flights.items():
        assert flight.wait().equal(torch.full((2, 5), float(tag)))
    assert not transport._early
    assert not transport._posted
    meet()
    transport.close()


def call(where: tuple[str, int], said: bytes, *, reset: bool = False) -> bytes:
    """Connect as a stranger, say something, and return what is answered: nothing."""
    with socket.create_connection(where, timeout=5) as stranger:
        stranger.sendall(said)
        if reset:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        try:
            return stranger.recv(1)
        except ConnectionResetError:
            return b""


@ranks(2)
def test_strangers_are_hung_up_on() -> None:
    world = fd.init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callers, "PATIENCE_SECONDS", 0.3)
        real_call = connect.call_rank
        if world.rank == 1:

            def call_late(
                world: Any, rank: int, peer: dict[str, str], *others: Any, **named: Any
            ) -> socket.socket:
                where = (peer["address"], int(peer["port"]))
                with socket.create_connection(where) as silent:
                    assert call(where, b"x" * 40) == b"", "a wrong code"
                    assert call(where, struct.pack("<32sII", b"0" * 32, 1, 0)) == b""
                    code = connect.Door(b"", peer["question"]).hello(7, 0)
                    assert call(where, struct.pack("<32sII", code, 7, 0)) == b"", "no such rank"
                    assert call(where, b"GET /", reset=True) == b""
                    assert silent.recv(1) == b""
                return real_call(world, rank, peer, *others, **named)

            patch.setattr(connect, "call_rank", call_late)
        transport = open_transport()
    mine = torch.full((3,), float(world.rank))
    assert transport.start(Message(mine, "all_gather"), 1, everyone()).wait()[:, 0].tolist() == [0.0, 1.0]
    meet()
    transport.close()


@pytest.mark.full("further")
@ranks(2)
def test_callers_that_say_nothing_delay_nobody() -> None:
    world = fd.init()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(callers, "PATIENCE_SECONDS", 20.0)
        patch.setattr(callers, "MOST_CALLERS", 100)
        real_call = connect.call_rank
        if world.rank == 1:

            def call_after_150(world: Any, rank: int, peer: Any, *others: Any, **named: Any) -> socket.socket:
                for _ in range(150):
                    stack.enter_context(socket.create_connection((peer["address"], int(peer["port"])), 10))
                return real_call(world, rank, peer, *others, **named)

            patch.setattr(connect, "call_rank", call_after_150)
        transport = open_transport(15.0)  # less than one of them alone would be listened to
    meet()
    transport.close()


@pytest.mark.full("further")
@ranks(2, FARANDOLE_SECRET="of this job")
def test_who_reads_the_store_cannot_connect_in_a_ranks_place() -> None:
    world = fd.init()
    with pytest.MonkeyPatch.context() as patch:
        real_call = connect.call_rank
        if world.rank == 1:

            def call_late(world: Any, rank: int, peer: Any, *others: Any, **named: Any) -> socket.socket:
                assert world.store is not None
                in_store = b"".join(world.store.get(key.partition("/")[2].partition("/")[2])
                                    for key in stored_keys() if "connecting ranks" in key)  # fmt: skip
                assert peer["question"].encode() in in_store
                assert b"of this job" not in in_store
                where = (peer["address"], int(peer["port"]))
                for guess in (b"", peer["question"].encode(), peer["fingerprint"].encode()):
                    code = connect.Door(guess, peer["question"]).hello(1, 0)
                    assert call(where, struct.pack("<32sII", code, 1, 0)) == b""
                return real_call(world, rank, peer, *others, **named)

            patch.setattr(connect, "call_rank", call_late)
        transport = open_transport()
    meet()
    transport.close()


def stored_keys() -> list[str]:
    (store,) = rendezvous._met.stores.values()
    assert isinstance(store, dist.TCPStore)
    keys: list[str] = store.list_keys()
    return keys


@ranks(2)
def test_ranks_with_different_secrets_are_told_so() -> None:
    world = fd.init()
    os.environ["FARANDOLE_SECRET"] = f"of rank {world.rank}"
    with pytest.raises(fd.Mismatch, match=r"fingerprint of the job's secret is .* the same FARANDOLE_SECRET"):
        open_transport()


@pytest.mark.full("further")
@ranks(3)
def test_a_rank_that_does_not_connect_is_named() -> None:
    world = fd.init()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 2:

            def never(*_: Any, **__: Any) -> socket.socket:
                raise TimeoutError("no way there")

            patch.setattr(connect, "_open", never)
            with pytest.raises(fd.CommError, match=r"rank 2, connecting.*cannot reach rank 0 on .*no way there"):
                open_transport(1.0)
        else:
            with pytest.raises(fd.Stalled, match="rank 2 did not connect"):
                open_transport(1.0)
    meet()


@pytest.mark.gate_cases("True")
@pytest.mark.parametrize("early", [True, False])
@ranks(2)
def test_a_frame_of_a_wrong_length_names_rank_and_bytes(early: bool) -> None:
    transport = open_transport()
    world, circle = fd.world(), everyone()
    if world.rank == 0:
        transport.start(Message(torch.zeros(3), "all_gather"), 5, circle)
        meet()
    elif early:
        transport.start(Message(torch.zeros(9), "all_gather"), 1, circle)
        transport.drain(1)
        meet()
        time.sleep(0.1)
        transport._serve(1.0)
        assert transport._early
        with pytest.raises(fd.Mismatch, match=r"rank 0 \(on .*\) sent 12 bytes where 28 were expected"):
            transport.start(Message(torch.zeros(7), "all_gather"), 5, circle)
    else:
        with pytest.raises(fd.Mismatch, match=r"rank 0 \(on .*\) sent 12 bytes where 28 were expected"):
            transport.start(Message(torch.zeros(7), "all_gather"), 5, circle).wait()
        meet()
    meet()
    transport.close()


@pytest.mark.full("further")
@ranks(3)
def test_a_rank_that_never_answers_is_named_with_its_host() -> None:
    transport = open_transport(0.5)
    world, circle = fd.world(), everyone()
    if world.rank != 1:
        begin = time.monotonic()
        with pytest.raises(fd.Stalled, match=rf"rank 1 \(on {world.host}\) sent nothing for 0.5 s"):
            transport.start(Message(torch.zeros(3), "all_gather"), 0, circle).wait()
        assert 0.4 < time.monotonic() - begin < 5
    meet()
    transport.close()


@ranks(3)
def test_a_rank_that_left_is_named_however_much_is_sent_to_it() -> None:
    transport = open_transport()
    world, circle = fd.world(), everyone()
    if world.rank == 1:
        transport.close()
        meet()
        meet()
        return
    meet()
    for tag in range(4):  # sending to it may fail at once, later, or never
        with pytest.raises(fd.PeerLost, match=rf"rank 1 \(on {world.host}\) is gone"):
            transport.start(Message(torch.zeros(3, 500_000), "all_to_all"), tag, circle).wait()
    pair = RankGroup((0, 2), world.rank)
    assert transport.start(Message(torch.full((2,), 3.0), "all_gather"), 9, pair).wait().sum() == 12
    transport.drain(10)  # the other one still waits for what is queued before it
    meet()
    transport.close()


@pytest.mark.full("further")
@ranks(3)
def test_sums_by_several_jobs_and_lanes() -> None:
    transport = open_transport(lanes=3)
    conductor = CommThread(transport)
    circle, rank = everyone(), fd.world().rank
    results: dict[tuple[int, int], torch.Tensor] = {}

    def item(job: int, index: int, count: int) -> SegmentWork:
        tensor = torch.arange(float(count)) * (rank + 1) + job
        return SegmentWork(
            lambda: reduce_scatter_all_gather(tensor, circle.seat),
            lambda result: results.__setitem__((job, index), result),
            circle,
        )

    counts = (3, 5000, 100_000, 1)
    jobs = [conductor.submit([item(job, i, count) for i, count in enumerate(counts)]) for job in range(5)]
    for job in jobs:
        job.wait()
    for (number, index), total in results.items():
        assert total.equal(torch.arange(float(counts[index])) * 6 + 3 * number)
    assert len(results) == 20
    meet()
    conductor.close()


def test_what_travels_in_one_round_is_not_the_callers_memory() -> None:
    """He may write the result into it while it still waits for a slow link."""
    tensor = torch.zeros(10)
    message = next(reduce_scatter_all_gather(tensor, GroupRank(0, 2)))
    assert message.operation == "all_gather"
    assert message.tensor.data_ptr() != tensor.data_ptr()


# -- a rank that fails and lives on ----------------------------------------------------------------


def failing(rank: int, tensor: torch.Tensor) -> Any:
    """A codec that fails on one rank between its rounds."""
    everyone_s = yield Message(tensor, "all_gather")
    if fd.world().rank == rank:
        raise ValueError("no more\npaper")
    again = yield Message(everyone_s.sum(0), "all_gather")
    return again.sum(0), tensor


@pytest.mark.gate_cases("3000000")
@pytest.mark.parametrize("count", [3, 3_000_000])
@ranks(3)
def test_a_rank_that_fails_and_lives_on_tells_the_others_why(count: int) -> None:
    """Also those that wait for something else, and with frames in both directions half sent."""
    transport = open_transport(20.0)
    conductor = CommThread(transport)
    circle, rank = everyone(), fd.world().rank
    items = [SegmentWork(lambda: failing(1, torch.ones(count)), lambda _: None, circle) for _ in range(6)]
    begin = time.monotonic()
    job = conductor.submit(items)
    error: type[Exception] = ValueError if rank == 1 else fd.PeerLost
    said = "no more" if rank == 1 else r"rank 1 \(on .*\) is gone: it failed: .*ValueError: no more paper"
    with pytest.raises(error, match=said):
        job.wait()
    with pytest.raises(error, match=said):  # and ever after
        conductor.submit(items[:1]).wait()
    assert time.monotonic() - begin < 10
    meet()  # rank 1 keeps its connections until the others were told
    conductor.close()


@pytest.mark.full("further")
@ranks(2)
def test_last_words_end_the_frame_that_was_begun() -> None:
    transport = open_transport(20.0)
    circle, rank = everyone(), fd.world().rank
    if rank == 0:
        for tag in range(3):
            transport.start(Message(torch.full((4_000_000,), float(tag)), "all_gather"), tag, circle)
        assert transport.has_more_to_send
        meet()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("farandole.comm.transport.transport._LAST_SECONDS", 10.0)
            transport.leave("ValueError: enough")
        meet("test/left")
    else:
        meet()
        first = transport.start(Message(torch.zeros(4_000_000), "all_gather"), 0, circle)
        assert first.wait()[0].eq(0).all()
        with pytest.raises(fd.PeerLost, match=r"rank 0 .*it failed: ValueError: enough"):
            transport.start(Message(torch.zeros(4_000_000), "all_gather"), 1, circle).wait()
        meet("test/left")
    meet()
    transport.close()


@pytest.mark.parametrize("posted", [True, False])
@ranks(2)
def test_a_frame_longer_than_any_message_is_refused(posted: bool) -> None:
    transport = open_transport()
    circle, rank = everyone(), fd.world().rank
    if rank == 0:
        transport._by_rank[1][0].socket.sendall(struct.pack("<QQ", 5 if posted else 6, 2**50))
    else:
        text = rf"rank 0 \(on .*\) announced {2**50} bytes, and no message has more than {2**40}; .*damaged"
        with pytest.raises(fd.Mismatch, match=text):
            transport.start(Message(torch.zeros(3), "all_gather"), 5, circle).wait()
    meet()
    transport.close()


@ranks(2)
def test_a_message_that_nobody_would_take_is_not_sent() -> None:
    transport = Transport(fd.init(), timeout_seconds=10, limit_bytes=100)
    with pytest.raises(ValueError, match="all_gather of 104 bytes for each rank: at most 100 are possible"):
        transport.start(Message(torch.zeros(26), "all_gather"), 0, everyone())
    assert transport.start(Message(torch.zeros(2, 25), "all_to_all"), 0, everyone()).wait().shape == (2, 25)
    meet()
    transport.close()


@ranks(2)
def test_a_failure_while_nothing_is_waited_for_is_told_later() -> None:
    """The thread that sends the rest meets nonsense; the next job fails instead of waiting for ever."""
    transport = open_transport(20.0)
    conductor = CommThread(transport)
    circle, rank = everyone(), fd.world().rank
    if rank == 0:
        transport._by_rank[1][0].socket.sendall(struct.pack("<QQ", 6, 2**50))
        meet()
        meet("test/over")
    else:
        meet()
        transport._by_rank[0][0]._outgoing.append(memoryview(b""))  # something to send
        with conductor._changed:
            conductor._notify()
        deadline = time.monotonic() + 10
        while conductor._broken is None and time.monotonic() < deadline:
            time.sleep(0.01)
        item = SegmentWork(lambda: reduce_scatter_all_gather(torch.ones(3), circle.seat), lambda _: None, circle)
        assert isinstance(conductor._broken, fd.Mismatch)
        with pytest.raises(fd.Mismatch, match="announced"):
            conductor.submit([item]).wait()
        meet("test/over")
    conductor.close()


@ranks(4)
def test_sums_by_doubling_over_connections() -> None:
    """Among four ranks, and among three of them, in the tags of several jobs."""
    transport = open_transport()
    conductor = CommThread(transport)
    conductor.transport.sum_by = recursive_doubling
    rank = fd.world().rank
    landed: dict[tuple[int, int], torch.Tensor] = {}

    def item(job: int, circle: RankGroup) -> SegmentWork:
        def begin() -> Reduction:
            total = yield Message(torch.arange(1000.0) * (rank + 1) + job, "all_reduce")
            twice = yield Message(total, "all_reduce")
            return twice

        return SegmentWork(begin, lambda result: landed.__setitem__((job, len(circle.ranks)), result), circle)

    circles = [everyone()] + ([RankGroup((0, 1, 3), rank)] if rank != 2 else [])
    jobs = [conductor.submit([item(job, circle) for circle in circles]) for job in range(4)]
    for job in jobs:
        job.wait()
    for (number, size), twice in landed.items():
        weights = 10 if size == 4 else 7
        assert twice.equal(size * (weights * torch.arange(1000.0) + size * number))
    assert len(landed) == 4 * len(circles)
    meet()
    conductor.close()


@pytest.mark.full("further")
@ranks(2)
def test_two_connections_are_taken_only_when_they_are_faster() -> None:
    """By what all ranks measured: the choice is the same on all, also when only one found its link slow."""
    transport = open_transport(lanes=2)
    rank = fd.world().rank
    start = transport.start

    for slow, expected in ((1, 2), (2, 1)):

        def start_late(message: Message, tag: int, circle: RankGroup, slow: int = slow) -> Any:
            if rank == 1 and transport.used_lanes == slow and message.operation == "all_to_all":
                time.sleep(0.02)
            return start(message, tag, circle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "start", start_late)
            assert choose_connection_count(transport, everyone(), everyone(), 100_000, (1, 2)) == expected
        meet()
    transport.close()


@pytest.mark.full("further")
@ranks(2)
def test_messages_take_the_used_connections_in_turns() -> None:
    transport = open_transport(lanes=2)
    circle, other = everyone(), 1 - fd.world().rank
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        pump = transport._pump_out

        def note(lane: Any) -> None:
            sent.append(transport._by_rank[other].index(lane))
            pump(lane)

        patch.setattr(transport, "_pump_out", note)
        for used in (1, 2):
            transport.used_lanes = used
            for tag in (0, 1, 8, 9):  # two rounds of two items
                transport.start(Message(torch.ones(2), "all_gather"), 100 * used * 8 + tag, circle).wait()
    assert sent == [0, 0, 0, 0, 0, 1, 1, 0]
    meet()
    transport.close()
