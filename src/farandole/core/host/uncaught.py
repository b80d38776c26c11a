"""Uncaught errors of our own before there is a world: one line, and an account for the launcher.

`fd.init` puts its own hook in this one's place: that one knows the world's rank and how many steps were done.
"""

from __future__ import annotations

import socket
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ..environ.env import read_run_settings
from ..launchers.rank_variables import read_rank_variables
from ..vocabulary.errors import ConfigError, FarandoleError
from ..vocabulary.notice import write_notice
from ..vocabulary.run_files import Crash

_OURS = str(Path(__file__).parents[2])


class _OneLineHook:
    """In the place of `sys.excepthook`."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, FarandoleError):
            self.previous(kind, error, trace)
            return
        error.message = f"{_place(trace)}{error.message}"
        try:
            variables, directory = read_rank_variables(), read_run_settings().run_directory
        except ConfigError:
            variables, directory = None, None
        rank = variables.rank if variables else 0
        if directory is not None:
            Crash.from_exception(
                error, trace, rank=rank, host=socket.gethostname(), step=0, ours=True,
                consequence=False, exit_code=error.exit_code,
            ).write(Path(directory))  # fmt: skip
        write_notice(str(error))


def report_uncaught_errors() -> None:
    """Show uncaught errors of our own in one line from now on; leave an account in the run directory."""
    if not isinstance(sys.excepthook, _OneLineHook):
        sys.excepthook = _OneLineHook(sys.excepthook)


def hook_before() -> Any:
    """Return the hook for uncaught errors without this module's: for one that takes its place."""
    hook = sys.excepthook
    return hook.previous if isinstance(hook, _OneLineHook) else hook


def _place(trace: TracebackType | None) -> str:
    """Return the line outside of this package that led to the error: ``train.py:12: ``."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_OURS)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
