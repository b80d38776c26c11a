"""Two transports over one connection in this process: lengths, bytes, order, owners and ends."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from farandole.comm.messages import Message, Reduction
from farandole.comm.transport import comm_thread
from farandole.comm.transport.comm_thread import CommThread, SegmentWork
from farandole.comm.transport.rank_group import PieceExchange, RankGroup
from farandole.comm.transport.transport import LEAST_LIMIT_BYTES, Peers, Transport, limit_for
from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import Mismatch, PeerLost, Stalled
from tests.unit.comm.test_comm_thread import WORLD, in_thread

HEADER = struct.Struct("<QQ")
HERE, THERE = RankGroup((0, 1), 0), RankGroup((0, 1), 1)


def make(rank: int, end: socket.socket, timeout_seconds: float, limit_bytes: int = 1 << 20) -> Transport:
    end.setblocking(False)
    connections: list[list[socket.socket]] = [[], []]
    connections[1 - rank] = [end]
    world = cast("World", SimpleNamespace(rank=rank, **WORLD))
    made = Transport(world, timeout_seconds=timeout_seconds, made=connections, limit_bytes=limit_bytes)
    made.peers = Peers(rank, ["here", "there"])
    return made


@pytest.fixture
def pair() -> Iterator[tuple[Transport, Transport]]:
    transports = [make(rank, end, 20.0) for rank, end in enumerate(socket.socketpair())]
    yield transports[0], transports[1]
    for transport in transports:
        transport.close()


@pytest.fixture
def alone() -> Iterator[tuple[Transport, socket.socket]]:
    """Rank 0's transport, and rank 1's end of the connection: who waits for it gives up after 0.2 s."""
    mine, other = socket.socketpair()
    other.settimeout(10)
    transport = make(0, mine, 0.2, limit_bytes=1000)
    yield transport, other
    transport.close()
    other.close()


def floats(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float32)


def test_pieces_of_any_length_and_their_bytes(pair: tuple[Transport, Transport]) -> None:
    room = [floats(3, 0.0), floats(0)]
    flights = [
        pair[0].start_parts(PieceExchange([floats(9), floats(0)], [floats(9, 0.0), room[0]]), 8, HERE),
        pair[1].start_parts(PieceExchange([floats(3, 7.0), floats(5)], [room[1], floats(5, 0.0)]), 8, THERE),
    ]
    for flight in flights:
        assert flight.wait().numel() == 0
    assert torch.equal(room[0], floats(3, 7.0))
    assert [flight.sent_bytes for flight in flights] == [0, 12], "of an empty one, or to itself, nothing is sent"
    assert pair[0].moved_bytes == HEADER.size + 12
    assert not pair[0].serve_now()


def test_bytes_of_messages_and_what_an_empty_one_costs(pair: tuple[Transport, Transport]) -> None:
    for transport, circle in zip(pair, (HERE, THERE), strict=True):
        flight = transport.start(Message(floats(0), "all_gather"), 1, circle)
        assert (flight.wait().shape, flight.sent_bytes, transport.moved_bytes) == ((2, 0), 0, 0)
    flights = [
        transport.start(Message(floats(6).view(2, 3), "all_to_all"), 2, circle)
        for transport, circle in zip(pair, (HERE, THERE), strict=True)
    ]
    assert [flight.sent_bytes for flight in flights] == [12, 12]
    assert all(torch.equal(flight.wait(), floats(6).view(2, 3)) for flight in flights)


def test_all_frames_that_are_there_are_taken_at_once(alone: tuple[Transport, socket.socket]) -> None:
    transport, other = alone
    other.sendall(HEADER.pack(8, 4) + floats(1, 8.0).numpy().tobytes() + HEADER.pack(9, 0))
    assert transport.serve_now()
    assert transport.moved_bytes == 2 * HEADER.size + 4
    assert torch.equal(
        transport.start(Message(floats(1), "all_gather"), 8, HERE).wait(), torch.tensor([[1.0], [8.0]])
    )


@pytest.mark.parametrize("length", [16, 12])
def test_a_frame_that_is_waited_for_only_while_it_comes(
    length: int, alone: tuple[Transport, socket.socket]
) -> None:
    transport, other = alone
    said = floats(4, 3.0).numpy().tobytes()[:length]
    other.sendall(HEADER.pack(8, length) + said[:5])
    assert transport.serve_now()
    assert not transport.serve_now(), "nothing more is there"
    flight = transport.start(Message(floats(4), "all_gather"), 8, HERE)
    other.sendall(said[5:])
    if length == 16:
        assert torch.equal(flight.wait(), torch.stack([floats(4), floats(4, 3.0)]))
        return
    with pytest.raises(Mismatch, match=r"rank 1 \(on there\) sent 12 bytes where 16 were expected"):
        flight.wait()


@pytest.mark.full("further")
def test_a_rank_that_sends_nothing_is_waited_for_as_long_as_said(alone: tuple[Transport, socket.socket]) -> None:
    transport, other = alone
    flight = transport.start(Message(floats(4), "all_gather"), 8, HERE)
    parts = HEADER.pack(8, 16) + floats(4).numpy().tobytes()

    def speak() -> None:
        for i in range(0, len(parts), 4):
            time.sleep(0.1)  # each time less than it is waited, all together longer
            other.sendall(parts[i : i + 4])

    speaker = threading.Thread(target=speak)
    speaker.start()
    transport.timeout_seconds = 5.0
    assert torch.equal(flight.wait(), torch.ones(2, 4))
    speaker.join()
    transport.timeout_seconds = 0.2
    began = time.monotonic()
    with pytest.raises(Stalled, match=r"rank 1 \(on there\) sent nothing for 0.2 s"):
        transport.start(Message(floats(4), "all_gather"), 16, HERE).wait()
    assert time.monotonic() - began >= 0.2


def test_the_last_words_are_as_long_as_they_may_be(pair: tuple[Transport, Transport]) -> None:
    flight = pair[1].start(Message(floats(4), "all_gather"), 8, THERE)
    reason = "x" * 5000
    pair[0].leave(reason)
    with pytest.raises(PeerLost) as caught:
        flight.wait()
    assert f"it failed: {'x' * 4096}" in str(caught.value)
    assert "x" * 4097 not in str(caught.value)


@pytest.mark.parametrize(("length", "fits"), [(1000, True), (1001, False)])
def test_frames_have_a_limit(length: int, fits: bool, alone: tuple[Transport, socket.socket]) -> None:
    transport, other = alone
    other.sendall(HEADER.pack(8, length) + b"x")
    if fits:
        assert transport.serve_now()
    else:
        with pytest.raises(Mismatch, match="announced 1001 bytes, and no message has more than 1000"):
            transport.serve_now()
    row = torch.zeros(length, dtype=torch.uint8)
    message = Message(torch.stack([row, row]), "all_to_all")
    if fits:
        transport.start(message, 16, HERE)
        assert other.recv(4000)[:16] == HEADER.pack(16, 1000)
    else:
        with pytest.raises(ValueError, match="all_to_all of 1001 bytes for each rank: at most 1000 are possible"):
            transport.start(message, 16, HERE)


def test_the_limit_is_several_times_the_parameters() -> None:
    assert limit_for(1) == LEAST_LIMIT_BYTES
    assert 2 * LEAST_LIMIT_BYTES < limit_for(LEAST_LIMIT_BYTES) < 100 * LEAST_LIMIT_BYTES


def full(transport: Transport, other: socket.socket) -> None:
    """Send more than the kernel takes."""
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    transport._limit_bytes = 1 << 30
    transport.start(Message(torch.zeros(1 << 22, dtype=torch.uint8), "all_gather"), 24, HERE)
    assert transport.has_more_to_send


def test_draining_ends_in_time_or_when_woken(alone: tuple[Transport, socket.socket]) -> None:
    transport, other = alone
    full(transport, other)
    began = time.monotonic()
    transport.drain(0.2)
    assert time.monotonic() - began >= 0.2
    transport.wake()
    transport.drain(60.0)
    assert transport.has_more_to_send, "woken before all was sent"
    assert transport.serve_now(), "more is to be sent"
    received = bytearray()
    reader = threading.Thread(target=lambda: read_until(other, received, HEADER.size + (1 << 22)))
    reader.start()
    transport.drain(30.0)
    reader.join()
    assert not any(lane.has_more_to_send for lane in transport._lanes.values())
    assert received[HEADER.size :] == bytes(1 << 22)


def read_until(other: socket.socket, received: bytearray, count: int) -> None:
    while len(received) < count and (part := other.recv(1 << 20)):
        received += part


def test_a_job_is_sent_before_its_end_waits_for_others(
    alone: tuple[Transport, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ranks that take nothing of it are an error, for whoever waits."""
    monkeypatch.setattr("farandole.comm.transport.transport._LAST_SECONDS", 0.1)
    monkeypatch.setattr(comm_thread, "_LEAVE_SECONDS", 1.0)
    transport, other = alone
    thread = CommThread(transport)
    began = time.monotonic()

    def fill(mine: Transport) -> None:
        full(mine, other)

    thread.run(fill)
    with pytest.raises(Stalled, match=r"some ranks took nothing of what was sent to them for 0.2 s"):
        thread.run(lambda _: None)
    assert time.monotonic() - began >= 0.2
    with pytest.raises(Stalled):
        thread.submit([]).wait()
    transport.abort()
    thread.close()


