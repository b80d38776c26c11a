"""When a host is given up, and why: its connection ended, or it fell silent, or never answered."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ConfigError
from .host_link import HostLink
from .protocol import SILENCE_SECONDS, START_SECONDS, SUSPECT_SECONDS
from .remote_shell import HostSetup, Trouble, explain, explain_loss

_SILENT = Trouble(
    f"no sign of life for {SILENCE_SECONDS:g} s: frozen, switched off, or its link is cut",
    "look at its power, its cable and its load",
)


@dataclass(frozen=True)
class Ending:
    """Why a host is given up."""

    trouble: Trouble
    exit_code: int = 1
    """Of a job that ends because of it."""
    when_seconds: float | None = None
    """When it happened; None: just now."""


def why_hung_up(link: HostLink, setup: HostSetup, now: float) -> Ending:
    """Return why the pipe has ended before the host said that it was done."""
    code = link.wait(0.3)
    link.read_stderr()
    said = link.said.decode(errors="replace")
    if not link.ready:
        return Ending(explain(link.name, code, said, setup), ConfigError.exit_code)
    if link.silent_seconds(now) > SUSPECT_SECONDS:
        # It was silent before: its own reaper was a little faster than we are.
        return Ending(_SILENT, when_seconds=link.channel.last_heard)
    return Ending(explain_loss(code, said))


def why_silent(link: HostLink, now: float) -> Ending | None:
    """Return why a host that says nothing is given up; None: not yet."""
    if not link.ready:
        if now - link.opened_at <= START_SECONDS:
            return None
        return Ending(
            Trouble(f"it did not answer within {START_SECONDS:g} s", f"try by hand: ssh {link.name} true")
        )
    if link.silent_seconds(now) <= SILENCE_SECONDS:
        return None
    return Ending(_SILENT, when_seconds=link.channel.last_heard)


def nonsense(problem: Exception) -> Ending:
    """Return why a host is given up whose words make no sense."""
    return Ending(Trouble(f"what it says makes no sense: {problem}", "is it the same farandole?"))
