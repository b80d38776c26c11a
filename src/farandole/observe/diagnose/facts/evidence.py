"""When a difference is more than noise, and how numbers are put into words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ....core.vocabulary.units import format_seconds, format_share
from .finding import Confidence

LEAST_SHARE = 0.02
"""Fraction of a step; a smaller cost is not a finding."""
_SURE = 5.0
"""Standard errors by which a median must differ from 0; ten ranks and as many phases are tried at a time."""
_FEW = 5
"""With fewer steps than this nothing is certain."""

SHOWN_RANKS = 4
"""Most ranks that a finding's title lists; it counts the others."""


def stands_out(differences: Sequence[float]) -> bool:
    """Return whether the median of paired differences is above 0 by more than chance."""
    if not differences:
        return False
    middle = statistics.median(differences)
    if middle <= 0:
        return False
    if len(differences) < _FEW:
        return min(differences) > 0
    spread = 1.4826 * statistics.median([abs(d - middle) for d in differences])
    above = sum(d > 0 for d in differences) / len(differences)
    return above >= 0.75 and middle > _SURE * 1.25 * spread / math.sqrt(len(differences))


def confidence(steps: int) -> Confidence:
    """Return how much so many steps are worth."""
    return "high" if steps >= 20 else "medium" if steps >= _FEW else "low"


def format_cost(seconds: float, share: float) -> str:
    """Return a cost as text: ``50.3 ms a step (31%)``."""
    return f"{format_seconds(seconds)} a step ({format_share(share)})"