@pytest.mark.full("further")
def test_ranks_that_take_nothing_for_a_while_are_waited_for(alone: tuple[Transport, socket.socket]) -> None:
    transport, other = alone
    transport.timeout_seconds = 30.0
    thread = CommThread(transport)
    thread.run(lambda mine: full(mine, other))
    received = bytearray()
    reader = threading.Timer(1.3, lambda: read_until(other, received, HEADER.size + (1 << 22)))
    reader.start()
    thread.run(lambda _: None)  # not before all is sent
    reader.join()
    assert len(received) == HEADER.size + (1 << 22)
    thread.close()


def test_only_its_thread_moves_messages(pair: tuple[Transport, Transport]) -> None:
    thread = CommThread(pair[0])
    assert thread.has_transport
    assert not thread.serve_now(), "this is another thread: nothing is done"
    problem = in_thread(pair[0].serve_now, "another")
    assert isinstance(problem, AssertionError)
    flight = pair[1].start(Message(floats(4, 5.0), "all_gather"), 8, THERE)
    seen = thread.run(lambda _: [thread.serve_now() for _ in range(2)])
    assert seen == [True, False], "a frame was there, then nothing more"
    assert torch.equal(
        thread.run(lambda t: t.start(Message(floats(4), "all_gather"), 8, HERE).wait())[1], floats(4, 5.0)
    )
    flight.wait()
    thread.close()
    without = CommThread(None)
    assert not without.has_transport
    assert not without.serve_now()
    without.close()


