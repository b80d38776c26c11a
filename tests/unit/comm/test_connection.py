"""One connection: frames however the kernel cuts them, what is dropped and what is ended, and when it wakes us."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import cast

import pytest

from farandole.comm.transport.connect import Connection

FRAMES = [(7, b"seven"), (8, b""), (9, b"nine" * 5)]
HEADER = struct.Struct("<QQ")


class Kernel:
    """A socket that takes as many bytes as it is told, and keeps them."""

    def __init__(self, room: int) -> None:
        self.room, self.taken, self.most_views = room, b"", 0

    def sendmsg(self, views: list[memoryview]) -> int:
        self.most_views = max(self.most_views, len(views))
        said = b"".join(views)[: self.room]
        if not said and any(len(view) for view in views):
            raise BlockingIOError
        self.room -= len(said)
        self.taken += said
        return len(said)


def frames_of(said: bytes) -> list[tuple[int, bytes]]:
    found = []
    while said:
        tag, length = HEADER.unpack(said[: HEADER.size])
        found.append((tag, said[HEADER.size : HEADER.size + length]))
        said = said[HEADER.size + length :]
    return found


def sending(room: int) -> tuple[Connection, Kernel]:
    kernel = Kernel(room)
    connection = Connection(1, cast("socket.socket", kernel))
    for tag, content in FRAMES:
        connection.queue(tag, memoryview(content))
    return connection, kernel


WHOLE = sum(HEADER.size + len(content) for _, content in FRAMES)


def test_frames_that_were_begun_are_ended_and_the_others_dropped() -> None:
    for room in range(WHOLE + 1):
        drop_after(room)


def drop_after(room: int) -> None:
    connection, kernel = sending(room)
    assert connection.send_what_fits() == room
    assert connection.has_more_to_send is (room < WHOLE)
    connection.drop_frames_not_begun()
    connection.queue(99, memoryview(b"last"))
    kernel.room = 1000
    connection.send_what_fits()
    assert not connection.has_more_to_send
    begun, at = 0, 0
    for _, content in FRAMES:
        begun += at < room
        at += HEADER.size + len(content)
    assert frames_of(kernel.taken) == [*FRAMES[:begun], (99, b"last")]


def test_what_does_not_fit_is_sent_later_byte_by_byte() -> None:
    connection, kernel = sending(0)
    for _ in range(WHOLE):
        assert connection.has_more_to_send
        kernel.room = 1
        assert connection.send_what_fits() == 1
    assert not connection.has_more_to_send
    assert frames_of(kernel.taken) == FRAMES
    assert connection.send_what_fits() == 0


def test_nothing_is_sent_of_a_dropped_queue() -> None:
    connection, kernel = sending(1000)
    connection.drop_queue()
    assert not connection.has_more_to_send
    assert (connection.send_what_fits(), kernel.taken) == (0, b"")


def test_many_frames_go_in_calls_that_the_kernel_takes() -> None:
    connection, kernel = sending(10**6)
    for tag in range(2000):
        connection.queue(tag, memoryview(b"x"))
    connection.send_what_fits()
    assert 2 <= kernel.most_views <= 1024, "IOV_MAX"
    assert len(frames_of(kernel.taken)) == 2003


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    there, here = socket.socketpair()
    here.setblocking(False)
    yield there, Connection(3, here)
    there.close()
    here.close()


def woken_at(connection: Connection) -> int:
    return connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.mark.parametrize(
    ("length", "expected"), [(4096, 1), (4097 + 4, 4097), (100_000, 99_996), (500_000, 128 << 10)]
)
def test_the_kernel_collects_a_large_frame_before_it_wakes_us(
    length: int, expected: int, pair: tuple[socket.socket, Connection]
) -> None:
    there, connection = pair
    ended: list[bytes] = []

    def end(frame: memoryview) -> bool:
        ended.append(bytes(frame))
        return True

    def receive() -> int:
        return connection.receive_what_is_there(lambda count: memoryview(bytearray(count)), end)

    assert (receive(), woken_at(connection)) == (0, 1)
    said = HEADER.pack(5, length) + bytes(4)
    there.sendall(said[:7])
    assert (receive(), connection.tag) == (7, -1), "a part of a header begins nothing"
    there.sendall(said[7:])
    assert receive() == len(said) - 7
    assert (connection.tag, ended, woken_at(connection)) == (5, [], expected)
    there.setblocking(False)
    left = memoryview(bytes(length - 4))
    while left:
        left = left[there.send(left) :]
        receive()
    assert ended == [bytes(length)]
    assert woken_at(connection) == 1, "the next frame may be small"


def test_a_frame_after_which_nothing_may_follow(pair: tuple[socket.socket, Connection]) -> None:
    there, connection = pair
    there.sendall(HEADER.pack(1, 2) + b"ab" + HEADER.pack(2, 0))
    seen: list[bytes] = []

    def end(frame: memoryview) -> bool:
        seen.append(bytes(frame))
        return False

    moved = connection.receive_what_is_there(lambda count: memoryview(bytearray(count)), end)
    assert (seen, moved) == ([b"ab"], HEADER.size + 2)


@pytest.mark.parametrize("said", [b"", b"abc", HEADER.pack(1, 9) + b"abc"])
def test_a_connection_that_ends_within_a_frame_is_lost(
    said: bytes, pair: tuple[socket.socket, Connection]
) -> None:
    there, connection = pair
    there.sendall(said)
    there.close()
    with pytest.raises(ConnectionResetError, match="it closed its connection"):
        connection.receive_what_is_there(lambda count: memoryview(bytearray(count)), lambda _: True)
