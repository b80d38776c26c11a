"""The hosts of an elastic job: fixed ones, or the output of a user's script, run once a second.

The script runs beside the driver's loop, never in it: it is started, read when it has something to say and
killed when it takes too long. Its first failure is an error of the person who wrote it; a later one may
be a passing trouble of the cluster's, and the hosts stay as they were until the time-out.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.vocabulary.errors import ConfigError, LaunchError
from ..supervise.process import end_group, has_ended, stopping_with_us

PERIOD_SECONDS = 1.0
SCRIPT_SECONDS = 30.0
"""The script's time limit for one answer."""
_LONGEST_ANSWER_BYTES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9_.\-\[\]:]*[A-Za-z0-9_.\-\]]")


def parse_hosts(text: str, default_slots: int) -> dict[str, int]:
    """Return hosts and slots of a script's answer; empty lines and lines that begin with # do not count.

    Raises `ValueError` naming the first line that is neither ``host:slots`` nor ``host``.
    """
    found: dict[str, int] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, number = line.rpartition(":")
        if not colon:
            name, number = line, str(default_slots)
        if not _HOST.fullmatch(name) or not number.isascii() or not number.isdigit():
            raise ValueError(f"line {raw!r} is neither host:slots nor host")
        if int(number) > 4096:
            raise ValueError(f"line {raw!r}: {number} slots are more than a host can have (4096)")
        if int(number):
            found[name] = found.get(name, 0) + int(number)
    return found


@dataclass(eq=False)
class Discovery:
    """The hosts, oldest first. `poll` is called often and returns at once."""

    script: Path | None
    default_slots: int = 1
    timeout_seconds: float = 600.0
    """How long the script may keep failing after it has worked once."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """The hosts when there is no script."""
    period_seconds: float = PERIOD_SECONDS
    limit_seconds: float = SCRIPT_SECONDS
    hosts: dict[str, int] = field(default_factory=dict)
    answered: bool = False
    """Whether `hosts` is known."""
    _running: subprocess.Popen[bytes] | None = None
    _text: bytes = b""
    _started_at: float = 0.0
    _next_at: float = float("-inf")
    _failing_since: float | None = None

    def poll(self) -> bool:
        """Go on; return whether hosts or slots have changed.

        Raises `ConfigError` without a first answer, `LaunchError` when none comes for too long.
        """
        if self.script is None:
            changed = not self.answered
            self.hosts, self.answered = dict(self.fixed), True
            return changed
        now = time.monotonic()
        if self._running is None:
            if now < self._next_at:
                return False
            self._start(now)
        try:
            answer = self._read(now)
            if answer is None:
                return False
            found = parse_hosts(answer, self.default_slots)
        except (OSError, ValueError) as problem:
            self._failed(str(problem), now)
            return False
        self._failing_since = None
        return self._take(found)

    def close(self) -> None:
        """Stop a script that runs."""
        if self._running is not None:
            self._end()

    def _start(self, now: float) -> None:
        assert self.script is not None, "there is a script to start"
        command = read_script(self.script)
        self._started_at, self._next_at, self._text = now, now + self.period_seconds, b""
        try:
            self._running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
            )
        except (OSError, subprocess.SubprocessError) as problem:
            raise ConfigError(f"host discovery script {str(self.script)!r} cannot be started: {problem}") from None
        assert self._running.stdout is not None, "it is a pipe"
        os.set_blocking(self._running.stdout.fileno(), False)

    def _read(self, now: float) -> str | None:
        """Return the whole answer; None while there is more to come. Raises `OSError` or `ValueError`."""
        running = self._running
        assert running is not None, "a script runs"
        assert running.stdout is not None, "it is a pipe"
        while data := running.stdout.read(1 << 16):
            self._text += data
            if len(self._text) > _LONGEST_ANSWER_BYTES:
                raise ValueError(f"it printed more than {_LONGEST_ANSWER_BYTES} bytes")
        if not has_ended(running):
            if now - self._started_at > self.limit_seconds:
                raise ValueError(f"it did not end within {self.limit_seconds:g} s")
            return None
        # What was written between the last look and the end.
        self._text += running.stdout.read() or b""
        code = self._end()
        if code:
            raise ValueError(f"exit code {code}" if code > 0 else f"killed by signal {-code}")
        return self._text.decode()

    def _end(self) -> int:
        running, self._running = self._running, None
        assert running is not None, "a script runs"
        code = end_group(running)
        assert running.stdout is not None, "it is a pipe"
        running.stdout.close()
        return code

    def _failed(self, why: str, now: float) -> None:
        if self._running is not None:
            self._end()
        if not self.answered:
            raise ConfigError(
                f"host discovery script {str(self.script)!r} failed: {why}",
                remedy="it must print a line a host, host:slots or host, and end with exit code 0",
            )
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self.timeout_seconds:
            seconds = f"{self.timeout_seconds:g} s"
            raise LaunchError(f"host discovery script {str(self.script)!r} has failed for {seconds}, last: {why}")

    def _take(self, found: Mapping[str, int]) -> bool:
        """Take a new answer; hosts that were there before keep their place before newer ones."""
        stay = {name: found[name] for name in self.hosts if name in found}
        hosts = {**stay, **{name: slots for name, slots in found.items() if name not in stay}}
        changed = hosts != self.hosts or not self.answered
        self.hosts, self.answered = hosts, True
        return changed


def read_script(script: Path) -> Sequence[str]:
    """Return the words of a discovery script: a file, or a command with arguments.

    Raises `ConfigError` when there is no such thing, or it may not be executed.
    """
    words = [str(script.absolute())] if script.exists() else shlex.split(str(script))
    path = shutil.which(words[0]) if words else None
    if path is None:
        remedy = f"chmod +x {script}" if script.is_file() else "name an executable file"
        raise ConfigError(f"host discovery script {str(script)!r} cannot be executed", remedy=remedy)
    return [path, *words[1:]]
