"""Messages of a device through CPU memory, where copies arrive when the test says so: no processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from farandole.comm.messages import Message
from farandole.comm.transport import staged_conductor
from farandole.comm.transport.comm_thread import SegmentWork
from farandole.comm.transport.rank_group import RankGroup
from farandole.comm.transport.staged_conductor import StagedConductor, StagedTransport
from farandole.comm.transport.transport import Peers
from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import PeerLost, Stalled
from tests.unit.comm.test_comm_thread import WORLD

HERE, THERE = RankGroup((0, 1), 0), RankGroup((0, 1), 1)
_CPU = torch.device("cpu")


class Streams:
    """One device: events are passed, and copies arrive, once `passed` says so."""

    current, side = "main", "side"

    def __init__(self) -> None:
        self.looks = 0
        self.passed: Callable[[], bool] = lambda: True
        self.waits: list[object] = []

    @contextmanager
    def on(self, stream: str) -> Generator[None, None, None]:
        yield

    def record(self) -> object:
        return object()

    def wait(self, event: object) -> None:
        self.waits.append(event)

    def has_passed(self, event: object) -> bool:
        return self.passed()

    def to_host(self, tensor: torch.Tensor) -> Any:
        streams = self

        class Copy:
            @property
            def has_arrived(self) -> bool:
                streams.looks += 1
                return streams.passed()

            def read(self) -> torch.Tensor:
                return tensor.clone()

        return Copy()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


def make(rank: int, end: socket.socket, streams: Streams, timeout_seconds: float) -> StagedTransport:
    end.setblocking(False)
    connections: list[list[socket.socket]] = [[], []]
    connections[1 - rank] = [end]
    world = cast("World", SimpleNamespace(rank=rank, **WORLD))
    made = StagedTransport(
        world, streams=cast("Any", streams), timeout_seconds=timeout_seconds, made=connections, limit_bytes=1 << 20
    )
    made.peers = Peers(rank, ["here", "there"])
    return made


@pytest.fixture
def alone() -> Iterator[tuple[StagedTransport, Streams, socket.socket]]:
    """Rank 0's transport and device, and rank 1's end of the connection: who waits gives up after 0.3 s."""
    mine, other = socket.socketpair()
    streams = Streams()
    transport = make(0, mine, streams, 0.3)
    yield transport, streams, other
    transport.close()
    other.close()


def floats(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float32)


def test_a_message_leaves_when_its_copy_has_arrived(alone: tuple[StagedTransport, Streams, socket.socket]) -> None:
    transport, streams, other = alone
    streams.passed = lambda: streams.looks > 5
    flight = transport.start(Message(floats(3, 7.0), "all_gather"), 1, HERE)
    assert streams.looks == 6
    assert flight.sent_bytes == 12
    assert other.recv(100)[-12:] == floats(3, 7.0).numpy().tobytes()


def test_a_device_that_does_not_come_to_a_message_is_named(
    alone: tuple[StagedTransport, Streams, socket.socket],
) -> None:
    transport, streams, _ = alone
    streams.passed = lambda: False
    with pytest.raises(Stalled, match=r"the device did not come to a message for 0\.3 s"):
        transport.start(Message(floats(3), "all_gather"), 1, HERE)
    assert streams.looks < 0.3 / staged_conductor._PAUSE_SECONDS + 10, "it sleeps between two looks"


def test_a_rank_that_is_gone_ends_the_wait_for_the_device() -> None:
    """Which waits for it as well, in a collective of the backend."""
    mine, other = socket.socketpair()
    streams = Streams()
    transport = make(0, mine, streams, 60.0)
    streams.passed = lambda: False
    other.close()
    with pytest.raises(PeerLost, match="rank 1"):
        transport.start(Message(floats(3), "all_gather"), 1, HERE)
    transport.close()


def test_items_of_a_later_bucket_begin_only_when_the_device_is_there() -> None:
    ends = socket.socketpair()
    streams = Streams()
    conductor = StagedConductor(
        cast("Any", streams), make(0, ends[0], streams, 20.0), device=_CPU, everyone=HERE, sums=None
    )
    begun: list[str] = []

    def talk(name: str) -> Generator[Message, torch.Tensor, None]:
        begun.append(name)
        yield Message(floats(1), "all_gather")

    streams.has_passed = lambda event: False  # type: ignore[method-assign]
    works = [
        conductor.submit([SegmentWork(lambda name=name: talk(name), lambda _: None, HERE)], lambda: None)  # type: ignore[misc]
        for name in ("first", "second")
    ]
    deadline = time.monotonic() + 10
    while not begun and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert begun == ["first"]
    ends[1].close()  # the first ends, and with it the conductor
    for work in works:
        with pytest.raises(PeerLost):
            work.wait()
    assert begun == ["first"]
    conductor.close()


def test_a_device_that_cannot_be_set_fails_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.device) -> NoReturn:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(staged_conductor, "set_device", refuse)
    ends = socket.socketpair()
    streams = Streams()
    conductor = StagedConductor(
        cast("Any", streams), make(0, ends[0], streams, 20.0), device=_CPU, everyone=HERE, sums=None
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            conductor.all_reduce(floats(8)).wait()
    conductor.close()
    ends[1].close()


def test_sums_go_by_the_backend_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the thread that trains: a codec's bytes alone go through CPU memory."""
    ends = socket.socketpair()
    streams, summed = Streams(), list[tuple[torch.Tensor, object]]()
    group: Any = object()
    monkeypatch.setattr(
        "farandole.comm.transport.staged_conductor.all_reduce", lambda *arguments: summed.append(arguments)
    )
    conductor = StagedConductor(
        cast("Any", streams), make(0, ends[0], streams, 20.0), device=_CPU, everyone=HERE, sums=group
    )
    tensor = floats(8)
    conductor.all_reduce(tensor).wait()
    assert summed == [(tensor, group)]
    conductor.close()
    ends[1].close()
