"""The HTML report of a run: one file, no references to anything outside it, from the run directory alone.

`content` reads, the sections, one a file, say what to show as plain blocks, `charts` draw, `page` writes.
"""

from __future__ import annotations

from .page import watch_report, write_report

__all__ = ["watch_report", "write_report"]
