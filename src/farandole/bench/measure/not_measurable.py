"""What a benchmark says of something it cannot measure."""

from __future__ import annotations


class NotMeasurable(Exception):
    """This cannot run here; the message says why. It gets no number."""
