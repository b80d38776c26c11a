"""What error texts of torch's communication backends, its store and its allocators mean. The only list of them.

The backends raise `RuntimeError` for everything, so the text is all there is. Where a text may be of any origin
(an uncaught exception, what a rank printed last), only signs count that no other program is likely to write.
"""

from __future__ import annotations

import re

_WAITED = re.compile(r"(?:timed out waiting|timeout after|timed out after) (\d+) ?ms", re.IGNORECASE)
_PEER_LOST_ANYWHERE = ("closed by peer", "Connection reset")
_PEER_LOST = (
    *_PEER_LOST_ANYWHERE,
    "Broken pipe",
    "Read error",
    "Write error",
    "Connection refused",
    "Connection was likely closed",
    "failed to recv, got 0 bytes",
    "Socket closed",
)
_TIMEOUT_ANYWHERE = ("timed out",)
_TIMEOUT = (*_TIMEOUT_ANYWHERE, "timeout")
"""Compared without regard to case."""
_NO_MEMORY = re.compile(
    "out of memory|memoryerror|bad_alloc|bad allocation|unable to allocate|"
    "(can't|cannot) allocate memory(?! in static)",
    re.IGNORECASE,
)
"""Words of torch, Python, NumPy, C++ and C. The loader of libraries has a static memory of its own."""


def is_peer_lost(text: str, *, any_origin: bool = False) -> bool:
    """Return whether a backend says that another rank closed its connection."""
    return any(sign in text for sign in (_PEER_LOST_ANYWHERE if any_origin else _PEER_LOST))


def is_timeout(text: str, *, any_origin: bool = False) -> bool:
    """Return whether a backend says that it waited as long as it was told to."""
    lower = text.lower()
    return any(sign in lower for sign in (_TIMEOUT_ANYWHERE if any_origin else _TIMEOUT))


def is_out_of_memory(text: str) -> bool:
    """Return whether an error says that memory could not be had."""
    return _NO_MEMORY.search(text) is not None


def waited_seconds(text: str) -> float | None:
    """Return how long a backend says it waited; None when it does not say."""
    match = _WAITED.search(text)
    return None if match is None else float(match[1]) / 1000


def first_line(problem: BaseException) -> str:
    """Return the first line of an error's text (torch adds stack traces of its own), or else its class."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
