"""The HTML report of a run: one file, no references to anything outside it, from the run directory alone."""

from __future__ import annotations

from .page import write_report

__all__ = ["write_report"]
