"""What a run says where it trains unlike one process: ranks on their own, late gradients, lossy codecs."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.events import SETUP_APART, SETUP_MEETINGS, SETUP_SYNC
from ...core.vocabulary.sync_spec import EVERY_STEP, MEASURED, SyncSpec
from ..read.run_reader import RunRecords
from ..read.timeline_reader import RankTimeline
from .figures import mean

FEW_MEETINGS = 20
"""From so many on figures of the loss are known (docs/sync.md)."""
_LEAST_BITS = 4
"""A codec that sends each element in so many loses next to nothing of what a step learns (docs/codecs.md)."""


def sync_of(records: RunRecords) -> SyncSpec:
    """Return when the run's replicas agree."""
    text = str(records.plan.get("sync", EVERY_STEP))
    try:
        return SyncSpec.parse(EVERY_STEP if text == MEASURED else text)
    except PlanError:  # of a newer version
        return SyncSpec()


def codec_of(records: RunRecords) -> str:
    """Return the codec that was used for most bytes; "none" when nothing says another."""
    layouts = records.timelines[0].layouts if records.timelines else []
    if layouts:
        by_codec: dict[str, int] = {}
        for bucket in layouts[-1][1].buckets:
            by_codec[bucket.codec] = by_codec.get(bucket.codec, 0) + bucket.nbytes
        if by_codec:
            return max(by_codec, key=lambda name: by_codec[name])
    return str(records.plan.get("codec") or NONE)


def inexact_notes(records: RunRecords) -> list[str]:
    """Return what makes the training of a run another than that of one process; nothing of other runs."""
    return [*_meeting_notes(records.timelines), *_server_notes(sync_of(records)), *_codec_notes(codec_of(records))]


def _meeting_notes(timelines: Sequence[RankTimeline]) -> list[str]:
    """Say how often ranks met, how far they were apart, and what that means."""
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


def _server_notes(sync: SyncSpec) -> list[str]:
    if not sync.is_server or sync.staleness == 0:
        return []
    late = "any number of steps" if sync.staleness is None else f"up to {sync.staleness} steps"
    return [
        f"sync {sync.to_text()}: ranks train on parameters that lack {late} of the others; this is not the "
        "training of one process (docs/sync.md)"
    ]


def is_late(codec: str) -> bool:
    """Return whether a codec sends most of a gradient later, which costs some of the loss at equal samples."""
    try:
        spec = CodecSpec.parse(codec)
    except PlanError:
        return False
    form = spec.packed_format
    return not (spec.is_exact or spec.is_auto or spec.is_own or (form is not None and form.bits >= _LEAST_BITS))


def _codec_notes(codec: str) -> list[str]:
    if not is_late(codec):
        return []
    return [
        f"codec {codec} sends a part of each gradient now and the rest later: at equal samples expect a higher "
        "loss, most of all at the beginning (docs/sync.md has figures); compare the loss"
    ]
