"""How often a job's progress line is shown."""

from __future__ import annotations

from .rank_output import Output

STATUS_SECONDS = 1.0
_PLAIN_STATUS_SECONDS = 10.0
"""Where lines stay: not on a terminal."""


def show_status(output: Output, text: str | None) -> float:
    """Show a line, if there is one, and return the seconds until the next."""
    if text is not None:
        output.status(text)
    return STATUS_SECONDS if output.is_live else _PLAIN_STATUS_SECONDS
