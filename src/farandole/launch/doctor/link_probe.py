"""One pair of hosts: does a call get through, how long does a small message take, and how much goes each way.

The called host listens on a fresh port; the calling one makes a connection for every question, which begins with
the token both were given and a letter. A sender ends a transfer by closing its half, so nothing has to be counted
in the stream. The rate is the receiver's: of all, or of what came after the first quarter (which buffers and the
bucket of a shaped link let through faster), whichever is less: a receiver that was held up finds its buffers full.
"""

from __future__ import annotations

import hmac
import socket
import socketserver
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ECHO, TAKE, GIVE = b"e", b"t", b"g"
TOKEN_BYTES = 16
CONNECT_SECONDS = 4.0
STALL_SECONDS = 3.0
"""Without a byte, a transfer is over."""
ECHOES = 40
ECHO_SECONDS = 0.5
LEAST_BYTES = 512 * 1024
MOST_BYTES = 512 * 2**20
_PIECE = bytes(64 * 1024)
_UNSENT_BYTES = 128 * 1024
"""What may wait in a sender's buffer, so that a slow link is not busy for long after the end."""
_RESULT = struct.Struct("!Qd")
_SECONDS = struct.Struct("!d")
_MOST_SECONDS = 10.0


@dataclass(frozen=True)
class Seen:
    """What a receiver saw of a transfer."""

    received_bytes: int
    bits_per_second: float
    """0.0 when it was too little or too short to say."""


def rate_of(begin: float, samples: Sequence[tuple[float, int]]) -> float:
    """Return bits a second of a transfer waited for since `begin`, from (time, bytes so far).

    0.0 for a transfer without a duration.
    """
    if not samples:
        return 0.0
    end, total = samples[-1]
    quarter, before = next(sample for sample in samples if 4 * sample[1] >= total)
    if end <= quarter or total <= before:
        return 0.0
    return 8 * min((total - before) / (end - quarter), total / (end - begin))


class Listener(socketserver.ThreadingTCPServer):
    """Answers callers that know the token, each in a thread of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, token: bytes) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self._token = token
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.2,), daemon=True).start()

    def close(self) -> None:
        """Stop listening. What is being answered goes on to its own end."""
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: object) -> None:
        """Answer one call."""
        caller: socket.socket = request
        with suppress(OSError):  # the caller sees the end of the connection, and says so
            _prepare(caller)
            head = _read_exactly(caller, TOKEN_BYTES + 1 + _SECONDS.size)
            token, question = head[:TOKEN_BYTES], head[TOKEN_BYTES : TOKEN_BYTES + 1]
            if not hmac.compare_digest(token, self._token):
                return
            if question == ECHO:
                _echo(caller)
            elif question == TAKE:
                seen = receive(caller)
                caller.sendall(_RESULT.pack(seen.received_bytes, seen.bits_per_second))
            elif question == GIVE:
                send(caller, min(*_SECONDS.unpack(head[TOKEN_BYTES + 1 :]), _MOST_SECONDS))


def call(address: str, port: int, token: bytes, seconds: float | None) -> dict[str, Any]:
    """Call a `Listener`; return what was found, as fields of `LinkFacts`.

    `seconds` for a transfer each way; None: only see whether a call gets through. Never raises `OSError`.
    """
    try:
        with _ask(address, port, token, ECHO) as connection:
            round_trip = _round_trip(connection, ECHOES if seconds is not None else 1)
    except OSError as problem:
        return {"problem": explain(problem)}
    found: dict[str, Any] = {"round_trip_seconds": round_trip}
    if seconds is None:
        return found
    try:
        with _ask(address, port, token, TAKE, seconds) as connection:
            send(connection, seconds)
            there = Seen(*_RESULT.unpack(_read_exactly(connection, _RESULT.size)))
        with _ask(address, port, token, GIVE, seconds) as connection:
            back = receive(connection)
    except OSError:
        return {**found, "stalled": True}
    found["stalled"] = min(there.received_bytes, back.received_bytes) < len(_PIECE)
    for key, seen in (("bits_per_second", there), ("bits_per_second_back", back)):
        if seen.bits_per_second > 0:
            found[key] = seen.bits_per_second
    return found


def explain(problem: OSError) -> str:
    """Return why a call did not get through, in the words that `checks` know."""
    if isinstance(problem, TimeoutError):
        return "timed out"
    if isinstance(problem, ConnectionRefusedError):
        return "refused"
    if isinstance(problem, (ConnectionResetError, BrokenPipeError, EOFError)):
        return "reset"
    return problem.strerror or str(problem) or type(problem).__name__


def send(connection: socket.socket, seconds: float) -> None:
    """Send for so long, then close this half. Less than `LEAST_BYTES` only if they take four times as long."""
    begin = time.monotonic()
    sent = 0
    while sent < MOST_BYTES:
        passed = time.monotonic() - begin
        if passed >= 4 * seconds or (passed >= seconds and sent >= LEAST_BYTES):
            break
        connection.sendall(_PIECE)
        sent += len(_PIECE)
    connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket) -> Seen:
    """Take what comes until its end; a transfer that stalls ends there, with what was seen."""
    room = bytearray(256 * 1024)
    samples: list[tuple[float, int]] = []
    begin, total = time.monotonic(), 0
    try:
        while count := connection.recv_into(room):
            total += count
            samples.append((time.monotonic(), total))
    except TimeoutError:
        pass
    return Seen(total, rate_of(begin, samples))


def _ask(address: str, port: int, token: bytes, question: bytes, seconds: float = 0.0) -> socket.socket:
    connection = socket.create_connection((address, port), CONNECT_SECONDS)
    try:
        _prepare(connection)
        connection.sendall(token + question + _SECONDS.pack(seconds))
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(STALL_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def _echo(caller: socket.socket) -> None:
    while data := caller.recv(64):
        caller.sendall(data)


def _round_trip(connection: socket.socket, count: int) -> float:
    """Return the median time of a byte there and back."""
    begin = time.monotonic()
    taken: list[float] = []
    while not taken or (len(taken) < count and time.monotonic() - begin < ECHO_SECONDS):
        start = time.perf_counter()
        connection.sendall(b".")
        _read_exactly(connection, 1)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the connection ended")
        data += piece
    return data
