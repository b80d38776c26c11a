"""Worlds of forked ranks, and how each rank of one ended."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import farandole as fd
from farandole.core.vocabulary.errors import FarandoleError
from tests.programs.forked_ranks import forked, free_port, wait_for

SECONDS = 60.0
"""For a world."""
_PATIENCE_SECONDS = 3.0
"""A rank with an error waits so long for the others to end by their own."""
TRANSPORT = ("PeerLost", "Stalled")
"""Errors that say that another rank is gone, and not why."""


@dataclass
class Outcome:
    """How one rank ended: "done", "refused" by one of our errors, "crash" by another one, or "hang"."""

    kind: str
    value: Any = None
    """What was played, where it is done."""
    error: str = ""
    """The type's name."""
    text: str = ""
    exit_code: int = 0


def play_world(
    play: Callable[[], Any], ranks: int, folder: Path, name: str, *, hosts: int = 1, seconds: float = SECONDS
) -> list[Outcome]:
    """Play on forked ranks; return how each of them ended. `name` is that of their files in `folder`."""
    port = free_port()
    files = [folder / f"{name}-{rank}.ended" for rank in range(ranks)]

    def played(rank: int) -> None:
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(seconds * 0.9)
        _pretend_hosts(rank, ranks, hosts)
        outcome = _ended(play)
        writing = files[rank].with_suffix(".new")
        writing.write_bytes(pickle.dumps(outcome))
        writing.rename(files[rank])
        end = time.monotonic() + _PATIENCE_SECONDS
        while outcome.kind != "done" and time.monotonic() < end and not all(each.exists() for each in files):
            time.sleep(0.01)
        if outcome.kind == "done":
            fd.shutdown()

    children = [
        forked(lambda rank=rank: played(rank), rank, ranks, port, folder / f"{name}-{rank}.log")  # type: ignore[misc]
        for rank in range(ranks)
    ]
    codes = wait_for(children, seconds)
    return [
        pickle.loads(file.read_bytes()) if file.exists() else _unended(code, file.with_suffix(".log"))
        for code, file in zip(codes, files, strict=True)
    ]


def _ended(play: Callable[[], Any]) -> Outcome:
    try:
        return Outcome("done", play())
    except FarandoleError as problem:
        return Outcome("refused", None, type(problem).__name__, str(problem), problem.exit_code)
    except Exception as problem:
        return Outcome("crash", None, type(problem).__name__, f"{str(problem)[:300]} [{_frames(problem)}]", 1)


def _frames(problem: BaseException) -> str:
    """Return the last places of a traceback, the innermost first."""
    frames = traceback.extract_tb(problem.__traceback__)[:-9:-1]
    return " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames)


def _unended(code: int, log: Path) -> Outcome:
    said = log.read_text(errors="replace")[-1500:] if log.exists() else ""
    return Outcome("hang" if code < 0 else "crash", None, "", f"exit code {code}: {said}", code)


def _pretend_hosts(rank: int, ranks: int, hosts: int) -> None:
    own = ranks // hosts
    os.environ |= {
        "LOCAL_RANK": str(rank % own), "LOCAL_WORLD_SIZE": str(own), "GROUP_RANK": str(rank // own),
        "GROUP_WORLD_SIZE": str(hosts), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def class_of(outcomes: Sequence[Outcome], *, may_differ: bool = False) -> tuple[str, str]:
    """Return "done", "refused", "crash", "hang" or "refused differently" for all ranks, and what to say of it.

    `may_differ`: ranks disagree, and so they may say, with exit code 1.
    """
    kinds = {each.kind for each in outcomes}
    if kinds == {"done"}:
        return "done", ""
    for kind in ("crash", "hang"):
        if kind in kinds:
            return kind, _told(outcomes)
    errors = {each.error for each in outcomes}
    if kinds != {"refused"} or len(errors) > 1 or errors & {*TRANSPORT}:
        return "refused differently", _told(outcomes)
    if len({_message_class(each.text) for each in outcomes}) > 1:
        return "refused differently", _told(outcomes)
    if any(each.exit_code != 2 for each in outcomes) and not may_differ:
        return "refused differently", f"exit code {outcomes[0].exit_code}: {_told(outcomes)}"
    return "refused", f"{outcomes[0].error}: {outcomes[0].text}"


def _message_class(text: str) -> str:
    """Return a message without what may differ from rank to rank: numbers and names."""
    return re.sub(r"\d+", "0", text)[:60]


def _told(outcomes: Sequence[Outcome]) -> str:
    return " | ".join(
        f"rank {rank} {each.kind}: {each.error} {each.text}".strip()[:1200] for rank, each in enumerate(outcomes)
    )
