"""One rank's process: its own session and process group, bound to its cores, dying with the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from ...core.host.process_status import catches
from ...core.vocabulary.errors import LaunchError
from ..job.hosts import HostNamespaces, entering
from .stopped_process import FailureDetector, behind_shells

_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class RankProcess:
    """A started rank. `process_group` outlives it while anything it started lives."""

    rank: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    host: str
    """Where it is, as failures say it."""

    @property
    def process_group(self) -> int:
        """The group of the rank and of all it starts."""
        return self.popen.pid

    @property
    def pipes(self) -> list[tuple[IO[bytes], bool]]:
        """What the rank prints to, and whether it is stderr."""
        assert self.popen.stdout is not None, "a pipe"
        assert self.popen.stderr is not None, "a pipe"
        return [(self.popen.stdout, False), (self.popen.stderr, True)]

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, unless its number may be another's by now.

        SIGTERM and SIGUSR1 warn of the end: a rank that has a handler gets them alone, as workers of its loader
        must live until it has saved. SIGUSR1 would end any other, and is not sent.
        """
        if self.popen.returncode is not None:
            return
        rank = behind_shells(self.popen.pid)
        if number in (signal.SIGTERM, signal.SIGUSR1) and catches(rank, number):
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        elif number != signal.SIGUSR1:
            kill_group(self.process_group, number)

    def close(self) -> None:
        """Let go of it: the group was killed."""
        for pipe, _ in self.pipes:
            pipe.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def start_rank(
    rank: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    cores: Sequence[int],
    host: HostNamespaces | None = None,
    *,
    has_terminal: bool = False,
) -> RankProcess:
    """Start `command`; raise `LaunchError` when it cannot be executed.

    `has_terminal`: it reads this process's stdin, for ``input()`` and ``breakpoint()``; else it reads nothing.
    """
    try:
        popen = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=None if has_terminal else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=preparing(cores, host),  # noqa: PLW1509 - forked from a process with one thread
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise LaunchError(f"rank {rank}: cannot start {command[0]!r}: {problem}") from None
    process = RankProcess(rank, popen, os.pidfd_open(popen.pid), host.name if host else socket.gethostname())
    for pipe, _ in process.pipes:
        os.set_blocking(pipe.fileno(), False)
    return process


def stopping_with_us() -> Callable[[], None]:
    """Return what makes a forked child, one of our own commands, stop as on SIGTERM when this process is gone."""
    return dying_with_us(signal.SIGTERM)


def dying_with_us(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return what makes a forked child get a signal when this process is gone."""
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec nothing may be
    parent = os.getpid()
    number = int(signal_number)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def preparing(cores: Sequence[int], host: HostNamespaces | None) -> Callable[[], None]:
    """Return what makes a forked child die with this process, bound to `cores`, on `host`."""
    die_with_us = dying_with_us()
    enter = None if host is None else entering(host)

    def prepare() -> None:
        die_with_us()
        if enter is not None:
            enter()
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare


# The last resort: a tiny process that ends the ranks when their supervisor is killed, or frozen.
#
# Ranks die with the supervisor by themselves (PR_SET_PDEATHSIG), but not what they started, a loader's workers for
# example; and nothing of a supervisor that was stopped dies. The reaper is forked before anything else, in a
# session of its own, and reads a pipe of lines: the process groups to end, those that have ended, a directory to
# remove, beats, then "done". An end of file without "done" means that the supervisor is gone; where beats were
# promised, silence means that it is frozen. Every group is killed then.
#
# [Note: whose number it is] The number of a group may be reused once the group is empty and its leader has been
# waited for. So a group is killed while its leader is a zombie at least, and the reaper forgets it before the
# leader is waited for.


Say = Callable[[str], None]
_KILLED = "the process that ends all ranks in case this one is killed has been killed itself"


class Reaper:
    """The supervisor's end of the pipe."""

    def __init__(self, *, silence_seconds: float | None = None, say: Say = lambda text: None) -> None:
        """With `silence_seconds`, `beat` has to be called more often than that.

        `say` is told when the reaper was killed, and another took its place.
        """
        self._silence_seconds, self._say = silence_seconds, say
        self._groups: set[int] = set()
        self._trees: set[str] = set()
        self._fork()

    def watch(self, process_group: int) -> None:
        """Have the group killed when this process dies."""
        self._groups.add(process_group)
        self._tell(f"group {process_group}")

    def forget(self, process_group: int) -> None:
        """The group has ended: its number may be another's soon. See [Note: whose number it is]."""
        self._groups.discard(process_group)
        self._tell(f"ended {process_group}")

    def remove(self, directory: str) -> None:
        """Have a directory removed when this process dies."""
        self._trees.add(directory)
        self._tell(f"tree {json.dumps(directory)}")

    def beat(self) -> None:
        """Say that this process is not frozen."""
        self._tell("beat")

    def mind(self) -> None:
        """Replace the reaper if it has been killed. Cheap."""
        if self._is_there and os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self._renew()

    def dismiss(self) -> None:
        """All is in order: let the reaper go."""
        if self._is_there:
            with contextlib.suppress(OSError):
                os.write(self._write_end, b"done\n")
            self._let_go()

    def _fork(self) -> None:
        supervisor = os.getpid()
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._process = os.fork()
        if self._process == 0:
            os.close(self._write_end)
            try:
                _reap(read_end, supervisor, self._silence_seconds)
            finally:
                os._exit(0)
        os.close(read_end)
        self._is_there = True

    def _let_go(self) -> None:
        self._is_there = False
        os.close(self._write_end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)

    def _tell(self, line: str) -> None:
        if not self._is_there:
            return
        try:
            os.write(self._write_end, line.encode() + b"\n")
        except OSError:  # killed, or stopped for so long that the pipe is full
            self._renew()

    def _renew(self) -> None:
        os.kill(self._process, signal.SIGKILL)  # it was not waited for: the number is its own
        self._let_go()
        try:
            self._fork()
            lines = [f"group {group}\n" for group in self._groups]
            lines += [f"tree {json.dumps(tree)}\n" for tree in self._trees]
            os.write(self._write_end, "".join(lines).encode())
        except OSError as problem:
            self._say(f"warning: {_KILLED}, and no other can be started: {problem}")
        else:
            self._say(f"note: {_KILLED}; another took its place")


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended, without waiting for it. See [Note: whose number it is]."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_group(process: subprocess.Popen[bytes]) -> int:
    """Kill a child that leads its group, and all that it has started; return its exit code."""
    if process.returncode is None:
        kill_group(process.pid)
    return process.wait()


def kill_group(process_group: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process group; return whether there was one."""
    try:
        os.killpg(process_group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(read_end: int, supervisor: int, silence_seconds: float | None) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    # Nothing of the supervisor's is held open: a pipe that its own caller reads must end with it.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        if int(name) != read_end:
            with contextlib.suppress(OSError):
                os.close(int(name))
    groups: set[int] = set()
    trees: list[str] = []
    rest = b""
    patience = None if silence_seconds is None else FailureDetector(silence_seconds, time.monotonic())
    while select.select([read_end], [], [], None if patience is None else patience.limit_seconds)[0]:
        if patience is not None:
            patience.heard(time.monotonic())
        piece = os.read(read_end, 4096)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "done":
                return
            if word == "group":
                groups.add(int(value))
            elif word == "ended":
                groups.discard(int(value))
            elif word == "tree":
                trees.append(json.loads(value))
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGKILL)
    for group in groups:
        kill_group(group)
    for tree in trees:
        shutil.rmtree(tree, ignore_errors=True)
