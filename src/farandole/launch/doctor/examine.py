"""Asks all hosts everything, and lets them call each other in pairs. Returns facts, and judges nothing."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import farandole

from ...core.framing import FrameError, read_json
from ...core.vocabulary.errors import LaunchError
from ..job.hosts import EmulatedHost, Host, HostFinder, HostSlots, LocalHost
from ..ssh.frames import MESSAGE, Message
from ..ssh.host_failure import explain
from ..ssh.host_link import HostLink
from ..ssh.remote_shell import HostSetup, SshOptions, ssh_command
from ..supervise.process import preparing
from .facts import ClusterFacts, HostFacts, KernelRoute, LinkFacts, Unreachable, read_host_facts
from .link_probe import TOKEN_BYTES
from .this_host import look_up

START_SECONDS = 30.0
ANSWER_SECONDS = 10.0
CALL_SECONDS = 40.0
CLOCK_ROUNDS = 8
ALL_TRANSFERS_SECONDS = 8.0
"""For all rounds together: the more hosts, the shorter each transfer."""
_MOST_TRANSFER_SECONDS, _LEAST_TRANSFER_SECONDS = 0.5, 0.1
_LOOPBACKS = ("", "127.0.0.1", "::1")
_BACK = "bits_per_second_back"
_SAME_VERSION = "install the version of farandole there that is here"

Say = Callable[[str], None]


def examine(targets: Sequence[Target], say: Say = lambda line: None) -> ClusterFacts:
    """Examine the hosts; those that cannot be asked are in `ClusterFacts.unreachable`."""
    with ExitStack() as stack:
        examination = _Examination(say)
        for target in targets:
            examination.open(target, stack)
        say(f"asking {len(examination.channels)} host{'s' * (len(examination.channels) != 1)}")
        examination.ask_facts()
        if len(targets) > 1:
            examination.ask_addresses()
        examination.ask_peers()
        examination.ask_clocks()
        examination.link()
        return examination.facts()


def pair_rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs: every pair of hosts once, and no host in two pairs at a time.

    >>> pair_rounds(["a", "b", "c"])
    [[('b', 'c')], [('a', 'c')], [('a', 'b')]]
    """
    seats = list(range(len(names) + len(names) % 2))
    rounds = []
    for _ in seats[1:]:  # one seat stays, the others move on around the table
        pairs = zip(seats, reversed(seats), strict=True)
        rounds.append([(names[one], names[other]) for one, other in pairs if one < other < len(names)])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [each for each in rounds if each]


