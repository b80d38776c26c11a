"""Server processes: who gets in, requests applied once, restored after kill -9, ended with their clients."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import farandole
from farandole.core.vocabulary.errors import ConfigError, LaunchError, PeerLost
from farandole.sync.server import client
from farandole.sync.server.client import (
    ServerClient,
    ServerPlace,
    ServerProcess,
    make_directory,
    start_server,
    wait_for,
)
from farandole.sync.server.loop import Limits

KEY = bytes(range(32))
ELEMENTS = 5
LEDGER = "tests.unit.sync.server.ledger:Ledger"


class Running:
    """A server with clients of this process."""

    def __init__(self, directory: Path, *, snapshot_seconds: float = 0.0, clients: int = 2) -> None:
        place = ServerPlace(
            number=0, host="here", address="127.0.0.1", directory=make_directory(str(directory)),
            clients=list(range(clients)), limits=Limits(snapshot_seconds, 0.5, 30.0, 1 << 20),
            services={"ledger": {"class": LEDGER, "config": {"elements": ELEMENTS}}},
        )  # fmt: skip
        self.processes: list[ServerProcess] = []
        self.place, process = start_server(place, KEY)
        self.processes.append(process)
        self.clients: list[ServerClient] = []

    def call(self, client: int, *, key: bytes = KEY, most_kept_bytes: int = 1 << 20) -> ServerClient:
        made = ServerClient(
            self.place, key, client=client, rank=client, host="here", most_kept_bytes=most_kept_bytes,
            most_bytes=1 << 20,
        )  # fmt: skip
        self.clients.append(made)
        return made

    def close(self) -> None:
        for each in self.clients:
            self.processes += each.restored
            each.close()
        for process in self.processes:
            if not process.end(20):
                process.kill()
                process.wait()
                raise AssertionError("a server has outlived its clients")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    try:
        yield made
    finally:
        made.close()


def add(client: ServerClient, entry: int) -> None:
    client.call("ledger", {"do": "add", "entry": entry}, [torch.full((ELEMENTS,), entry).double()], keeps=True)


def read(client: ServerClient, at_least: int = 0) -> tuple[list[list[int]], torch.Tensor, list[int]]:
    reply = client.call("ledger", {"do": "read", "at_least": at_least}, keeps=False)
    return reply.values["entries"], reply.tensors[0], reply.values["left"]


@pytest.mark.timeout(120)
def test_requests_of_two_clients_a_wait_an_error_and_an_end(running: Running) -> None:
    first, second = running.call(0), running.call(1)
    add(first, 3)
    second.ask("ledger", {"do": "read", "at_least": 2}, keeps=False)
    add(first, 4)
    reply = wait_for([second])[0]
    assert reply.values["entries"] == [[0, 3], [0, 4]]
    assert reply.tensors[0].tolist() == [7.0] * ELEMENTS
    with pytest.raises(ConfigError, match="it was asked to; do not ask"):
        first.call("ledger", {"do": "fail"}, keeps=False)
    with pytest.raises(PeerLost, match="no client of this server"):
        running.call(7)
    assert not first.leave()
    assert read(second)[2] == [0]
    begin = time.monotonic()
    assert second.leave()
    assert running.processes[0].end(10)
    assert time.monotonic() - begin < 5
    assert not Path(running.place.directory).exists()


@pytest.mark.timeout(120)
def test_a_server_that_is_killed_goes_on_with_what_it_had(running: Running) -> None:
    first, second = running.call(0), running.call(1, most_kept_bytes=100)
    for entry in range(1, 6):
        add(first, entry)
        add(second, 10 * entry)  # its bound has it saved on the way
    running.processes[0].kill()
    running.processes[0].wait()
    add(first, 6)
    add(second, 60)
    entries, total, _ = read(second)
    assert sorted(entries) == sorted([[0, i] for i in range(1, 7)] + [[1, 10 * i] for i in range(1, 7)])
    assert [entry for client, entry in entries if client == 0] == [1, 2, 3, 4, 5, 6]
    assert total.tolist() == [21.0 + 210.0] * ELEMENTS
    assert len(first.restored) + len(second.restored) == 1


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_server_that_dies_of_a_request_whenever_it_is_restored_is_an_error_with_its_last_words(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.sync.server.client._MOST_LOSSES", 2)
    first = running.call(0)
    add(first, 1)
    with pytest.raises(PeerLost, match=r"lost 3 times before it replied .*OSError: no space left on the device"):
        first.call("ledger", {"do": "die"}, keeps=True)
    assert len(first.restored) == 2


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_server_that_dies_again_and_again_between_replies_is_an_error_unless_it_writes_snapshots(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.sync.server.client._MOST_LOSSES", 1)
    first = running.call(0)

    def die() -> None:
        process = first.restored[-1] if first.restored else running.processes[0]
        process.kill()
        process.wait()

    for entry in range(2):
        die()
        add(first, entry)
        first.save()
    die()
    add(first, 2)
    die()
    with pytest.raises(PeerLost, match=r"lost 2 times before it replied or wrote a snapshot"):
        add(first, 3)


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_server_whose_disk_takes_no_snapshot_goes_on_and_its_death_is_told(tmp_path: Path) -> None:
    running = Running(tmp_path, clients=1)
    first = running.call(0, most_kept_bytes=100)
    (Path(running.place.directory) / "snapshot.new").mkdir()
    for entry in range(20):
        add(first, entry)
    assert len(read(first)[0]) == 20
    running.processes[0].kill()
    running.processes[0].wait()
    with pytest.raises(PeerLost, match="its last snapshot is too old to go on from: the disk took no later one"):
        add(first, 20)
    running.close()


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_client_that_stays_away_is_given_up_and_refused(running: Running) -> None:
    first, second = running.call(0), running.call(1)
    second.ask("ledger", {"do": "add", "entry": 9}, [torch.ones(ELEMENTS).double()], keeps=True)
    second.connection.socket.send(struct.pack("<QQ", 0, 77))  # half a request, and then nothing
    second.connection.socket.close()
    until = time.monotonic() + 20
    while 1 not in read(first)[2]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert read(first)[0] == []
    with pytest.raises(PeerLost, match="given it up"):
        running.call(1)


@pytest.mark.full("further")
@pytest.mark.timeout(120)
def test_strangers_get_nowhere(running: Running) -> None:
    first, _ = running.call(0), running.call(1)
    with socket.create_connection(("127.0.0.1", running.place.port), 5) as stranger:
        stranger.settimeout(10)
        assert len(stranger.recv(64)) == 32
        stranger.sendall(os.urandom(72))
        assert stranger.recv(64) == b""
    add(first, 1)
    assert read(first)[0] == [[0, 1]]
    os.kill(running.processes[0].pid, signal.SIGTERM)  # as a job's end sends it to all: its ranks decide
    assert read(first)[0] == [[0, 1]]


ORPHAN = """
import os, sys
sys.path.insert(0, sys.argv[2])
from farandole.sync.server.loop import Limits
from farandole.sync.server.client import ServerPlace, start_server
place = ServerPlace(0, "here", "127.0.0.1", sys.argv[1], [0], {}, Limits(0.0, 0.5, 60.0, 1 << 20))
print(start_server(place, b"key")[1].pid, flush=True)
os._exit(1)
"""


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_server_ends_whose_starter_ends_before_any_rank_has_called(tmp_path: Path) -> None:
    directory = make_directory(str(tmp_path))
    source = str(Path(farandole.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, directory, source], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout, done.stderr
    until = time.monotonic() + 20
    while Path(f"/proc/{int(done.stdout)}").exists() and Path(directory).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_server_that_never_listens_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "START_SECONDS", 0.3)
    for code, why in (
        ("import time; time.sleep(60)", "it said nothing for 0.3 s"),
        ("import sys; sys.exit('no room')", "no room"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed"),
    ):
        monkeypatch.setattr(client, "_START", code)
        begin = time.monotonic()
        with pytest.raises(LaunchError, match=f"server 0 on here did not start: {why}"):
            Running(tmp_path)
        assert time.monotonic() - begin < 20
        assert not list(tmp_path.iterdir())


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_a_process_with_many_open_files_may_be_a_client(running: Running) -> None:
    """Of more than select() takes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2_000:
        pytest.skip("not so many open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2_000), before[1]))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1_100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        first = running.call(0)
        assert first.connection.socket.fileno() > 1_024
        add(first, 3)
        assert read(first)[0] == [[0, 3]]
        assert not first.leave()
        assert running.call(1).leave()
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
