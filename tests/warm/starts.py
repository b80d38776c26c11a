"""How a warm process starts Python programs: it forks itself where `subprocess` would execute an interpreter."""

from __future__ import annotations

import _posixsubprocess
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .program import Pristine, Program, read_program

_IS_OLD = sys.version_info < (3, 11)
_PLACE, _NAME = (_posixsubprocess, "fork_exec") if _IS_OLD else (subprocess, "_fork_exec")
"""What `subprocess` calls to start a child."""
_PREPARE = 20 if _IS_OLD else 21
"""The place of ``preexec_fn`` among its arguments. Before 3.11 there was none for the process group."""


@dataclass(frozen=True)
class _Start:
    """The arguments of ``_posixsubprocess.fork_exec``, by their places."""

    words: Sequence[Any]
    executables: Sequence[bytes]
    close_fds: bool
    kept: Sequence[int]
    directory: Any
    environment: Sequence[bytes] | None
    stdin: tuple[int, int]
    stdout: tuple[int, int]
    stderr: tuple[int, int]
    problem: tuple[int, int]
    restore_signals: bool
    new_session: bool
    others: tuple[Any, ...]
    """Process group, group, groups, user, mask: -1 or None where they are to stay."""
    prepare: Callable[[], None] | None

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> _Start:
        words, executables, close_fds, kept, directory, environment = arguments[:6]
        stdin, stdout, stderr, problem = ((arguments[i], arguments[i + 1]) for i in range(6, 14, 2))
        restore, session, *others = arguments[14:_PREPARE]
        return cls(
            words, executables, close_fds, kept, directory, environment,
            stdin, stdout, stderr, problem, restore, session, tuple(others), arguments[_PREPARE],
        )  # fmt: skip

    def read_environment(self) -> dict[str, str]:
        if self.environment is None:
            return dict(os.environ)
        pairs = (os.fsdecode(pair).partition("=") for pair in self.environment)
        return {name: value for name, _, value in pairs}


def start_warm(pristine: Pristine) -> None:
    """From now on, start Python programs of this process by forking it."""
    real = getattr(_PLACE, _NAME)

    def fork_exec(*arguments: Any) -> int:
        start = _Start.read(arguments)
        program = _program(start, pristine)
        if program is None:
            pid: int = real(*arguments)
            return pid
        pid = os.fork()
        if pid == 0:
            if not program.is_launcher:  # the others start their children as everybody does
                setattr(_PLACE, _NAME, real)
            _become(start, program, pristine)
        return pid

    setattr(_PLACE, _NAME, fork_exec)


def _program(start: _Start, pristine: Pristine) -> Program | None:
    """Return what to become; None when it has to be executed."""
    if not start.close_fds or any(value not in (-1, None) for value in start.others):
        return None
    if pristine.is_followed or threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - names only
        return None
    found = next((Path(os.fsdecode(name)) for name in start.executables if os.access(name, os.X_OK)), None)
    here = Path(sys.executable)
    if found is None or found.parent != here.parent or not found.name.startswith("python"):
        return None
    if not found.samefile(here):
        return None
    words = [os.fsdecode(word) for word in start.words]
    return read_program(words, start.read_environment(), pristine.environment)


def _become(start: _Start, program: Program, pristine: Pristine) -> NoReturn:
    environment = start.read_environment()
    told = start.problem[1]
    try:
        connect_standard_streams(start.stdin[0], start.stdout[1], start.stderr[1])
        if start.directory is not None:
            os.chdir(start.directory)
        if start.restore_signals:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
        if start.new_session:
            os.setsid()
    except OSError as problem:
        _give_up(told, f"OSError:{problem.errno or errno.EIO:X}:noexec")
    if start.prepare is not None:
        try:
            start.prepare()
        except BaseException:
            _give_up(told, "SubprocessError:0:Exception occurred in preexec_fn.")
    close_all_but({0, 1, 2, *(number for number in start.kept if number != told)})
    pristine.become(program, environment)


def _give_up(told: int, problem: str) -> NoReturn:
    os.write(told, problem.encode())
    os._exit(255)


def connect_standard_streams(*sources: int) -> None:
    """Make `sources` standard input, output and error; -1 leaves what is there."""
    lifted = [
        fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, 3) if 0 <= source < 3 and source != target else source
        for target, source in enumerate(sources)
    ]
    for target, source in enumerate(lifted):
        if source == target:
            os.set_inheritable(source, True)
        elif source != -1:
            os.dup2(source, target)


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor that is not in `kept`."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError as problem:
                if problem.errno != errno.EBADF:  # that of the listing itself
                    raise