def test_what_was_begun_is_sent_before_a_close(alone: tuple[Transport, socket.socket]) -> None:
    transport, other = alone
    thread = CommThread(transport)
    thread.run(lambda mine: full(mine, other))
    received = bytearray()
    reader = threading.Thread(target=lambda: read_until(other, received, 1 << 30))
    reader.start()
    thread.close()
    reader.join(20)
    assert len(received) == HEADER.size + (1 << 22)


def test_a_resting_thread_goes_on_sending_and_hears_of_new_jobs_at_once(
    alone: tuple[Transport, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, other = alone
    transport.timeout_seconds = 30.0
    thread = CommThread(transport)
    thread.run(lambda mine: full(mine, other))
    until = time.monotonic() + 10
    while not thread._sending and time.monotonic() < until:
        time.sleep(0.01)
    began = time.monotonic()
    thread.submit([]).wait()
    assert time.monotonic() - began < 10, "it was woken from sending"
    received = bytearray()
    read_until(other, received, HEADER.size + (1 << 22))
    assert len(received) == HEADER.size + (1 << 22), "nobody asked for it"
    monkeypatch.setattr(comm_thread, "_LEAVE_SECONDS", 1.0)
    thread.close()


def summing(value: float, results: list[float], circle: RankGroup) -> SegmentWork:
    def begin() -> Reduction:
        total = yield Message(floats(3, value), "all_reduce")
        again = yield Message(total, "all_gather")
        return again.sum(0)

    return SegmentWork(begin, lambda result: results.append(float(result[0])), circle)


def test_many_items_and_jobs_by_number(
    pair: tuple[Transport, Transport], caplog: pytest.LogCaptureFixture
) -> None:
    """More items than are in flight at once; two ranks of which one did other jobs before."""
    threads = [CommThread(transport) for transport in pair]
    began = time.monotonic()
    threads[0].submit([]).wait()
    results: list[list[float]] = [[], []]
    jobs = [
        thread.submit([summing(value, results[rank], circle) for value in range(10)], number=5 + number)
        for rank, (thread, circle) in enumerate(zip(threads, (HERE, THERE), strict=True))
        for number in range(2)
    ]
    for job in jobs:
        job.wait()
        assert (job.rounds, job.sent_bytes) == (2, 10 * 24)
        assert began <= job.begin_seconds <= job.end_seconds
        assert 0 <= job.wait_seconds <= job.end_seconds - job.begin_seconds
        assert job.codec_seconds > 0
    assert results == [[4.0 * value for value in range(10)] * 2] * 2, "in order"
    with pytest.raises(ZeroDivisionError):
        threads[0].run(lambda _: 1 // 0)
    assert caplog.records == [], "there is nobody to tell"
    for thread in threads:
        thread.close()


def test_later_jobs_are_begun_while_the_first_one_waits(alone: tuple[Transport, socket.socket]) -> None:
    transport, other = alone
    transport.timeout_seconds = 20.0
    thread = CommThread(transport)
    results: list[float] = []
    jobs = [thread.submit([summing(1.0, results, HERE)]) for _ in range(6)]
    received = bytearray()
    read_until(other, received, 4 * (HEADER.size + 12))
    assert len({HEADER.unpack(received[at : at + 16])[0] for at in range(0, len(received), 28)}) == 4
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)  # and no more than four at a time
    other.close()
    for job in jobs:
        with pytest.raises(PeerLost):
            job.wait()
    thread.close()


LAST = 2**64 - 1


@pytest.mark.parametrize("first", ["ValueError: a cause", "PeerLost: of another"])
def test_the_rank_that_failed_by_itself_is_named_before_those_that_lost_another(first: str) -> None:
    ends = [socket.socketpair() for _ in range(2)]
    for mine, _ in ends:
        mine.setblocking(False)
    world = cast("World", SimpleNamespace(rank=0, **{**WORLD, "size": 3}))
    transport = Transport(world, timeout_seconds=5.0, made=[[], [ends[0][0]], [ends[1][0]]])
    transport.peers = Peers(transport.rank, ["a", "b", "c"])
    for (_, other), words in zip(ends, (b"PeerLost: rank 2 is gone", first.encode()), strict=True):
        other.sendall(HEADER.pack(LAST, len(words)) + words)
    flight = transport.start(Message(floats(1), "all_gather"), 8, RankGroup((0, 1, 2), 0))
    transport.serve_now()
    cause = "rank 2 .on c. is gone: it failed: ValueError" if "Value" in first else "rank 1 .on b. is gone"
    with pytest.raises(PeerLost, match=cause):
        flight.wait()
    transport.close()
    for _, other in ends:
        other.close()


def test_a_job_has_only_so_many_items(pair: tuple[Transport, Transport]) -> None:
    thread = CommThread(pair[0])
    with pytest.raises(ValueError, match="a job of 1025 items, at most 1024 are possible"):
        thread.submit([cast("comm_thread.SegmentWork", None)] * 1025)
    thread.submit([]).wait()
    thread.close()
