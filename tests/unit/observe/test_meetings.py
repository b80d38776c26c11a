"""Runs whose ranks train on their own: what meetings cost is a mean over all steps, and fixes are of meetings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.core.vocabulary.events import DataWait, Exchange, Setup, Started, StepDone
from farandole.observe.diagnose import diagnose
from farandole.observe.figures.summary import summarise
from farandole.observe.record.event_writer import EventWriter

STEPS, COMPUTE_SECONDS, MEETING_SECONDS, MEETING_BYTES = 60, 0.05, 0.2, 8_000_000


def write_run(
    directory: Path, plan: dict[str, object], sent_bytes: int = MEETING_BYTES, meetings: int | None = None
) -> Path:
    """Write a run of two ranks that meet after every fifth step."""
    directory.mkdir()
    facts = {
        "version": 1,
        "size": 2,
        "command": ["python", "t.py"],
        "started": "2026",
        "plan": plan,
        "hosts": ["h"],
    }
    (directory / "run.json").write_text(json.dumps(facts))
    for rank in range(2):
        writer = EventWriter(directory, rank)
        writer.record(Started(rank, 2, "h", 1, 0, 100.0, "2026-01-01"))
        if meetings is not None:
            writer.record(Setup({"sync": "local:H=5", "meetings": meetings, "meetings_apart": 0.01 * (1 + rank)}))
        at = 100.0
        for step in range(1, STEPS + 1):
            writer.record(DataWait(at, at + 1e-4, 4))
            at += COMPUTE_SECONDS
            if step % 5 == 0:
                writer.record(Exchange((at,), at, at + MEETING_SECONDS, sent_bytes))
                at += MEETING_SECONDS
            writer.record(StepDone(step, at))
        writer.close()
    return directory


@pytest.mark.parametrize(("count", "is_few"), [(1, True), (19, True), (20, False)])
def test_few_meetings_are_a_warning(count: int, is_few: bool, tmp_path: Path) -> None:
    notes = summarise(write_run(tmp_path / "run", {"sync": "local:H=5"}, meetings=count)).notes
    times = "1 meeting" if count == 1 else f"{count} meetings"
    assert f"sync local:H=5: {times}, where ranks were 1.50% apart from their mean" in "\n".join(notes)
    assert any(note.startswith("warning:") for note in notes) == is_few
    assert not any("meeting" in note for note in summarise(write_run(tmp_path / "other", {})).notes)


def test_the_price_is_that_of_all_steps_and_fixes_make_meetings_rarer_or_smaller(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path / "run", {"sync": "diloco:H=5"}))
    (finding,) = [each for each in found.findings if each.kind == "communication"]
    assert finding.seconds == pytest.approx(MEETING_SECONDS / 5, rel=0.05)
    assert "wait for their meetings" in finding.title
    smaller, rarer = finding.fixes
    assert smaller.changes == {"codec": "int4"}
    assert rarer.changes == {"sync": "diloco:H=10"}
    assert rarer.gain is not None
    assert rarer.gain.seconds == pytest.approx(MEETING_SECONDS / 10, rel=0.05)
    assert "--set sync=diloco:H=10" in rarer.paste


@pytest.mark.parametrize(
    ("plan", "sent_bytes"),
    [
        ({"sync": "diloco:H=5", "codec": "int4"}, MEETING_BYTES),
        ({"sync": "streaming:H=10"}, MEETING_BYTES),
        ({"sync": "diloco:H=5"}, 1000),
    ],
)
def test_no_codec_where_there_is_one_or_bytes_are_few(
    plan: dict[str, object], sent_bytes: int, tmp_path: Path
) -> None:
    found = diagnose(write_run(tmp_path / "run", plan, sent_bytes))
    (finding,) = [each for each in found.findings if each.kind == "communication"]
    assert [list(fix.changes) for fix in finding.fixes] == [["sync"]]


def test_few_meetings_are_not_made_fewer(tmp_path: Path) -> None:
    for count, changed in ((39, [["codec"]]), (40, [["codec"], ["sync"]])):
        found = diagnose(write_run(tmp_path / str(count), {"sync": "diloco:H=5"}, meetings=count))
        (finding,) = [each for each in found.findings if each.kind == "communication"]
        assert [list(fix.changes) for fix in finding.fixes] == changed, count
