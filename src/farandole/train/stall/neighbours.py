"""Asking other ranks where they stand, by datagrams: nothing is kept open, and a rank that is gone is no error.

[Note: not by the store] The store lives with one rank. When that one is stopped or gone, its clients wait, or fill
the terminal with torch's warnings. So the store is only used once, early, to learn where the others listen. A
datagram carries a random word of the rank that it asks: others get no answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...comm.world.host_address import own_address
from ...comm.world.world import World
from ...core.failures import Kind, Position
from ...launch.supervise.stopped_process import state_of

_READ_SECONDS = 5.0
_MOST_BYTES = 4096
_MISSES = 3
"""Questions without an answer, before a rank is looked at from outside."""


@dataclass(frozen=True)
class _Address:
    """Where a rank listens."""

    host: str
    port: int
    word: str
    machine: str
    """To tell whether its process is on this host."""
    process: int


class Neighbours:
    """One rank's socket: answers the others, and asks them. Used by one thread."""

    def __init__(self, here: World, answer: Callable[[], Position]) -> None:
        """Open the socket and say in the store where it is. Raises OSError or RuntimeError when it cannot be."""
        self._here, self._answer = here, answer
        self._topic = here.topic("stall")
        host = own_address(here.address) if here.node_count > 1 else "127.0.0.1"
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self._own: _Address | None = None
        self._others: dict[int, _Address] | None = None
        self._heard: dict[int, Position] = {}
        self._round = 0
        self._missed: dict[int, int] = {}
        self._known: set[int] = set()
        """Ranks that have ever answered."""
        try:
            self._socket.bind((host, 0))
            self._socket.setblocking(False)
            self._own = _Address(
                host, self._socket.getsockname()[1], secrets.token_hex(8), _machine(), os.getpid()
            )
            assert here.store is not None, "a world of several has a store"
            here.store.set(f"{self._topic}/{here.rank}", json.dumps(asdict(self._own)))
        except BaseException:
            self._socket.close()
            raise

    def serve(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Answer for a while, or `until` something is so."""
        end, poll = time.monotonic() + seconds, select.poll()  # select() takes no file above 1,023
        poll.register(self._socket, select.POLLIN)
        while not until() and (left := end - time.monotonic()) > 0:
            if poll.poll(1e3 * left):
                self._take()

    def wake(self) -> None:
        """End a `serve` of another thread soon, when it has something to stop for."""
        if self._own is not None:
            with contextlib.suppress(OSError), socket.socket(self._socket.family, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"{}", (self._own.host, self._own.port))

    def learn(self) -> None:
        """Read from the store where the others listen, and ask each once."""
        if self._others is None:
            self._others = self._read_addresses()
            self._ask()

    def ask_all(self, seconds: float) -> list[Position]:
        """Return the position of every other rank; one that did not answer yet counts as moving."""
        self.learn()
        self._ask()
        others = [rank for rank in range(self._here.size) if rank != self._here.rank]
        self.serve(seconds, until=lambda: len(self._heard) == len(others))
        found = []
        for rank in others:
            if rank in self._heard:
                self._missed[rank] = 0
                found.append(self._heard[rank])
            else:
                self._missed[rank] = self._missed.get(rank, 0) + 1
                kind: Kind = "moving" if self._missed[rank] < _MISSES else self._look_at(rank)
                found.append(Position(rank, 0, kind))
        return found

    def close(self) -> None:
        """Answer no more."""
        self._socket.close()

    def _ask(self) -> None:
        self._round += 1
        self._heard = {}
        for address in (self._others or {}).values():
            question = {"ask": address.word, "round": self._round}
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps(question).encode(), (address.host, address.port))

    def _take(self) -> None:
        try:
            data, sender = self._socket.recvfrom(_MOST_BYTES)
            message = json.loads(data)
        except (OSError, ValueError):
            return
        if not isinstance(message, dict):
            return
        if self._own is not None and message.get("ask") == self._own.word:
            answer = {"round": message.get("round"), "word": self._own.word, "position": self._answer().to_json()}
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps(answer).encode()[:_MOST_BYTES], sender)
        elif message.get("round") == self._round:
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        position = Position.from_json(str(message.get("position")))
        if position is None:
            return
        address = (self._others or {}).get(position.rank)
        if address is not None and address.word == message.get("word"):
            self._heard[position.rank] = position
            self._known.add(position.rank)

    def _look_at(self, rank: int) -> Kind:
        """Return what can be known of a rank that does not answer."""
        address = (self._others or {}).get(rank)
        if address is None:
            return "unknown"
        if _is_closed(address):
            return "ended"
        if self._own is not None and address.machine == self._own.machine:
            state = state_of(address.process)
            known: dict[str, Kind] = {"": "ended", "Z": "ended", "X": "ended", "T": "stopped", "t": "pause"}
            if state in known:
                return known[state]
        return "silent" if rank in self._known else "unknown"

    def _read_addresses(self) -> dict[int, _Address]:
        here = self._here
        others = [rank for rank in range(here.size) if rank != here.rank]
        try:
            # A client of its own: the thread that trains may hold the other while it waits.
            store: Any = here.store
            store = store.clone()
            store.set_timeout(timedelta(seconds=_READ_SECONDS))
            texts = store.multi_get([f"{self._topic}/{rank}" for rank in others])
            return {rank: _Address(**json.loads(text)) for rank, text in zip(others, texts, strict=True)}
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return {}


def _is_closed(address: _Address) -> bool:
    """Return whether the host says that the socket there is closed."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.settimeout(0.3)
        try:
            probe.connect((address.host, address.port))
            probe.send(b"{}")
            probe.recv(1)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _machine() -> str:
    """Return what is alike for processes that see each other's numbers."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    return socket.gethostname()
