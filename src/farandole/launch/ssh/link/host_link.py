"""The launcher's end of one host: the ssh process, its pipe, and how far the host has come."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import farandole

from ....core.vocabulary.errors import LaunchError
from ...job.contract import RankSpec
from ...supervise.process import dying_with_us
from ...supervise.reaper import end_group, has_ended
from .frames import Channel, Message
from .remote_shell import AGENT, HostSetup

_MOST_SAID_BYTES = 16 << 10

Phase = Literal["connecting", "ready", "routed", "running", "done", "gone"]


@dataclass(eq=False)
class HostLink:
    """One host of the job."""

    name: str
    places: Sequence[RankSpec]
    command: Sequence[str]
    """What connects us to it."""
    phase: Phase = "connecting"
    ready: Message = field(default_factory=dict)
    route: Message = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)
    """Ranks whose end was not told yet."""
    out_of_memory: bool = False
    said: bytes = b""
    """The last of what ssh and the host's shell wrote to stderr."""

    def open(self, setup: HostSetup, hello: Message, module: str = AGENT) -> None:
        """Start ssh, and say the first words; raise `LaunchError` when there is no ssh.

        `module` has the agent's `main`.
        """
        self.unfinished = {place.rank for place in self.places}
        try:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C is for the launcher alone: it tells the hosts.
                start_new_session=True,
                preexec_fn=dying_with_us(),  # noqa: PLW1509 - forked from a process with one thread
            )
        except (OSError, subprocess.SubprocessError) as problem:
            raise LaunchError(
                f"cannot start {self.command[0]!r}: {problem}", remedy="apt-get install openssh-client"
            ) from None
        assert self.process.stdin is not None, "a pipe"
        assert self.process.stdout is not None, "a pipe"
        assert self.process.stderr is not None, "a pipe"
        self.stderr = self.process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno(), expect_magic=True)
        self.channel.send_raw(setup.preamble([str(Path(farandole.__file__).parents[1])], module))
        self.opened_at = time.monotonic()
        self.channel.send_message(hello)

    @property
    def is_open(self) -> bool:
        """Whether something is still expected from it."""
        return self.phase not in ("done", "gone")

    def silent_seconds(self, now: float) -> float:
        """Return for how long nothing was heard."""
        return now - self.channel.patience.last_heard

    def read_stderr(self) -> bool:
        """Keep what was said; return False at its end."""
        try:
            piece = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said = (self.said + piece)[-_MOST_SAID_BYTES:]
        return bool(piece)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of ssh; None when it does not end."""
        return end_group(self.process) if self._ends_within(seconds) else None

    def close(self, phase: Phase) -> None:
        """Hang up. The host's agent sees the end of the pipe and ends its ranks."""
        self.phase = phase
        self.channel.close()
        if phase == "done":
            self._ends_within(0.5)
        end_group(self.process)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _ends_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not has_ended(self.process):
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True
