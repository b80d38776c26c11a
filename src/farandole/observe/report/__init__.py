"""The HTML report of a run: one file, no references to anything outside it, from the run directory alone.

`run` reads, `sections` say what to show as plain `blocks`, `charts` draw, `page` writes, `watch` writes again.
"""

from __future__ import annotations

from .page import watch_report, write_report

__all__ = ["watch_report", "write_report"]
