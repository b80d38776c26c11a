"""The control channel's frames, fed with what an enemy would send; the switchboard on a real socket."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from farandole.core.env import ElasticSettings
from farandole.core.framing import FrameError
from farandole.core.vocabulary.errors import LaunchError
from farandole.launch.elastic import control, workers
from farandole.train.elastic import ControlConnection

KEY = b"k" * 32


def test_too_long_a_frame_is_not_sent() -> None:
    with pytest.raises(FrameError, match="a frame of"):
        control.sign(control.frame_signer(KEY), {"type": "x", "text": "y" * 70000})


def test_what_is_no_message_is_refused_even_from_the_peer() -> None:
    up, down = control.session_keys(KEY, b"a" * 16, b"b" * 16)
    signed = control.frame_signer(up).sign(b"[]")
    with pytest.raises(FrameError, match="a JSON object"):
        control.verify(control.frame_verifier(up), signed)
    with pytest.raises(FrameError, match="not from our peer"):  # what we sent, sent back to us
        control.verify(control.frame_verifier(down), signed)


def test_a_hello_is_good_for_one_worker_and_one_connection() -> None:
    secret = control.make_secret()
    key = control.worker_key(secret, 3)
    hello = control.make_hello(key, 3, b"n" * 16, b"m" * 16)
    assert control.read_hello(secret, hello, b"n" * 16) == (3, b"m" * 16)
    with pytest.raises(FrameError):  # recorded, and played to a later connection
        control.read_hello(secret, hello, b"o" * 16)
    with pytest.raises(FrameError):  # worker 3 says that it is worker 4
        control.read_hello(secret, control.make_hello(key, 4, b"n" * 16, b"m" * 16), b"n" * 16)
    assert json.dumps(control.worker_key(secret, 4).hex()) != json.dumps(key.hex())


class Board:
    """A switchboard, and the loop around it."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.secret = control.make_secret()
        self.board = workers.Switchboard("127.0.0.1", self.secret, self.selector)
        self.heard: list[tuple[int | None, control.Frame]] = []

    def turn(self, seconds: float = 0.05) -> None:
        for key, _ in self.selector.select(seconds):
            if key.data is self.board:
                self.board.accept(time.monotonic())
            else:
                frames = self.board.read(key.data, lambda worker: worker < 10)
                self.heard += [(key.data.worker, frame) for frame in frames]
        self.board.tick(time.monotonic())

    def settings(self, worker: int) -> ElasticSettings:
        key = control.worker_key(self.secret, worker)
        return ElasticSettings("127.0.0.1", self.board.port, worker, key)

    def call(self) -> socket.socket:
        caller = socket.create_connection(("127.0.0.1", self.board.port), 5)
        caller.settimeout(5)
        for _ in range(3):
            self.turn()
        return caller


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board()
    yield made
    made.board.close()
    made.selector.close()


def test_strangers_are_hung_up_on(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with board.call() as silent, board.call() as noisy, board.call() as unknown:
        nonce = noisy.recv(16)
        noisy.sendall(b"x" * control.HELLO_BYTES)
        theirs = unknown.recv(16)
        # A worker of the job that is not running: its process has ended, or has not begun.
        unknown.sendall(control.make_hello(control.worker_key(board.secret, 11), 11, theirs, b"m" * 16))
        for _ in range(4):
            board.turn()
        assert noisy.recv(1) == b""
        assert unknown.recv(1024)[-1:] != b""  # the welcome, sealed
        assert unknown.recv(1) == b""
        assert silent.recv(16) != nonce
        monkeypatch.setattr(workers, "HELLO_SECONDS", 0.0)
        board.turn()
        assert silent.recv(1) == b""
    assert not board.board.channels


def test_a_worker_and_the_board_understand_each_other_and_a_second_caller_does_not_replace_it(
    board: Board,
) -> None:
    import threading

    got: list[control.Frame | None] = []
    lines: list[ControlConnection] = []
    calling = threading.Thread(target=lambda: lines.append(ControlConnection(board.settings(3), got.append)))
    calling.start()
    while calling.is_alive():
        board.turn()
    lines[0].send({"type": "ready", "n": 1})
    for _ in range(3):
        board.turn()
    assert board.heard == [(3, {"type": "ready", "n": 1})]
    with board.call() as second:
        second.sendall(control.make_hello(control.worker_key(board.secret, 3), 3, second.recv(16), b"m" * 16))
        for _ in range(3):
            board.turn()
        assert second.recv(4096)
        assert second.recv(1) == b""
    board.board.send(3, {"type": "leave", "generation": 1})
    deadline = time.monotonic() + 5
    while len(got) < 2 and time.monotonic() < deadline:
        board.turn()
    assert got == [{"type": "welcome"}, {"type": "leave", "generation": 1}]
    lines[0].close()
    board.turn()
    board.turn()
    assert not board.board.channels


def test_a_launcher_with_another_secret_is_not_believed(board: Board) -> None:
    import threading

    problems: list[BaseException] = []

    def call() -> None:
        settings = ElasticSettings("127.0.0.1", board.board.port, 3, b"another key of thirty-two bytes!")
        try:
            ControlConnection(settings, lambda frame: None)
        except LaunchError as problem:
            problems.append(problem)

    calling = threading.Thread(target=call)
    calling.start()
    while calling.is_alive():
        board.turn()
    assert "is not ours" in str(problems[0])
