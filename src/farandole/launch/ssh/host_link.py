"""The launcher's end of one host: the ssh process, its pipe, and how far the host has come."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import farandole

from ...core.vocabulary.errors import LaunchError
from ..supervise.process import dying_with_us, end_group, has_ended
from .frames import Channel, Message
from .remote_shell import HostSetup

_MOST_STDERR_BYTES = 16 << 10

Phase = Literal["connecting", "ready", "routed", "running", "done", "gone"]


@dataclass(eq=False)
class HostLink:
    """One host of the job."""

    name: str
    command: Sequence[str]
    """What connects us to it."""
    phase: Phase = "connecting"
    ready: Message = field(default_factory=dict)
    route: Message = field(default_factory=dict)
    errors: bytes = b""
    """The last of what ssh and the host's shell wrote to stderr."""

    def open(self, setup: HostSetup, hello: Message) -> None:
        """Start ssh, and send the first message; raise `LaunchError` when there is no ssh."""
        self.start(setup.preamble([str(Path(farandole.__file__).parents[1])]))
        self.channel.send_message(hello)

    def start(self, preamble: bytes, prepare: Callable[[], None] | None = None) -> None:
        """Start the command, which reads `preamble` before the frames; raise `LaunchError` when there is none.

        `prepare` is called in the child before the command; by default it makes the child die with us.
        """
        try:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C is for the launcher alone: it tells the hosts.
                start_new_session=True,
                preexec_fn=prepare or dying_with_us(),  # noqa: PLW1509 - forked from a process with one thread
            )
        except (OSError, subprocess.SubprocessError) as problem:
            raise LaunchError(
                f"cannot start {self.command[0]!r}: {problem}", remedy="apt-get install openssh-client"
            ) from None
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        stdin, stdout, self.stderr = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self.stderr, False)
        self.channel = Channel(stdout, stdin, expect_magic=True)
        self.channel.send_raw(preamble)
        self.opened_at = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether something is still expected from it."""
        return self.phase not in ("done", "gone")

    def silent_seconds(self, now: float) -> float:
        """Return for how long nothing was heard."""
        return now - self.channel.patience.last_heard

    def read_stderr(self) -> bool:
        """Keep what was written to stderr; return False at its end."""
        try:
            piece = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.errors = (self.errors + piece)[-_MOST_STDERR_BYTES:]
        return bool(piece)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of ssh; None when it does not end."""
        return end_group(self.process) if self._ends_within(seconds) else None

    def close(self, phase: Phase) -> None:
        """Hang up. The host's agent sees the end of the pipe and ends its ranks."""
        self.phase = phase
        self.channel.close()
        self._pipes[0].close()  # a probe leaves when its pipe ends; an agent that is done leaves anyway
        if phase == "done":
            self._ends_within(0.5)
        end_group(self.process)
        for pipe in self._pipes:
            pipe.close()

    def _ends_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not has_ended(self.process):
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True
