"""When a host is given up, and why: its connection ended, or it fell silent, or never answered."""

from __future__ import annotations

from dataclasses import dataclass

from ....core.vocabulary.errors import ConfigError
from .frames import SILENCE_SECONDS
from .host_link import HostLink
from .protocol import START_SECONDS, SUSPECT_SECONDS
from .remote_shell import HostSetup, Trouble, explain, explain_loss

_HURRY_SECONDS = 0.5
"""Hosts may have heard nothing for a while before we stood still."""


@dataclass(frozen=True)
class HostFailure:
    """Why a host is given up."""

    trouble: Trouble
    exit_code: int = 1
    """Exit code of a job that ends because of it."""
    when_seconds: float | None = None
    """When it happened; None: just now."""
    is_ours: bool = False
    """Whether it is no fault of the host, but of this launcher."""


def why_hung_up(link: HostLink, setup: HostSetup, now: float, *, stood_still_seconds: float = 0.0) -> HostFailure:
    """Return why the pipe has ended before the host said that it was done.

    `stood_still_seconds`: for how long we did, a moment ago.
    """
    code = link.wait(0.3)
    link.read_stderr()
    said = link.said.decode(errors="replace")
    if not link.ready:
        return HostFailure(explain(link.name, code, said, setup), ConfigError.exit_code)
    if stood_still_seconds > SILENCE_SECONDS - _HURRY_SECONDS:
        cause = (
            f"this launcher stood still for {stood_still_seconds:.0f} s; hosts stop their ranks when they have "
            f"heard nothing for {SILENCE_SECONDS:g} s"
        )
        return HostFailure(Trouble(cause, "was it stopped (Ctrl-Z), or its machine asleep?"), is_ours=True)
    if link.silent_seconds(now) > SUSPECT_SECONDS:
        # It was silent before: its own reaper was a little faster than we are.
        return _silent(link)
    return HostFailure(explain_loss(code, said))


def why_silent(link: HostLink, now: float) -> HostFailure | None:
    """Return why a host that says nothing is given up; None: not yet."""
    if not link.ready:
        if now - link.opened_at <= START_SECONDS:
            return None
        return HostFailure(
            Trouble(f"it did not answer within {START_SECONDS:g} s", f"try by hand: ssh {link.name} true")
        )
    return _silent(link) if link.channel.patience.is_over(now) else None


def _silent(link: HostLink) -> HostFailure:
    patience = link.channel.patience
    cause = f"no sign of life for {patience.limit_seconds:.0f} s: frozen, switched off, or its link is cut"
    trouble = Trouble(cause, "look at its power, its cable and its load")
    return HostFailure(trouble, when_seconds=patience.last_heard)


def nonsense(problem: Exception) -> HostFailure:
    """Return why a host is given up whose words make no sense."""
    return HostFailure(Trouble(f"what it says makes no sense: {problem}", "is it the same farandole?"))
