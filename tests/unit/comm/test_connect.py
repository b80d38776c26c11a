"""How a rank calls another: its code, its address family, and what it says when there is no way."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from farandole.comm.transport.connect import Door, _choose, _open, call_rank
from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import CommError

WORLD = cast("World", SimpleNamespace(rank=3, job_rank=3))


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        try:
            made.bind((request.param, 0))
        except OSError:
            pytest.skip(f"this host has no {request.param}")
        made.listen()
        yield made


def test_a_caller_says_who_it_is_and_proves_it(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_SECRET", "of the job")
    address, port = listener.getsockname()[:2]
    peer = {"address": address, "port": str(port), "question": "why?", "host": "there"}
    with call_rank(WORLD, 1, peer, 2, time.monotonic() + 10, control="") as calling:
        there, _ = listener.accept()
        with there:
            said = there.recv(100)
        assert calling.family == listener.family
    assert len(said) == 40
    assert said[:32] == Door(b"of the job", "why?").hello(3, 2)
    assert said[32:] == bytes([3, 0, 0, 0, 2, 0, 0, 0])


def test_codes_differ_by_all_they_depend_on() -> None:
    door = Door(b"secret", "question")
    codes = {
        door.hello(1, 0), door.hello(0, 1), door.hello(1, 1), door.hello(11, 0),
        Door(b"other", "question").hello(1, 0), Door(b"secret", "another").hello(1, 0),
    }  # fmt: skip
    assert len(codes) == 6
    assert Door.fingerprint(b"") == "", "no secret has no fingerprint"
    prints = [Door.fingerprint(secret) for secret in (b"secret", b"other")]
    assert len(set(prints)) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in prints)


def test_nobody_there_is_an_error_that_names_rank_host_and_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    peer = {"address": "127.0.0.1", "port": str(port), "question": "?", "host": "there"}
    with pytest.raises(CommError, match=rf"cannot reach rank 1 on there at 127.0.0.1:{port}: .*refused") as caught:
        call_rank(WORLD, 1, peer, 0, 0.0, control="")
    assert caught.value.rank == 3


def test_a_call_to_nobody_leaves_no_socket_open(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    real = socket.socket

    def kept(*words: int) -> socket.socket:
        made.append(real(*words))
        return made[-1]

    where = (listener.getsockname()[0], listener.getsockname()[1])
    listener.close()
    monkeypatch.setattr(socket, "socket", kept)
    with pytest.raises(OSError, match="refused"):
        _open(where, 5.0, "")
    assert [each.fileno() for each in made] == [-1]


def test_a_congestion_control_is_used_or_said_to_be_missing() -> None:
    with socket.socket() as made:
        assert _choose(made, "") == ""
        assert _choose(made, "reno") == ""
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
        reason = _choose(made, "nosuch")
    assert reason.startswith("No such file or directory (this kernel has ")
    assert "reno" in reason
