"""The doctor's end of one host's pipe: a process whose stdin and stdout carry frames."""

from __future__ import annotations

import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from ....core.vocabulary.errors import LaunchError
from ....core.wire.framing import FrameError, read_json
from ...ssh.link.frames import MESSAGE, Channel, Message


@dataclass(frozen=True)
class Target:
    """A host to examine, and the command that brings its probe."""

    name: str
    address: str
    """By which the others reach it, as far as is known here; empty: the host says."""
    command: Sequence[str]
    prepare: Callable[[], None] | None = None
    """Called in the child before the command."""
    preamble: bytes = b""
    """What the command reads before the frames."""
    explain: Callable[[int | None, str], tuple[str, str]] | None = None
    """Makes cause and remedy of the command's exit code and last words."""


class ProbeLost(LaunchError):
    """A host did not answer, or answered nonsense."""


class HostChannel:
    """Questions to one host. Closing it ends the probe."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                list(target.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                preexec_fn=target.prepare,  # noqa: PLW1509 - forked from a process with one thread
            )
        except (OSError, subprocess.SubprocessError) as problem:
            self._errors.close()
            raise ProbeLost(f"cannot start {target.command[0]!r}: {problem}") from None
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._frames = Channel(self._process.stdout.fileno(), self._process.stdin.fileno(), expect_magic=True)
        self._frames.send_raw(target.preamble)
        self._inbox: list[Message] = []

    def send(self, question: Message) -> None:
        """Send a question; a host that is gone is noticed by `receive`."""
        self._frames.send_message(question)

    def receive(self, end: float) -> Message:
        """Return the next answer; raise `ProbeLost` when it has not come by `end`, a time of `time.monotonic`."""
        while not self._inbox:
            left = end - time.monotonic()
            if left <= 0:
                raise ProbeLost("it does not answer", remedy="is it overloaded, or is its connection gone?")
            waiting = [self._frames.write_end] if self._frames.waiting_bytes else []
            select.select([self._frames.read_end], waiting, [], min(left, 1.0))
            self._frames.flush()
            try:
                arrived = self._frames.receive()
                self._inbox += [read_json(payload) for kind, payload in arrived if kind == MESSAGE]
            except FrameError as problem:
                raise ProbeLost(
                    f"it sent no answer of ours: {problem.message}", remedy="what does its shell print at a login?"
                ) from None
            if self._frames.ended and not self._inbox:
                raise self._ended()
        return self._inbox.pop(0)

    def ask(self, question: Message, seconds: float) -> Message:
        """Send a question and return its answer."""
        self.send(question)
        return self.receive(time.monotonic() + seconds)

    def close(self) -> None:
        """End the probe. May be called twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ended(self) -> ProbeLost:
        try:
            code: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        said = self._last_words()
        if self.target.explain is not None:
            cause, remedy = self.target.explain(code, said)
            return ProbeLost(cause, remedy=remedy)
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        return ProbeLost(f"its probe ended: {last[0]}", remedy=f"{self.target.command[0]} -m farandole --version")

    def _last_words(self) -> str:
        self._errors.seek(0, 2)
        self._errors.seek(max(0, self._errors.tell() - 8192))
        return self._errors.read().decode(errors="replace")


def ask_all(
    channels: Mapping[str, HostChannel], questions: Mapping[str, Message], seconds: float
) -> dict[str, Message | ProbeLost]:
    """Ask several hosts at once, each its own question; return each one's answer, or why there is none."""
    for name, question in questions.items():
        channels[name].send(question)
    end = time.monotonic() + seconds
    answers: dict[str, Message | ProbeLost] = {}
    for name in questions:
        try:
            answers[name] = channels[name].receive(end)
        except ProbeLost as problem:
            answers[name] = problem
    return answers
