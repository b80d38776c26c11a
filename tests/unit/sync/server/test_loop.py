"""The loop of a server in a thread of this process: who gets in, and what a snapshot is said to have."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.comm.transport import connect
from farandole.core.vocabulary.errors import PeerLost
from farandole.sync.server.channel import ServerMessage
from farandole.sync.server.client import ServerClient, ServerPlace, wait_for
from farandole.sync.server.loop import Limits, ServerLoop, ServiceHost, SnapshotWriter, read_snapshot
from tests.unit.sync.server.ledger import Ledger

KEY, ELEMENTS = bytes(range(32)), 2


class Gate(SnapshotWriter):
    """Says that a snapshot is on the disk when it may."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.may_end, self.begun = threading.Event(), 0
        self.may_end.set()

    def begin(self, messages: Sequence[ServerMessage], lasts: dict[int, int]) -> None:
        self.begun += 1
        super().begin(messages, lasts)

    def ended(self, *, wait: bool = False) -> dict[int, int] | None:
        return super().ended(wait=wait) if self.may_end.is_set() else None


class Served:
    """A server of two clients in a thread."""

    def __init__(self, directory: Path, *, snapshot_seconds: float = 0.0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.writer, self.directory = Gate(directory), directory
        limits = Limits(snapshot_seconds, 0.3, 20.0, 1 << 20)
        self.host = ServiceHost({"ledger": Ledger({"elements": ELEMENTS})}, {0, 1})
        self.loop = ServerLoop(self.host, listener, key=KEY, generation=4, limits=limits, writer=self.writer)
        self.place = ServerPlace(
            0, "there", "127.0.0.1", str(directory), [0, 1], {}, limits, 4, listener.getsockname()[1]
        )
        self.listener = listener
        self.clients: list[ServerClient] = []
        self.thread = threading.Thread(target=self.loop.run, args=(lambda: None,), daemon=True)
        self.thread.start()

    def call(self, client: int, generation: int = 4, most_kept_bytes: int = 1 << 20) -> ServerClient:
        place = ServerPlace.from_json({**self.place.to_json(), "generation": generation})
        made = ServerClient(
            place, KEY, client=client, rank=client, host="here", most_kept_bytes=most_kept_bytes,
            most_bytes=1 << 20,
        )  # fmt: skip
        self.clients.append(made)
        return made

    def close(self) -> None:
        self.writer.may_end.set()
        for each in self.clients:
            each.close()
        self.host.expected.clear()
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.writer.close()
        self.listener.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    try:
        yield made
    finally:
        made.close()


def until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def add(client: ServerClient, entry: int) -> None:
    client.call("ledger", {"do": "add", "entry": entry}, [torch.ones(ELEMENTS).double()], keeps=True)


def ask_for_a_snapshot(client: ServerClient) -> None:
    client.ask("", {"do": "snapshot"}, keeps=False)
    client.move()


def entries_on_disk(served: Served) -> list[list[int]]:
    saved = read_snapshot(served.directory)
    found: list[list[int]] = saved[1].values["entries"] if saved else []
    return found


def test_a_snapshot_is_said_to_have_what_it_has_and_no_more(served: Served) -> None:
    first, second = served.call(0), served.call(1)
    add(first, 1)
    served.writer.may_end.clear()
    ask_for_a_snapshot(second)
    until(lambda: served.writer.begun == 1)
    add(first, 2)  # the one that is being written has not this
    ask_for_a_snapshot(first)
    until(lambda: len(served.loop._wants_snapshot) == 2)
    served.writer.may_end.set()
    wait_for([second])
    wait_for([first])
    assert served.writer.begun == 2
    assert entries_on_disk(served) == [[0, 1], [0, 2]]
    assert not first._kept
    add(first, 3)
    served.writer.may_end.clear()
    ask_for_a_snapshot(second)
    until(lambda: served.writer.begun == 3)
    add(first, 4)
    served.writer.may_end.set()
    wait_for([second])
    add(first, 5)
    kept = [request.values["values"]["entry"] for _, request in first._kept]
    assert kept == [4, 5], "these are in no snapshot"


def test_what_a_rank_keeps_is_bounded(served: Served) -> None:
    first = served.call(0, most_kept_bytes=100)
    for entry in range(40):
        add(first, entry)
        assert first._kept_bytes <= 100 + 16 * ELEMENTS
    assert 0 < served.writer.begun < 30


def test_a_snapshot_is_written_before_a_rank_has_to_wait_for_one(served: Served) -> None:
    first = served.call(0, most_kept_bytes=16 * 8 * ELEMENTS)
    for entry in range(14):  # half of what may be kept, and some
        add(first, entry)
    until(lambda: served.writer.begun)
    assert len(first._kept) <= 16


def test_a_snapshot_is_written_when_it_is_due(tmp_path: Path) -> None:
    served = Served(tmp_path, snapshot_seconds=0.05)
    try:
        first = served.call(0)
        time.sleep(0.3)
        assert not served.writer.begun, "nothing has changed"
        add(first, 1)
        until(lambda: entries_on_disk(served) == [[0, 1]])
    finally:
        served.close()


def test_what_a_client_sent_that_does_not_come_back_is_saved_at_once(served: Served) -> None:
    first, second = served.call(0), served.call(1)
    add(second, 7)
    second.close()
    until(lambda: served.host.expected == {0})
    until(lambda: entries_on_disk(served) == [[1, 7]])
    add(first, 8)


def test_a_client_of_another_generation_is_refused_and_a_second_connection_takes_the_place_of_the_first(
    served: Served,
) -> None:
    first, _ = served.call(0), served.call(1)
    with pytest.raises(PeerLost, match="it is of generation 3 of the ranks, and the server of 4"):
        served.call(0, generation=3)
    add(first, 1)
    old = served.loop._channels[0]
    second = served.call(0)
    assert served.loop._channels[0] is not old
    assert old.socket.fileno() == -1, "it is closed"
    second._number = 1
    add(second, 2)


def test_strangers_that_say_nothing_are_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "PATIENCE_SECONDS", 0.3)
    served.loop._callers._most = 2
    first, _ = served.call(0), served.call(1)
    strangers = [socket.create_connection(("127.0.0.1", served.place.port), 5) for _ in range(3)]
    try:
        begin = time.monotonic()
        for each in strangers:
            each.settimeout(5)
            assert len(each.recv(64)) == 32
            assert len(served.loop._callers._pending) <= 2
        for each in strangers:
            assert each.recv(64) == b""
        assert time.monotonic() - begin < 4
    finally:
        for each in strangers:
            each.close()
    add(first, 1)


def test_a_snapshot_that_cannot_be_written_is_an_alarm_once_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, blocked, said = Served(tmp_path, snapshot_seconds=0.05), tmp_path / "snapshot.new", ""

    def alarms(first: ServerClient) -> int:
        nonlocal said
        add(first, 1)
        said += capsys.readouterr().err
        return said.count("ALARM: server 0 on there: no snapshot could be written into")

    try:
        first, second = served.call(0), served.call(1, most_kept_bytes=100)
        for count in (1, 2):
            blocked.mkdir()
            until(lambda count=count: alarms(first) == count)  # type: ignore[misc]
            for _ in range(20):
                add(second, 2)  # more than is kept for a snapshot
                time.sleep(0.01)
            assert alarms(first) == count
            blocked.rmdir()
            second.save()
            until(lambda: len(entries_on_disk(served)) == len(served.loop._host.services["ledger"].entries))  # type: ignore[attr-defined]
        assert "Is a directory; it goes on, and tries again" in said
    finally:
        served.close()
