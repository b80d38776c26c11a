"""The doctor's end on a host: answers frames of JSON on its standard input, and leaves with the pipe. No torch.

::

    {"type": "facts"}                                      -> what this host says of itself
    {"type": "peers", "peers": {name: address}, "names": [...]} -> how each is reached, what names mean here
    {"type": "clock"}                                      -> the time here
    {"type": "listen", "address": A, "token": T}           -> {"port": P}
    {"type": "call", "address": A, "port": P, "token": T, "seconds": S} -> what was found, see link_probe
    {"type": "hang up"}                                    -> after it, no port is open here
"""

from __future__ import annotations

import os
import select
import signal
import site
import sys
import time
from typing import Any

from ...core.framing import read_json
from ..ssh.frames import MESSAGE, Message, pipe_of_this_process
from .facts import to_answer
from .link_probe import Listener, call
from .this_host import look_up, read_routes, read_this_host

LIMIT_SECONDS = 300
"""Longest examination; a probe that is not ended by its launcher ends itself after this time."""


def main() -> None:
    """Answer until the pipe ends."""
    signal.alarm(LIMIT_SECONDS)
    if sys.flags.no_site:  # started over ssh: torch and psutil are found as a rank would find them
        site.main()
    channel = pipe_of_this_process()
    answering = Answers()
    while not (channel.ended or channel.broken):
        select.select([channel.read_end], [], [])
        for kind, payload in channel.receive():
            if kind == MESSAGE:
                channel.send_message(answering.to(read_json(payload)))
        while channel.waiting_bytes and not channel.broken:
            select.select([], [channel.write_end], [], 1.0)
            channel.flush()
    # Do not wait for a lookup that hangs in the resolver, nor for a transfer.
    os._exit(0)


class Answers:
    """Answers one question after the other."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def to(self, question: Message) -> Message:
        """Return the answer; ``{"type": "failed", "why": ...}`` to what cannot be answered."""
        try:
            return {"type": "answer", **self._answer(question)}
        except (OSError, ImportError, AttributeError, KeyError, TypeError, ValueError) as problem:
            return {"type": "failed", "why": f"{type(problem).__name__}: {problem}"}

    def _answer(self, question: Message) -> dict[str, Any]:
        match question["type"]:
            case "facts":
                return to_answer(read_this_host())
            case "peers":
                return {"routes": read_routes(question["peers"]), "resolved": look_up(question["names"])}
            case "clock":
                return {"seconds": time.time()}
            case "listen":
                self._hang_up()
                self._listener = Listener(question["address"], bytes.fromhex(question["token"]))
                return {"port": self._listener.port}
            case "call":
                token = bytes.fromhex(question["token"])
                return call(question["address"], question["port"], token, question["seconds"])
            case "hang up":
                self._hang_up()
                return {}
            case unknown:
                raise ValueError(f"unknown question {unknown!r}")

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


if __name__ == "__main__":
    main()
