"""The TCP congestion control of this host (Linux only).

[Note: bursts and pacing] Training sends in bursts: some buckets in one go, then nothing until the next step. BBR
sends at the rate it believes the path to have, and after a pause that belief may be wrong for a while: over an
emulated link of 100 Mbit/s, 3 to 10 of 90 exchanges in bf16 took 1.3 to 5 times as long as usual with it, and one
of 140 with cubic (docs/results/network.md). So a run says what it had.
"""

from __future__ import annotations

from pathlib import Path

SETTINGS = Path("/proc/sys/net/ipv4")
IN_USE = SETTINGS / "tcp_congestion_control"
USUAL = "cubic"
"""Linux's own choice."""
PACED = ("bbr",)
"""Those that send at a rate learned before a pause."""


def congestion_control() -> str | None:
    """Return what new connections of this host use, or None where the system does not say.

    In a network namespace: what is used there.
    """
    try:
        return IN_USE.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def available_congestion_controls(settings: Path = SETTINGS) -> tuple[str, ...]:
    """Return those that this kernel has loaded."""
    return _names(settings / "tcp_available_congestion_control")


def allowed_congestion_controls(settings: Path = SETTINGS) -> tuple[str, ...]:
    """Return those that every user may set; in a network namespace no others can be set, not even by root."""
    return _names(settings / "tcp_allowed_congestion_control")


def _names(file: Path) -> tuple[str, ...]:
    try:
        return tuple(file.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return ()
