"""Lines of Farandole's own on the standard error: one prefix, so that users tell them from their script's."""

from __future__ import annotations

import sys

NOTICE = "farandole: "


def write_notice(text: str) -> None:
    """Write ``farandole: text`` and a newline to the standard error, at once."""
    sys.stderr.write(f"{NOTICE}{text}\n")
    sys.stderr.flush()
