"""What happens to the links while a command runs: ``--script "30s:100mbit,60s:1=cut,70s:1=restore"``.

Entries are separated by commas, each ``TIME:WHAT`` or ``TIME:HOST=WHAT`` with WHAT a rate, ``cut`` or
``restore``. Times count from the start of the command. Without a host all links are meant.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.units import parse_bits_per_second, parse_seconds
from .network import Network, describe_rate

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
