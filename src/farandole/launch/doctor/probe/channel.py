"""Which hosts to examine, and the doctor's end of the pipe of one: a process that answers in frames."""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import farandole

from ....core.framing import FrameError, read_json
from ....core.vocabulary.errors import LaunchError
from ...job.hosts import EmulatedHost, Host, HostFinder, HostSlots, LocalHost
from ...ssh.link.frames import MESSAGE, Message
from ...ssh.link.host_failure import explain
from ...ssh.link.host_link import HostLink
from ...ssh.link.remote_shell import HostSetup, SshOptions, ssh_command
from ...supervise.process import preparing

PROBE = "farandole.launch.doctor.probe.probe"
_PROBE_HERE = [sys.executable, "-m", PROBE]
_SHELL = frozenset("$`;&|<>(){}[]*!#~'\"\\")


@dataclass(frozen=True)
class Target:
    """A host to examine, and the command that brings its probe."""

    name: str
    address: str
    """By which the others reach it, as far as is known here; empty: the host says."""
    command: Sequence[str]
    prepare: Callable[[], None] | None = None
    """Called in the child before the command."""
    setup: HostSetup | None = None
    """What the host does before its probe starts; None: the command needs none."""


def find_targets(
    hosts: Sequence[HostSlots], finder: HostFinder, ssh: SshOptions, setup: HostSetup
) -> list[Target]:
    """Return a target for each host of the list; of an empty one, the emulated hosts or this machine.

    Raises `ConfigError` for a name that is none, and for a host that is not of the emulation.
    """
    found = finder.find_all(hosts)
    if all(isinstance(host, LocalHost) and host.port is None for host in found):
        return [Target(socket.gethostname(), "", _PROBE_HERE)]  # however many names it has
    return [_target(host, ssh, setup) for host in found]


def _target(host: Host, ssh: SshOptions, setup: HostSetup) -> Target:
    if isinstance(host, EmulatedHost):
        here = preparing((), host.namespaces)
        return Target(host.namespaces.name, host.namespaces.address, _PROBE_HERE, here)
    if isinstance(host, LocalHost) and host.port is None:
        return Target(host.name, "", _PROBE_HERE)
    return Target(host.name, "", ssh_command(host.name, host.port, ssh), setup=setup)


class ProbeLost(LaunchError):
    """A host did not answer, or answered nonsense."""


class HostChannel:
    """Questions to one host. Closing it ends the probe."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._link = HostLink(target.name, (), target.command)
        paths = [str(Path(farandole.__file__).parents[1])]  # where it lies here; it may be installed there, too
        try:
            self._link.start(b"" if target.setup is None else target.setup.preamble(paths, PROBE), target.prepare)
        except LaunchError as problem:
            raise ProbeLost(problem.message, remedy=problem.remedy) from None
        self._channel = self._link.channel
        self._stderr = [self._link.stderr]
        """Until its end."""
        self._inbox: list[Message] = []

    def send(self, question: Message) -> None:
        """Send a question; a host that is gone is noticed by `receive`."""
        self._channel.send_message(question)

    def receive(self, end: float) -> Message:
        """Return the next answer; raise `ProbeLost` when it has not come by `end`, a time of `time.monotonic`."""
        while not self._inbox:
            left = end - time.monotonic()
            if left <= 0:
                raise ProbeLost("it does not answer", remedy="is it overloaded, or is its connection gone?")
            waiting = [self._channel.write_end] if self._channel.waiting_bytes else []
            select.select([self._channel.read_end, *self._stderr], waiting, [], min(left, 1.0))
            if self._stderr and not self._link.read_stderr():  # a pipe that is full would hold the probe
                self._stderr.clear()
            self._channel.flush()
            try:
                arrived = self._channel.receive()
                self._inbox += [_harmless(read_json(payload)) for kind, payload in arrived if kind == MESSAGE]
            except FrameError as problem:
                raise ProbeLost(
                    f"it sent no answer of ours: {problem.message}", remedy="what does its shell print at a login?"
                ) from None
            if self._channel.ended and not self._inbox:
                raise self._ended()
        return self._inbox.pop(0)

    def close(self) -> None:
        """End the probe. May be called twice."""
        self._link.close("done")

    def _ended(self) -> ProbeLost:
        code = self._link.wait(1.0)
        self._link.read_stderr()
        stderr = self._link.errors.decode(errors="replace")
        if self.target.setup is not None:
            failure = explain(self.target.name, code, stderr, self.target.setup)
            return ProbeLost(failure.cause, remedy=failure.remedy)
        last = stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return ProbeLost(f"its probe ended: {last[0]}", remedy=f"{self.target.command[0]} -m farandole --version")


def _harmless(value: Any) -> Any:
    """Return what a host said without what a terminal or, in a line to paste, a shell would read as its own."""
    if isinstance(value, str):
        return "".join("?" if c in _SHELL or not c.isprintable() else c for c in value)
    if isinstance(value, dict):
        return {_harmless(key): _harmless(inner) for key, inner in value.items()}
    return [_harmless(inner) for inner in value] if isinstance(value, list) else value


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
