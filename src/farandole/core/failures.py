"""What failures mean: error texts of communication backends, and where ranks stand that wait."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from .vocabulary.run_files import position_path
from .vocabulary.text import name_ranks

# What error texts of torch's communication backends, its store and its allocators mean. The only list of them.
#
# The backends raise `RuntimeError` for everything, so the text is all there is. Where a text may be of any
# origin (an uncaught exception, what a rank printed last), only signs count that no other program is likely to
# write.

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


# Where ranks stand while no step is done, and what that means: ranks that wait for each other, or a long pause.
#
# A rank samples itself (`train.stall_sampler`) and leaves its position in the run directory; the launcher and
# ``diagnose`` read it there. `judge` is the one place that decides what is a hang.

Kind = Literal[
    "waiting", "data", "pause", "working", "idle", "moving", "ended", "stopped", "silent", "unknown",
]  # fmt: skip
"""What a rank does: in a collective; in its data loader; announced, compiling or in a debugger; using its core
outside of collectives; blocked there; doing steps; gone; stopped by a signal; silent by now; out of reach."""

Judgement = Literal["nothing", "pause", "hang"]
"""No reason for a word; ranks wait for one that is at work; ranks wait that can never go on."""

_NOT_COMING = frozenset({"ended", "stopped", "silent"})
_REMEDY = "they wait for each other: every rank has to make the same calls in the same order"
_SAME_REMEDY = "all are in the same call and nothing arrives: farandole doctor checks the links"
_PHASE_REMEDY = 'if that is meant, announce it: with fd.phase("evaluation"): ...'


@dataclass(frozen=True)
class Position:
    """Where one rank stands."""

    rank: int
    step: int
    """Steps it has finished."""
    kind: Kind
    place: str = ""
    """Line of the user's own code, such as ``train.py:41 (validate)``."""
    operation: str = ""
    """What it called there, such as ``fd.mean`` or ``backward``; for a pause its name."""
    busy: bool = False
    """Whether, while it waits, its process computes or its connections carry data."""

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Position | None:
        """Return the position that `to_json` wrote; None if it is none."""
        with contextlib.suppress(ValueError, TypeError):
            values = json.loads(text)
            made = cls(**values)
            if isinstance(made.rank, int) and made.kind in _VERBS:
                return made
        return None


def judge(positions: Sequence[Position]) -> Judgement:
    """Return what the positions of all ranks mean, when none of them has done a step for long."""
    kinds = {position.kind for position in positions}
    if kinds & {"pause", "moving"}:
        return "nothing"
    waiting = [position for position in positions if position.kind == "waiting"]
    if not waiting or len(positions) == 1:  # one rank alone has nothing to wait for: it is slow
        return "hang" if "stopped" in kinds else "pause" if "data" in kinds else "nothing"
    if any(position.busy for position in waiting):
        return "nothing"  # data arrives, or other calls go on between two samples
    return "hang" if kinds <= {"waiting"} | _NOT_COMING else "pause"


def describe(positions: Sequence[Position], *, past: bool = False) -> str:
    """Return where ranks stand: ``rank 0 waits in fd.mean at hang.py:5, rank 1 in backward at base.py:10``."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for position in positions:
        alike.setdefault((position.kind, position.operation, position.place), []).append(position.rank)
    parts = []
    has_waited = False
    for (kind, operation, place), ranks in alike.items():
        one, many, was, were = _VERBS[kind]
        single = len(ranks) == 1
        verb = (was if single else were) if past else (one if single else many)
        if kind == "waiting" and has_waited:
            verb = "in {}"
        has_waited = kind == "waiting"
        words = verb.replace("{}", operation or "a call")
        parts.append(f"{name_ranks(ranks, most=8)} {words}" + (f" at {place}" if place else ""))
    return ", ".join(parts)


def remedy(positions: Sequence[Position]) -> str:
    """Return what to do about a hang or a pause; empty: the positions say it."""
    if judge(positions) == "pause":
        return _PHASE_REMEDY if any(each.kind == "waiting" for each in positions) else ""
    if any(position.kind == "stopped" for position in positions):
        return "kill -CONT resumes a stopped process"
    if any(position.kind in _NOT_COMING for position in positions):
        return ""
    calls = {(position.operation, position.place) for position in positions if position.kind == "waiting"}
    return _REMEDY if len(calls) > 1 else _SAME_REMEDY


def read_positions(run_directory: Path) -> list[Position]:
    """Return what the ranks of a run left, by rank; a rank that does steps leaves nothing."""
    found = []
    for path in position_path(run_directory, 0).parent.glob("rank_*.json"):
        with contextlib.suppress(OSError):
            position = Position.from_json(path.read_text(encoding="utf-8", errors="replace"))
            if position is not None:
                found.append(position)
    return sorted(found, key=lambda position: position.rank)


_VERBS: dict[str, tuple[str, str, str, str]] = {
    "waiting": ("waits in {}", "wait in {}", "waited in {}", "waited in {}"),
    "data": ("waits for data", "wait for data", "waited for data", "waited for data"),
    "pause": ("is in {}", "are in {}", "was in {}", "were in {}"),
    "working": ("is at work", "are at work", "was at work", "were at work"),
    "idle": ("stands", "stand", "stood", "stood"),
    "moving": ("goes on", "go on", "went on", "went on"),
    "ended": ("has ended", "have ended", "had ended", "had ended"),
    "stopped": (
        "is stopped by a signal (SIGSTOP or its like)", "are stopped by a signal (SIGSTOP or its like)",
        "was stopped by a signal (SIGSTOP or its like)", "were stopped by a signal (SIGSTOP or its like)",
    ),
    "unknown": ("cannot be asked", "cannot be asked", "could not be asked", "could not be asked"),
    "silent": ("does not answer", "do not answer", "did not answer", "did not answer"),
}  # fmt: skip
