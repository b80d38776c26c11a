"""Which congestion control emulated hosts use, of those that this machine lets a network namespace have."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...core.host.congestion import (
    PACED,
    SETTINGS,
    USUAL,
    allowed_congestion_controls,
    available_congestion_controls,
)
from ...core.vocabulary.errors import ConfigError


class CongestionChoice(NamedTuple):
    """What TCP of the hosts uses. `name` empty: what new namespaces have. `note`: why it is not the usual one."""

    name: str
    note: str


def choose(asked: str | None, settings: Path = SETTINGS) -> CongestionChoice:
    """Return what is asked for, else cubic, else one that does not pace, else what is there.

    A machine's own choice may be any: the same emulated link should mean the same on all of them. Raises
    `ConfigError` for one that is asked for and cannot be had.
    """
    if asked is not None:
        _check(asked, settings)
        return CongestionChoice(asked, "")
    allowed = allowed_congestion_controls(settings)
    if USUAL in allowed:
        return CongestionChoice(USUAL, "")
    steady = next((name for name in allowed if name not in PACED), "")
    return CongestionChoice(
        steady,
        f"TCP of the hosts uses {steady or 'what this machine uses'}, not {USUAL}: this machine allows namespaces "
        f"only {' '.join(allowed) or 'what it does not say'} (net.ipv4.tcp_allowed_congestion_control)",
    )


def _check(name: str, settings: Path) -> None:
    available, allowed = available_congestion_controls(settings), allowed_congestion_controls(settings)
    if name not in available:
        raise ConfigError(
            f"--congestion-control {name!r}: expected one that this kernel has: {', '.join(available) or 'none'}",
            remedy="others may be modules, as tcp_bbr is: modprobe tcp_bbr",
        )
    if allowed and name not in allowed:
        raise ConfigError(
            f"--congestion-control {name!r}: this kernel has it, and allows network namespaces only "
            f"{', '.join(allowed)}",
            remedy=f"choose one of them, or allow it: sysctl -w net.ipv4.tcp_allowed_congestion_control="
            f"'{' '.join(allowed)} {name}'",
        )
