"""One rank's process: its own session and process group, bound to its cores, dying with the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from ...core.host.process_status import catches
from ...core.vocabulary.errors import LaunchError
from ..job.hosts import HostNamespaces, entering
from .reaper import kill_group
from .stopped_process import behind_shells

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
