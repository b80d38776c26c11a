"""The sections of the page, one a file, in reading order. Each takes a `Run` and gives a `Section` or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..content import Run, Section
from . import balance, curves, environment, fixes, late, network, predicted, scaling, step, timeline, tuning

SECTIONS: Sequence[Callable[[Run], Section | None]] = (
    fixes.make,
    step.make,
    late.make,
    timeline.make,
    curves.make,
    network.make,
    tuning.make,
    balance.make,
    scaling.make,
    predicted.make,
    environment.make,
)


def make_sections(run: Run) -> list[Section]:
    """Return those sections for which the run holds something."""
    made = (make(run) for make in SECTIONS)
    return [section for section in made if section is not None]
