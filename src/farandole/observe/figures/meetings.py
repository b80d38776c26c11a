"""What a run says of its training where ranks train on their own and meet: `docs/sync.md`."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.vocabulary.events import SETUP_APART, SETUP_MEETINGS, SETUP_SYNC
from ..read.timeline_reader import RankTimeline
from .figures import mean

FEW_MEETINGS = 20
"""From so many on figures of the loss are known (docs/sync.md)."""


def meeting_notes(timelines: Sequence[RankTimeline]) -> list[str]:
    """Return how often ranks met, how far they were apart, and what that means; nothing of other runs."""
    setup = timelines[0].setup if timelines else {}
    sync, count = setup.get(SETUP_SYNC), setup.get(SETUP_MEETINGS)
    if not sync or type(count) is not int:
        return []
    known = [timeline.setup.get(SETUP_APART) for timeline in timelines]
    apart = [float(each) for each in known if isinstance(each, (int, float))]
    times = f"{count} meeting{'s' * (count != 1)}"
    far = f", where ranks were {mean(apart):.2%} apart from their mean" if apart else ""
    notes = [f"sync {sync}: {times}{far}; this is not the training of one process (docs/sync.md)"]
    if count < FEW_MEETINGS:
        few = f"{times} {'is' if count == 1 else 'are'} few"
        notes.append(f"warning: {few}: at equal samples expect a higher loss than without sync; take a smaller H")
    return notes
