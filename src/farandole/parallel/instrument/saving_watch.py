"""The time of ``torch.save`` in the thread that trains, as the phase "checkpoint", while a session records.

The function under its usual name is replaced by one that notes the time and calls it, and put back when the world
closes. Code that took the name before (``from torch import save``) calls torch's own.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch

from ...comm.world.world import World, has_world, world
from ...core.vocabulary.events import CHECKPOINT, Phase


def watch_saving(here: World) -> None:
    """Record how long ``torch.save`` takes until `here` closes."""
    here.session.keep(_SavingWatch, lambda: _SavingWatch(here))


class _SavingWatch:
    """One replacement of the function, from now until `stop`."""

    def __init__(self, here: World) -> None:
        here.session.call_on_close(self.stop)
        self._original = torch.save
        self._mine = _TimedSave(self._original)
        torch.save = self._mine

    def stop(self) -> None:
        """Put the function back, unless other code has replaced ours meanwhile."""
        if torch.save is self._mine:
            torch.save = self._original


class _TimedSave:
    """Calls the function that it stands for. A saved copy of it is that function."""

    def __init__(self, original: Any) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._thread = threading.get_ident()
        self._depth = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._depth or threading.get_ident() != self._thread:
            return self._original(*arguments, **named)
        self._depth, begin = 1, time.monotonic()
        try:
            return self._original(*arguments, **named)
        finally:
            self._depth = 0
            if has_world():
                world().session.recorder.record(Phase(CHECKPOINT, begin, time.monotonic()))

    def __reduce__(self) -> Any:
        return (_torchs_save, ())


def _torchs_save() -> Any:
    return torch.save
