"""Which sockets a world shuts to free its ranks: its own, whatever a program's threads open meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from farandole.comm.world.comm_errors import SocketAborter

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connect(stack: ExitStack) -> Pair:
    """Return both ends of a connection, one of them accepted."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    near = stack.enter_context(socket.create_connection(server.getsockname()))
    far = stack.enter_context(server.accept()[0])
    return near, far


def in_a_thread(stack: ExitStack) -> Pair:
    found: list[Pair] = []
    thread = threading.Thread(target=lambda: found.append(connect(stack)))
    thread.start()
    thread.join()
    return found[0]


def is_alive(pair: Pair) -> bool:
    try:
        pair[0].sendall(b"x")
        return pair[1].recv(1) == b"x"
    except OSError:
        return False


def test_connections_of_a_programs_threads_are_left_alone(stack: ExitStack) -> None:
    sockets = SocketAborter()
    with sockets.noticed():
        theirs, ours = in_a_thread(stack), connect(stack)
    assert sockets.shut() == 2, "both ends of ours"
    assert is_alive(theirs)
    assert not is_alive(ours)


def test_they_are_left_alone_while_the_world_still_connects(stack: ExitStack) -> None:
    sockets = SocketAborter()
    with sockets.noticed():
        theirs, ours = in_a_thread(stack), connect(stack)
        sockets.shut()
    assert is_alive(theirs)
    assert not is_alive(ours)


def test_a_descriptor_that_a_thread_had_for_a_while_may_be_the_worlds(stack: ExitStack) -> None:
    sockets = SocketAborter()
    with sockets.noticed():
        with ExitStack() as brief:
            in_a_thread(brief)
        ours = connect(stack)  # takes the same numbers
    sockets.shut()
    assert not is_alive(ours)


def test_sockets_are_made_as_before_when_nobody_connects() -> None:
    before = socket.socket.__init__
    with SocketAborter().noticed(), SocketAborter().noticed():
        assert socket.socket.__init__ is not before
    assert socket.socket.__init__ is before
