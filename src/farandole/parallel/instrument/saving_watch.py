"""The time of ``torch.save`` in the thread that trains, as the phase "checkpoint", while a session records.

A file that two ranks of one host have written is named too: a script for one process does not ask for the rank.

The function under its usual name is replaced by one that notes the time and calls it, and put back when the world
closes. Code that took the name before (``from torch import save``) calls torch's own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...comm.world.world import World, has_world, world
from ...core.vocabulary.events import CHECKPOINT, Phase
from ...core.vocabulary.text import write_notice

_MOST_FILES = 16
"""That are looked at: a script that writes one file on two ranks does so with its first."""


def watch_saving(here: World) -> None:
    """Record how long ``torch.save`` takes until `here` closes."""
    here.session.keep(_SavingWatch, lambda: _SavingWatch(here))


class _SavingWatch:
    """One replacement of the function, from now until `stop`."""

    def __init__(self, here: World) -> None:
        here.session.call_on_close(self.stop)
        self._original = torch.save
        self._mine = _TimedSave(self._original, _Writers(here))
        torch.save = self._mine

    def stop(self) -> None:
        """Put the function back, unless other code has replaced ours meanwhile."""
        if torch.save is self._mine:
            torch.save = self._original


class _TimedSave:
    """Calls the function that it stands for. A saved copy of it is that function."""

    def __init__(self, original: Any, writers: _Writers) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._writers = writers
        self._thread = threading.get_ident()
        self._depth = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._depth or threading.get_ident() != self._thread:
            return self._original(*arguments, **named)
        self._depth, begin = 1, time.monotonic()
        try:
            result = self._original(*arguments, **named)
            self._writers.saved(named.get("f", arguments[1] if len(arguments) > 1 else None))
            return result
        finally:
            self._depth = 0
            if has_world():
                world().session.recorder.record(Phase(CHECKPOINT, begin, time.monotonic()))

    def __reduce__(self) -> Any:
        return (_torchs_save, ())


class _Writers:
    """Which rank of a host was the first to write a file, in the store."""

    def __init__(self, here: World) -> None:
        self._world = here
        self._prefix = here.topic("saved files")
        self._seen: set[str] = set()

    def saved(self, file: Any) -> None:
        """Say once in the job that two ranks have written a file. `file` is what was given to ``torch.save``."""
        here = self._world
        if here.store is None or here.closed or here.local_size == 1 or not isinstance(file, str | os.PathLike):
            return
        path = os.path.realpath(file)
        if path in self._seen or len(self._seen) >= _MOST_FILES or not Path(path).is_file():
            return
        self._seen.add(path)
        key = hashlib.sha256(os.fsencode(f"{here.host}:{path}")).hexdigest()
        with suppress(RuntimeError):  # a store that fails is found by who needs it
            first = here.store.compare_set(f"{self._prefix}/{key}", "", str(here.rank)).decode()
            if first != str(here.rank) and here.store.add(f"{self._prefix}/said", 1) == 1:
                write_notice(
                    f"warning: ranks {min(int(first), here.rank)} and {max(int(first), here.rank)} have written "
                    f"{os.fspath(file)} with torch.save, each over the other's; write it on one rank (if "
                    "farandole.world().is_main: torch.save(...)), or by farandole.Checkpointer"
                )


def _torchs_save() -> Any:
    return torch.save
