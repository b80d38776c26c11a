"""Those who call while ranks connect: all are heard, in whichever parts they speak; none can stop the others."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from farandole.comm.transport import connect as callers
from farandole.comm.transport.connect import Callers

HELLO = b"a hello of 22 letters."


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def dial(listener: socket.socket) -> Iterator[Callable[[bytes], socket.socket]]:
    made: list[socket.socket] = []

    def call(said: bytes) -> socket.socket:
        made.append(socket.create_connection(listener.getsockname(), timeout=10))
        made[-1].sendall(said)
        return made[-1]

    yield call
    for each in made:
        each.close()


def heard_of(heard: Callers, count: int, seconds: float = 10.0) -> list[bytes]:
    """Hear until `count` have said their hello."""
    found: list[bytes] = []
    until = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        for said, connection, _ in heard.hear(0.05):
            found.append(said)
            assert connection.gettimeout() == 0, "it never blocks"
            connection.close()
    return sorted(found)


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_hellos_in_parts_beside_whole_ones(
    listener: socket.socket, dial: Callable[[bytes], socket.socket]
) -> None:
    heard = Callers(listener, len(HELLO))
    slow = dial(HELLO[:5])
    dial(HELLO)
    dial(HELLO[:-1] + b"?")
    assert heard_of(heard, 2) == sorted([HELLO, HELLO[:-1] + b"?"])
    assert heard.hear(0) == []
    slow.sendall(HELLO[5:] + b"what comes later")
    assert heard_of(heard, 1) == [HELLO], "and no letter more"
    heard.close()


def test_a_caller_that_goes_is_forgotten(listener: socket.socket, dial: Callable[[bytes], socket.socket]) -> None:
    heard = Callers(listener, len(HELLO))
    dial(HELLO[:3]).close()
    assert heard_of(heard, 1, seconds=0.3) == []
    assert heard._pending == {}
    heard.close()


def test_who_says_nothing_is_hung_up_on_after_a_while(
    listener: socket.socket, dial: Callable[[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "PATIENCE_SECONDS", 0.2)
    heard = Callers(listener, len(HELLO))
    silent = dial(b"")
    heard.hear(5)
    assert len(heard._pending) == 1, "it has some time"
    assert heard_of(heard, 1, seconds=0.5) == []
    assert heard._pending == {}
    assert is_hung_up(silent)
    heard.close()


def test_of_too_many_the_first_is_hung_up_on(
    listener: socket.socket, dial: Callable[[bytes], socket.socket]
) -> None:
    heard = Callers(listener, len(HELLO), most=2)
    first = dial(HELLO[:1])
    heard.hear(5)
    others = [dial(HELLO[:1]), dial(HELLO[:1])]
    until = time.monotonic() + 10
    while len(heard._pending) < 2 or not is_gone(first):
        heard.hear(0.05)
        assert time.monotonic() < until, "the first is hung up on"
    for other in others:
        other.sendall(HELLO[1:])
    assert heard_of(heard, 2) == [HELLO, HELLO]
    heard.close()


def is_gone(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return is_hung_up(connection)
    except TimeoutError:
        return False


def test_closing_hangs_up_on_all_that_have_not_said_their_hello(
    listener: socket.socket, dial: Callable[[bytes], socket.socket]
) -> None:
    heard = Callers(listener, len(HELLO))
    waiting = dial(HELLO[:1])
    heard.hear(5)
    heard.close()
    assert is_hung_up(waiting)
    with pytest.raises((ValueError, KeyError, OSError, RuntimeError)):
        heard.hear(0)


def test_a_hello_that_is_complete_is_not_lost_when_nobody_more_can_be_accepted(
    listener: socket.socket, dial: Callable[[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Callers(listener, len(HELLO))
    caller = dial(HELLO[:1])
    heard.hear(5)

    def full() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(heard, "_accept", full)
    caller.sendall(HELLO[1:])
    dial(b"")
    time.sleep(0.1)  # both are there now
    assert heard_of(heard, 1) == [HELLO]
    with pytest.raises(OSError, match="too many open files"):
        heard.hear(1)
    heard.close()


def test_who_says_nothing_is_hung_up_on_also_when_nobody_more_can_be_accepted(
    listener: socket.socket, dial: Callable[[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Callers(listener, len(HELLO))
    silent = dial(b"")
    heard.hear(5)
    next(iter(heard._pending.values())).until_seconds = 0.0

    def full() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(heard, "_accept", full)
    dial(b"")
    with pytest.raises(OSError, match="too many open files"):
        heard.hear(5)
    assert heard._pending == {}, "its descriptor is free again"
    assert is_hung_up(silent)
    heard.close()


def test_who_calls_beside_a_complete_hello_is_let_in_at_once(
    listener: socket.socket, dial: Callable[[bytes], socket.socket]
) -> None:
    """Who asks next whether anything is on its way sees it."""
    heard = Callers(listener, len(HELLO))
    caller = dial(HELLO[:1])
    heard.hear(5)
    caller.sendall(HELLO[1:])
    dial(b"")
    time.sleep(0.1)  # both are there now
    (complete,) = heard.hear(0)
    assert heard.has_pending
    complete.connection.close()
    heard.close()


def test_each_caller_is_asked_a_question_of_its_own(
    listener: socket.socket, dial: Callable[[bytes], socket.socket]
) -> None:
    heard = Callers(listener, len(HELLO), question_bytes=16)
    asked = set()
    for _ in range(2):
        caller = dial(HELLO)
        caller.settimeout(10)
        while not (calls := heard.hear(1)):
            pass
        assert caller.recv(64) == calls[0].question
        asked.add(calls[0].question)
        calls[0].connection.close()
    assert len(asked) == 2
    heard.close()


def test_a_listener_that_is_closed_is_an_error(listener: socket.socket) -> None:
    heard = Callers(listener, len(HELLO))
    asked: list[float] = []

    def select(seconds: float) -> list[object]:
        asked.append(seconds)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heard._selector, "select", select)
        assert heard.hear(-1) == heard.hear(0.3) == []
    assert asked == [0.0, 0.3], "no time is no time"
    listener.close()
    heard.close()
