"""Run a command on the first host of an emulated network, play the script, count the bytes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core import env
from ..core.vocabulary.errors import ConfigError, LaunchError
from ..core.vocabulary.units import parse_bits_per_second, parse_seconds
from .namespaces import LinkBytes, Network, describe_rate
from .supervise.job_loop import ENDING, handling
from .supervise.process import preparing

# What happens to the links while a command runs: ``--script "30s:100mbit,60s:1=cut,70s:1=restore"``.
#
# Entries are separated by commas, each ``TIME:WHAT`` or ``TIME:HOST=WHAT`` with WHAT a rate, ``cut`` or
# ``restore``. Times count from the start of the command. Without a host all links are meant.

_EXPECTED = (
    'expected TIME:RATE, TIME:cut or TIME:restore, for one host TIME:HOST=..., e.g. "30s:100mbit,60s:1=cut"'
)


@dataclass(frozen=True, order=True)
class LinkChange:
    """One change of one link, or of all."""

    seconds: float
    what: str
    """"cut", "restore" or "rate"."""
    host: int | None = None
    bits_per_second: float | None = None

    def apply(self, network: Network) -> None:
        """Do it."""
        hosts = range(network.host_count) if self.host is None else [self.host]
        for host in hosts:
            if self.what == "cut":
                network.cut(host)
            elif self.what == "restore":
                network.restore(host)
            else:
                assert self.bits_per_second is not None, "a change of rate has one"
                network.set_rate(self.bits_per_second, host)

    def to_text(self) -> str:
        """Say it in a line."""
        which = "all links" if self.host is None else f"the link of host{self.host}"
        if self.what == "rate":
            return f"{which}: {describe_rate(self.bits_per_second)}"
        return f"{which}: {self.what}"


def parse_script(text: str, host_count: int) -> list[LinkChange]:
    """Read a script; return its changes in order of time."""
    return sorted(
        (_parse_change(entry.strip(), host_count) for entry in text.split(",") if entry.strip()),
        key=lambda change: change.seconds,
    )


def _parse_change(entry: str, host_count: int) -> LinkChange:
    when, colon, rest = entry.partition(":")
    if not colon or not rest:
        raise ConfigError(f"--script {entry!r}: {_EXPECTED}")
    host_text, equals, what = rest.rpartition("=")
    host = None
    if equals:
        digits = host_text.removeprefix("host")
        if not digits.isdecimal() or int(digits) >= host_count:
            raise ConfigError(f"--script {entry!r}: there is no host {host_text!r}, only 0 to {host_count - 1}")
        host = int(digits)
    try:
        seconds = parse_seconds(when)
        if what in ("cut", "restore"):
            return LinkChange(seconds, what, host)
        return LinkChange(seconds, "rate", host, parse_bits_per_second(what))
    except ConfigError as problem:
        raise ConfigError(f"--script {entry!r}: {problem.message}", remedy=_EXPECTED) from None


_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class EmulatedRun:
    """How the command ended, and what crossed the links."""

    exit_code: int
    seconds: float
    links: list[LinkBytes]


def run_session(
    network: Network,
    command: Sequence[str],
    changes: Sequence[LinkChange],
    *,
    stdout: int | None = None,
    typed_command: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> EmulatedRun:
    """Run `command` as a process of host0 that knows all hosts; return when it has ended.

    Signals are passed on to it, and it dies with this process. `typed_command` is what the user typed: the run's
    records keep it.
    """
    typed = {} if not typed_command else {env.TYPED: json.dumps(list(typed_command))}
    environment = env.inherited_environment({env.HOSTS_FILE: str(network.hosts_file), **typed})
    before = network.link_bytes()
    begin = time.monotonic()
    try:
        child = subprocess.Popen(
            list(command),
            env=environment,
            stdout=stdout,
            start_new_session=True,
            preexec_fn=preparing((), network.hosts[0]),  # noqa: PLW1509 - forked from a process with one thread
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise LaunchError(f"cannot start {command[0]!r} on host0: {problem}") from None
    waiting = list(changes)
    with handling(ENDING, lambda number, _: child.send_signal(number)):
        try:
            while child.poll() is None:
                now = time.monotonic() - begin
                while waiting and waiting[0].seconds <= now:
                    change = waiting.pop(0)
                    change.apply(network)
                    say(f"{now:.1f} s: {change.to_text()}")
                time.sleep(_TICK_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    seconds = time.monotonic() - begin
    code = child.returncode
    links = _since(before, network.link_bytes())
    for host in sorted({link.host for link in before} - {link.host for link in links}):
        say(f"{host} is gone: the process that kept it was killed, and what crossed its links is not known")
    return EmulatedRun(code if code >= 0 else 128 - code, seconds, links)


def _since(before: list[LinkBytes], after: list[LinkBytes]) -> list[LinkBytes]:
    earlier = {(link.host, link.interface): link for link in before}
    return [
        LinkBytes(b.host, b.interface, b.sent_bytes - a.sent_bytes, b.received_bytes - a.received_bytes)
        for b in after
        if (a := earlier.get((b.host, b.interface))) is not None
    ]
