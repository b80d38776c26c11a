"""The connection between a rank and a server: what arrives is what was sent, or an error. No process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from farandole.core.framing import HEADER, MAC_BYTES, FrameError
from farandole.sync.server.channel import (
    HELLO,
    MOST_TEXT_BYTES,
    Hello,
    Outline,
    ServerChannel,
    ServerMessage,
    write_text,
)

UP, DOWN, MOST_BYTES = b"up" * 16, b"down" * 8, 1 << 20


class Ends:
    """A rank and a server, between which all bytes can be seen."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        for each in (near, far):
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.rank, self.server = (
            ServerChannel(near, UP, DOWN, MOST_BYTES),
            ServerChannel(far, DOWN, UP, MOST_BYTES),
        )

    def bytes_of(self, message: ServerMessage) -> bytes:
        """Return what the rank would send."""
        self.rank.queue(message)
        sent = b"".join(self.rank._outgoing)
        self.rank._outgoing.clear()
        return sent

    def at_server(self, sent: bytes) -> list[ServerMessage]:
        self.rank.socket.sendall(sent)
        return self.server.receive()

    def close(self) -> None:
        self.rank.close()
        self.server.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as made:
        yield made


def test_messages_that_go_in_many_pieces_arrive_whole_and_in_order(ends: Ends) -> None:
    sizes = (0, 1, 3, 17, 40_000, 5)
    tensors = [torch.arange(n, dtype=torch.int32) + n for n in sizes] + [torch.randn(2, 3).bfloat16()]
    for number in range(3):
        ends.rank.queue(ServerMessage({"number": number}, tensors[number:]))
    found: list[ServerMessage] = []
    while len(found) < 3:
        ends.rank.send_what_fits()
        found += ends.server.receive()
    for number, message in enumerate(found):
        assert message.values == {"number": number}
        assert len(message.tensors) == len(tensors) - number
        for ours, theirs in zip(message.tensors, tensors[number:], strict=True):
            assert torch.equal(ours, theirs)


def test_a_text_that_was_changed_repeated_or_left_out_is_refused(ends: Ends) -> None:
    first, second = (ends.bytes_of(ServerMessage({"do": "pay", "sum": each})) for each in (1, 2))
    assert ends.at_server(first)[0].values["sum"] == 1
    with pytest.raises(FrameError, match="expected message 1"):
        ends.at_server(first)
    for changed in (second.replace(b'"sum":2', b'"sum":9'), b"\0" * len(second)):
        with closing(Ends()) as other:
            other.server._taken = 1
            with pytest.raises(FrameError, match="message"):
                other.at_server(changed)
    with closing(Ends()) as left_out, pytest.raises(FrameError, match="expected message 0"):
        left_out.at_server(second)


def test_what_a_rank_has_sent_is_no_reply(ends: Ends) -> None:
    sent = ends.bytes_of(ServerMessage({"do": "push"}))
    ends.server.socket.sendall(sent)
    with pytest.raises(FrameError, match="not from our peer"):
        ends.rank.receive()
    up, down = Hello.make(0, 0).keys(UP, b"asked")
    assert up != down


def test_lengths_are_bounded_before_anything_is_kept(ends: Ends) -> None:
    with pytest.raises(FrameError, match=f"a text of {MOST_TEXT_BYTES + 1} bytes"):
        ends.at_server(HEADER.pack(0, MOST_TEXT_BYTES + 1) + bytes(MAC_BYTES))
    for shape, text in (([MOST_BYTES + 16], f"expected at most {MOST_BYTES}"), ([-16, -1], "and shapes")):
        said = write_text(ServerMessage({}, [torch.zeros(0, dtype=torch.uint8)])).replace(
            b"[0]", str(shape).encode()
        )
        with pytest.raises(FrameError, match=text):
            Outline.read(said, MOST_BYTES)


def test_the_last_message_of_a_connection_that_is_closed_is_read(ends: Ends) -> None:
    ends.rank.socket.sendall(ends.bytes_of(ServerMessage({"last": True})))
    ends.rank.socket.close()
    assert [each.values for each in ends.server.receive()] == [{"last": True}]
    with pytest.raises(ConnectionResetError):
        ends.server.receive()


def test_a_caller_answers_the_question_of_this_connection_for_itself_alone() -> None:
    key, asked = b"key" * 9, b"a" * 32
    hello = Hello.make(3, 1)
    said = hello.pack(key, asked)
    assert Hello.read(key, asked, said) == hello
    assert Hello.read(key, b"b" * 32, said) is None, "recorded on another connection"
    assert Hello.read(b"other", asked, said) is None
    code = HELLO.unpack(said)[3]
    for other in (replace(hello, client=2), replace(hello, generation=2), replace(hello, question=b"q" * 32)):
        changed = HELLO.pack(other.client, other.generation, other.question, code)
        assert Hello.read(key, asked, changed) is None
