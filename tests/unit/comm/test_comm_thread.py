"""Who waits is woken whatever fails, one thread alone uses a transport, and a frame may be empty: no processes."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from farandole.comm.messages import Message
from farandole.comm.transport.comm_thread import BucketWork, CommThread
from farandole.comm.transport.connect import Connection
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.transport import Peers, Transport
from farandole.comm.world.world import World

WAIT_SECONDS = 20.0
WORLD = {
    "size": 2,
    "host": "here",
    "store": None,
    "in_forked_child": False,
    "sockets": SimpleNamespace(shut_down=False),
}


@pytest.fixture
def pair() -> Iterator[tuple[Transport, Transport]]:
    """The transports of two ranks over one connection, in this process."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    made = []
    for rank, end in enumerate(ends):
        world = cast("World", SimpleNamespace(rank=rank, **WORLD))
        connections: list[list[socket.socket]] = [[], []]
        connections[1 - rank] = [end]
        transport = Transport(world, timeout_seconds=WAIT_SECONDS, made=connections)
        transport.peers = Peers(rank, ["here", "here"])
        made.append(transport)
    yield made[0], made[1]
    for transport in made:
        transport.close()


def in_thread(call: Callable[[], object], name: str) -> BaseException | None:
    """Return what `call` raises in a thread of that name."""
    problems: list[BaseException] = []

    def guarded() -> None:
        try:
            call()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=guarded, name=name)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    return problems[0] if problems else None


def ended(job: BucketWork) -> BaseException | None:
    assert job._done.wait(WAIT_SECONDS), "whoever waits is woken"
    return job._error


def raising(problem: BaseException) -> Callable[..., object]:
    def raise_it(*_: object) -> object:
        raise problem

    return raise_it


def test_whoever_waits_is_woken_when_those_who_are_told_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    conductor = CommThread(None, on_failure=raising(KeyError("the owner")))
    with caplog.at_level(logging.ERROR, "farandole"):
        first = conductor.submit([], prepare=raising(ValueError("first")), failed=raising(OSError("the hub")))
        later = conductor.submit([], failed=raising(SystemExit(1)))
        assert str(ended(first)) == "first"
        assert str(ended(later)) == "first", "and ever after"
        assert conductor._thread.is_alive()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError, OSError, SystemExit]
    conductor.close()


def test_a_job_for_a_conductor_that_has_ended_fails_at_once() -> None:
    conductor = CommThread(None)
    conductor.close()
    with pytest.raises(RuntimeError, match="the conductor was closed"):
        conductor.submit([]).wait()


def test_a_transport_belongs_to_one_thread(pair: tuple[Transport, Transport]) -> None:
    mine, _ = pair
    circle = RankGroup((0, 1), 0)
    message = Message(torch.ones(3, dtype=torch.float32), "all_gather")
    flight = mine.start(message, 1, circle)  # this thread is the first
    text = "the thread 'another' uses a transport that belongs to 'MainThread'"
    for use in (
        lambda: mine.start(message, 2, circle),
        flight.wait,
        lambda: mine.drain(1),
        lambda: mine.leave(""),
    ):
        problem = in_thread(use, "another")
        assert isinstance(problem, AssertionError)
        assert text in str(problem)
    assert in_thread(mine.wake, "another") is None


def test_a_conductors_transport_is_for_its_thread_alone(pair: tuple[Transport, Transport]) -> None:
    mine, _ = pair
    conductor = CommThread(mine)
    message = Message(torch.ones(3, dtype=torch.float32), "all_gather")
    with pytest.raises(
        AssertionError, match=r"'MainThread' uses a transport that belongs to 'farandole-conductor'"
    ):
        conductor.transport.start(message, 1, RankGroup((0, 1), 0))
    assert conductor.run(lambda transport: (transport is mine, threading.current_thread())) == (
        True,
        conductor._thread,
    )
    conductor.close()


def test_a_conductor_that_waits_for_nobody_can_be_closed(
    pair: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread leaves the connections before they are closed: their numbers are somebody else's then."""
    monkeypatch.setattr("farandole.comm.transport.comm_thread._LEAVE_SECONDS", 0.2)
    mine, _ = pair
    conductor = CommThread(mine)
    message = Message(torch.ones(3, dtype=torch.float32), "all_gather")
    begun = threading.Event()

    def wait_for_ever(transport: Transport) -> None:
        begun.set()
        transport.start(message, 1, RankGroup((0, 1), 0)).wait()

    problems: list[BaseException | None] = []
    caller = threading.Thread(
        target=lambda: problems.append(in_thread(lambda: conductor.run(wait_for_ever), "caller"))
    )
    caller.start()
    assert begun.wait(WAIT_SECONDS)
    conductor.close()
    caller.join(WAIT_SECONDS)
    assert not conductor._thread.is_alive()
    assert "gone" in str(problems[0])


def test_an_empty_frame_is_a_frame() -> None:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    there, here = Connection(1, ends[0]), Connection(0, ends[1])
    frames = [(1, b""), (2, b"two"), (3, b""), (4, b"")]
    for tag, content in frames:
        there.queue(tag, memoryview(content))
    there.send_what_fits()
    assert not there.has_more_to_send
    seen: list[tuple[int, bytes]] = []

    def keep(frame: memoryview) -> bool:
        seen.append((here.tag, bytes(frame)))
        return True

    here.receive_what_is_there(lambda length: memoryview(bytearray(length)), keep)
    assert seen == frames
    ends[0].close()
    with pytest.raises(ConnectionResetError, match="it closed its connection"):
        here.receive_what_is_there(lambda length: memoryview(bytearray(length)), keep)
    ends[1].close()
