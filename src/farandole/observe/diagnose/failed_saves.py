"""Checkpoints that were not saved: they cost no time, until the run has to go back to an older one."""

from __future__ import annotations

from ...core.vocabulary.events import SETUP_CHECKPOINT_ALARM
from ..read.run_reader import RunRecords


def failed_saves(records: RunRecords) -> list[str]:
    """Return a sentence if the last checkpoint of the run was not saved; the ranks say the same."""
    alarms = [str(each.setup.get(SETUP_CHECKPOINT_ALARM) or "") for each in records.timelines]
    return [f"ALARM: {alarm}" for alarm in sorted({each for each in alarms if each})[:1]]