@dataclass
class _Examination:
    say: Say

    def __post_init__(self) -> None:
        self.channels: dict[str, HostChannel] = {}
        self._hosts: dict[str, HostFacts] = {}
        self._order: list[str] = []
        self._links: dict[tuple[str, str], LinkFacts] = {}
        self._unreachable: list[Unreachable] = []

    def open(self, target: Target, stack: ExitStack) -> None:
        self._order.append(target.name)
        try:
            channel = HostChannel(target)
        except ProbeLost as problem:
            self._lose(target.name, problem)
            return
        stack.callback(channel.close)
        self.channels[target.name] = channel

    def ask_facts(self) -> None:
        answers = self._ask({name: {"type": "facts"} for name in self.channels}, START_SECONDS)
        for name, answer in answers.items():
            try:
                facts = read_host_facts(name, answer)
            except LaunchError as problem:
                self._lose(name, problem)
                continue
            except (KeyError, TypeError) as problem:
                self._lose(name, ProbeLost(f"its facts cannot be read: {problem!r}", remedy=_SAME_VERSION))
                continue
            self._hosts[name] = replace(facts, address=self.channels[name].target.address or facts.address)
        for name in self.channels.keys() - self._hosts.keys():
            self._lose(name, ProbeLost("it could not look at itself", remedy="is /proc mounted there?"))

    def ask_addresses(self) -> None:
        """Find the address of hosts that were given without one.

        What they would call one of the others from; else what their name means here; else that of an interface.
        """
        known = next((host.address for host in self._hosts.values() if host.address not in _LOOPBACKS), "")
        if known:
            question = {"type": "peers", "peers": {"first": known}, "names": []}
            questions = dict.fromkeys(self._without_address(), question)
            for name, answer in self._ask(questions, ANSWER_SECONDS).items():
                self._know(name, answer["routes"]["first"].get("own_address", ""))
        for name, answers in look_up(self._without_address()).items():
            self._know(name, next(iter(answers or ()), ""))
        for name in self._without_address():
            real = [each for each in self._hosts[name].network.interfaces if each.is_up and not each.is_virtual]
            self._know(name, next((address for each in real for address in each.addresses), ""))

    def _without_address(self) -> list[str]:
        return [name for name, host in self._hosts.items() if host.address in _LOOPBACKS]

    def _know(self, name: str, address: str) -> None:
        if address not in _LOOPBACKS:
            self._hosts[name] = replace(self._hosts[name], address=address)

    def ask_peers(self) -> None:
        """Ask each host how it reaches the others, and what their names and its own mean there."""
        questions: dict[str, Message] = {}
        names = {each for host in self._hosts.values() for each in (host.name, host.hostname)} - {"", "localhost"}
        for name in self.channels:
            peers = {
                each.name: each.address for each in self._hosts.values() if each.name != name and each.address
            }
            questions[name] = {"type": "peers", "peers": peers, "names": sorted(names)}
        for name, answer in self._ask(questions, ANSWER_SECONDS).items():
            routes = {peer: KernelRoute(**route) for peer, route in answer["routes"].items()}
            resolved = {key: None if found is None else tuple(found) for key, found in answer["resolved"].items()}
            host = self._hosts[name]
            self._hosts[name] = replace(host, network=replace(host.network, routes=routes, resolved=resolved))

    def ask_clocks(self) -> None:
        best: dict[str, tuple[float, float]] = {}
        for _ in range(CLOCK_ROUNDS if len(self.channels) > 1 else 0):
            for name in list(self.channels):
                before, begin = time.time(), time.perf_counter()
                answer = self._ask({name: {"type": "clock"}}, ANSWER_SECONDS).get(name, {})
                taken = time.perf_counter() - begin
                if answer:
                    offset = answer["seconds"] - before - taken / 2
                    best[name] = min(best.get(name, (1e9, 0.0)), (taken, offset))
        for name in best.keys() & self._hosts.keys():
            taken, offset = best[name]
            host = self._hosts[name]
            self._hosts[name] = replace(host, clock_offset_seconds=offset, clock_error_seconds=taken / 2)

    # -- links -----------------------------------------------------------------------------------

    def link(self) -> None:
        """Let every pair call each other, and measure once."""
        rounds = pair_rounds([name for name in self._order if name in self.channels])
        share = ALL_TRANSFERS_SECONDS / (2 * len(rounds) or 1)
        seconds = min(_MOST_TRANSFER_SECONDS, max(_LEAST_TRANSFER_SECONDS, share))
        for number, pairs in enumerate(rounds, start=1):
            self.say(f"links, round {number} of {len(rounds)}: " + ", ".join(f"{a} - {b}" for a, b in pairs))
            self._call(pairs, seconds)
            self._call([(target, source) for source, target in pairs], None)

    def _call(self, pairs: Iterable[tuple[str, str]], seconds: float | None) -> None:
        """Let the first of each pair call the second: measuring for `seconds`, or only to see that it answers."""
        pairs = [pair for pair in pairs if set(pair) <= self.channels.keys()]
        token = os.urandom(TOKEN_BYTES).hex()
        questions: dict[str, Message] = {}
        callers = {target: source for source, target in pairs}
        listening = self._ask(
            {
                target: {"type": "listen", "address": self._hosts[target].address, "token": token}
                for _, target in pairs
            },
            ANSWER_SECONDS,
            keep=True,
        )
        for target, answer in listening.items():
            source, address = callers[target], self._hosts[target].address
            if "port" in answer:
                questions[source] = {
                    "type": "call", "address": address, "port": answer["port"], "token": token, "seconds": seconds
                }  # fmt: skip
            else:
                problem = f"{target} cannot listen on {address or 'an unknown address'}: {answer.get('why', '')}"
                self._links[source, target] = LinkFacts(source, target, address, problem=problem)
        targets = dict(pairs)
        for source, answer in self._ask(questions, CALL_SECONDS).items():
            self._note(source, targets[source], answer)
        self._ask({target: {"type": "hang up"} for _, target in pairs if target in self.channels}, ANSWER_SECONDS)

    def _note(self, source: str, target: str, answer: Mapping[str, Any]) -> None:
        if target not in self._hosts:
            return  # gone meanwhile, and noted as such
        said = {key: value for key, value in answer.items() if key not in ("type", _BACK)}
        link, back = LinkFacts(source, target, self._hosts[target].address, **said), answer.get(_BACK)
        earlier = self._links.get((source, target))
        if earlier is not None:  # measured the other way round; this call only says that it got through
            link = replace(link, bits_per_second=earlier.bits_per_second, stalled=earlier.stalled)
            if link.round_trip_seconds is not None:
                link = replace(link, round_trip_seconds=earlier.round_trip_seconds)
        self._links[source, target] = link
        if not link.problem and (target, source) not in self._links:
            self._links[target, source] = replace(
                link, source=target, target=source, address=self._hosts[source].address, bits_per_second=back
            )

    # -- asking ----------------------------------------------------------------------------------

    def _ask(self, questions: Mapping[str, Message], seconds: float, *, keep: bool = False) -> dict[str, Message]:
        """Return the answers of those that answered; the others are asked nothing more. `keep` also failures."""
        answers: dict[str, Message] = {}
        present = {name: question for name, question in questions.items() if name in self.channels}
        for name, answer in ask_all(self.channels, present, seconds).items():
            if isinstance(answer, ProbeLost):
                self._lose(name, answer)
            elif answer["type"] == "answer" or keep:
                answers[name] = answer
        return answers

    def _lose(self, name: str, problem: LaunchError) -> None:
        self.channels.pop(name, None)
        self._hosts.pop(name, None)
        self._unreachable.append(Unreachable(name, problem.message, problem.remedy))

    def facts(self) -> ClusterFacts:
        """Return what was found, hosts in the order of the list."""
        hosts = tuple(self._hosts[name] for name in self._order if name in self._hosts)
        names = [host.name for host in hosts]
        links = tuple(
            self._links[pair] for pair in ((a, b) for a in names for b in names if a != b) if pair in self._links
        )
        return ClusterFacts(hosts, links, tuple(self._unreachable))


# Which hosts to examine, and the doctor's end of the pipe of one: a process that answers in frames.


PROBE = "farandole.launch.doctor.probe"
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
        self._link = HostLink(target.name, target.command)
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
