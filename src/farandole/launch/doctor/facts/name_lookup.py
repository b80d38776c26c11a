"""Looking names up, with an end: a name server that does not answer holds a lookup for half a minute."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

LOOKUP_SECONDS = 3.0


def look_up(names: Sequence[str], seconds: float = LOOKUP_SECONDS) -> dict[str, list[str] | None]:
    """Return the addresses of each name: none for an unknown name, None after a time-out."""
    found: dict[str, list[str] | None] = dict.fromkeys(names)
    # Daemon threads: one that hangs in the resolver does not keep the process from ending.
    threads = [threading.Thread(target=_look_up, args=(name, found), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def _look_up(name: str, found: dict[str, list[str] | None]) -> None:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found[name] = []
    else:
        found[name] = sorted({str(address[0]) for *_, address in answers})
