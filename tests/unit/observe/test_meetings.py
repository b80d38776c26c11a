"""Runs that are not the training of one process: what is said of it, what meetings cost, and fixes of meetings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.core.vocabulary.events import DataWait, Exchange, Setup, Started, StepDone
from farandole.observe.diagnose import diagnose
from farandole.observe.figures.summary import summarise
from farandole.observe.records.step_recorder import EventWriter, StepRecorder

STEPS, COMPUTE_SECONDS, MEETING_SECONDS, MEETING_BYTES = 60, 0.05, 0.2, 8_000_000


def write_run(
    directory: Path,
    plan: dict[str, object],
    sent_bytes: int = MEETING_BYTES,
    meetings: int | None = None,
    *,
    sync: str = "local:H=5",
    every: int = 5,
    hosts: int = 1,
    around_seconds: float = 0.0,
    slow_steps: int = 0,
    setup: dict[str, str] | None = None,
) -> Path:
    """Write a run of two ranks that meet after every `every` steps, with `around_seconds` of work for it.

    The first `slow_steps` take ten times as long.
    """
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
        writer = StepRecorder([EventWriter(directory, rank)])
        writer.record(Started(rank, 2, f"h{rank % hosts}", 1, 0, 100.0, "2026-01-01"))
        writer.record(Setup(dict(setup or {})))
        if meetings is not None:
            writer.record(Setup({"sync": sync, "meetings": meetings, "meetings_apart": 0.01 * (1 + rank)}))
        at = 100.0
        for step in range(1, STEPS + 1):
            writer.record(DataWait(at, at + 1e-4, 4))
            at += COMPUTE_SECONDS * (10 if step <= slow_steps else 1)
            if step % every == 0:
                at += around_seconds
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


def test_small_meetings_are_coded_where_the_link_is_slow(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path / "slow", {"sync": "local:H=5"}, 800_000))  # 4 MB a second
    (finding,) = [each for each in found.findings if each.kind == "communication"]
    assert [list(fix.changes) for fix in finding.fixes] == [["codec"], ["sync"]]


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


@pytest.mark.parametrize(("sync", "enough"), [("local:H=5", 40), ("diloco:H=5", 200)])
def test_few_meetings_are_not_made_fewer(sync: str, enough: int, tmp_path: Path) -> None:
    for count, changed in ((enough - 1, [["codec"]]), (enough, [["codec"], ["sync"]])):
        found = diagnose(write_run(tmp_path / str(count), {"sync": sync}, meetings=count))
        (finding,) = [each for each in found.findings if each.kind == "communication"]
        assert [list(fix.changes) for fix in finding.fixes] == changed, count


@pytest.mark.parametrize(
    ("plan", "sync", "count", "remedy"),
    [
        ("local:H=5", "local:H=5", 19, "a higher loss than without sync; take a smaller H"),
        ("diloco:H=5", "diloco:H=5", 12, "; take sync=local and a smaller H"),
        ("diloco:H=5", "diloco:H=5", 99, "; take sync=local:H=5"),
        ("diloco:H=5", "diloco:H=5", 100, ""),
        ("auto", "local:H=100", 12, "; take sync=local:H=30 and codec=int4"),
    ],
)  # fmt: skip
def test_what_to_do_about_few_meetings(plan: str, sync: str, count: int, remedy: str, tmp_path: Path) -> None:
    more = {"codec": "auto", "lossy": True} if plan == "auto" else {}
    notes = summarise(write_run(tmp_path / "run", {"sync": plan, **more}, meetings=count, sync=sync)).notes
    warnings = [note for note in notes if note.startswith("warning:")]
    assert [each.endswith(remedy) for each in warnings] == ([True] if remedy else [])


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"sync": "server:staleness=3"}, "ranks train on parameters that lack up to 3 steps of the others"),
        ({"sync": "async"}, "ranks train on parameters that lack any number of steps of the others"),
        ({"codec": "powersgd:rank=4"}, "codec powersgd:rank=4 sends a part of each gradient now"),
        ({"codec": "topk:0.01"}, "at equal samples expect a higher loss"),
        ({"codec": "randomk:feedback=false"}, "a part of each gradient now and drops the rest"),
        ({"codec": "sign"}, "at equal samples expect a higher loss"),
        ({"sync": "server"}, ""),
        ({"codec": "int8"}, ""),
        ({"codec": "int4"}, ""),
        ({"codec": "auto", "lossy": True}, ""),  # what it chose is in the layouts, and nothing was chosen
        ({}, ""),
    ],
)
def test_a_training_unlike_that_of_one_process_says_so(plan: dict[str, object], said: str, tmp_path: Path) -> None:
    text = "\n".join(summarise(write_run(tmp_path / "run", plan, every=1)).notes)
    assert said in text
    assert bool(said) == ("docs/fast/rarely-meeting.md" in text)
    of_torch = write_run(tmp_path / "ddp", plan, every=1, setup={"wrapper": "DistributedDataParallel"})
    assert not any("docs/fast/rarely-meeting.md" in note for note in summarise(of_torch).notes), "it has no plan"


def test_long_steps_of_meetings_are_no_riddle(tmp_path: Path) -> None:
    """Their time is that of the meetings: it was told twice, as steps "that take far longer than the rest"."""
    found = diagnose(write_run(tmp_path / "run", {"sync": "local:H=5"}, around_seconds=0.1))
    assert [each.kind for each in found.findings if each.kind in ("irregular", "communication")] == [
        "communication"
    ]


@pytest.mark.parametrize(
    ("hosts", "changes"), [(1, []), (2, [{"sync": "every_step", "codec": "auto", "lossy": True}])]
)
def test_servers_on_a_slow_network_are_left_for_a_codec(
    hosts: int, changes: list[dict[str, object]], tmp_path: Path
) -> None:
    found = diagnose(write_run(tmp_path / "run", {"sync": "server:staleness=3"}, every=1, hosts=hosts))
    (finding,) = [each for each in found.findings if each.kind == "communication"]
    assert [fix.changes for fix in finding.fixes] == changes
    assert any("8 MB a step, 40 MB a second" in each for each in finding.evidence)


def test_ranks_that_never_met_are_no_unknown_wrapper(tmp_path: Path) -> None:
    """With H above the steps of the run nothing is exchanged in them, and that is known."""
    run = write_run(tmp_path / "run", {"sync": "local:H=200"}, meetings=0, every=200, sync="local:H=200")
    said = "\n".join([*summarise(run).notes, *diagnose(run).notes])
    assert "fd.record" not in said
    assert "0 meetings are few" in said


@pytest.mark.parametrize(
    ("meetings", "named"), [(None, "name what it chose"), (12, "name what it chose: sync=local:H=100 codec=int4")]
)
def test_the_slow_start_of_auto_is_its_own(meetings: int | None, named: str, tmp_path: Path) -> None:
    plan = {"sync": "auto", "codec": "auto", "lossy": True}
    run = write_run(tmp_path / "run", plan, meetings=meetings, sync="local:H=100", slow_steps=6)
    (finding,) = [each for each in diagnose(run).findings if each.kind == "warm-up"]
    assert finding.fixes[0].what.endswith(named)
    other = diagnose(write_run(tmp_path / "other", {}, slow_steps=6))
    assert [each.fixes[0].what[:4] for each in other.findings if each.kind == "warm-up"] == ["keep"]
