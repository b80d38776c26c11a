"""The parts of a step (`step_parts`) by the names and colours that the page gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...figures.step_parts import StepParts

PARTS = ("compute", "communication", "waiting", "data", "pauses", "rest")
NAMES: Mapping[str, str] = {
    "compute": "compute",
    "communication": "exposed communication",
    "waiting": "waiting for others",
    "data": "data loading",
    "pauses": "pauses",
    "rest": "rest",
    "hidden": "hidden communication",
}
STYLES = [f"part-{name}" for name in PARTS]


def mean_parts(parts: Sequence[StepParts]) -> dict[str, float]:
    """Return the mean seconds a step by part, with ``hidden`` and ``seconds``."""
    count = max(1, len(parts))
    return {name: sum(getattr(part, name) for part in parts) / count for name in (*PARTS, "hidden", "seconds")}
