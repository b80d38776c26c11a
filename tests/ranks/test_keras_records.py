"""The records of an unchanged Keras script on two ranks: steps, phases, bytes, and what is said of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from farandole.core.vocabulary import events
from farandole.observe.diagnose import diagnose, to_text
from farandole.observe.export.operation_timeline import timeline_path
from farandole.observe.figures.live import read_state
from farandole.observe.figures.summary import NOT_DIVIDED, summarise
from farandole.observe.records.rows import StepRow, step_seconds
from farandole.observe.records.run_reader import read_run
from farandole.observe.records.timeline_reader import RankTimeline
from farandole.observe.report import write_report
from tests.ranks.keras_jobs import finish, needs_compiler, needs_tensorflow, start
from tests.ranks.keras_records_script import BATCH, BATCH_SECONDS, EPOCHS, MORE, SAVE_SECONDS, STEPS

pytestmark = [pytest.mark.full("slow"), needs_tensorflow, needs_compiler, pytest.mark.timeout(300)]


def test_a_fit_is_recorded(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    told = finish(start("keras_records_script", results, ranks=2, HOROVOD_TIMELINE="DYNAMIC"), results)
    run = tmp_path / "results.json.run"
    timelines = read_run(run).timelines
    assert [timeline.rank for timeline in timelines] == [0, 1]
    for timeline in timelines:
        require_steps(timeline, told["elements"])
    require_data_waits([timeline.steps for timeline in timelines])
    require_verdict(run)
    require_timeline(Path(f"{results}.timeline.json"))


def require_steps(timeline: RankTimeline, elements: int) -> None:
    assert [row.step for row in timeline.steps] == list(range(1, (EPOCHS + len(MORE)) * STEPS + 1))
    steps = timeline.steps[: EPOCHS * STEPS]
    assert timeline.setup[events.SETUP_FRONT_END] == "keras on tensorflow"
    assert timeline.setup[events.SETUP_THREADS] is None, "torch computes nothing here"
    ((_, layout),) = timeline.layouts
    assert sum(bucket.nbytes for bucket in layout.buckets) == 4 * elements
    pauses: Counter[str] = Counter()
    for row in steps:
        assert row.samples == BATCH, row.step
        assert row.loss is not None
        assert row.total_steps == len(steps)
        (exchange,) = row.exchanges
        # Of two ranks each sends half of its part, and half of the sum; a little more, as gradients are padded.
        assert 4 * elements <= exchange.sent_bytes < 4 * elements + 4 * 64, row.step
        assert row.begin_seconds <= exchange.wait_begin_seconds <= exchange.wait_end_seconds <= row.end_seconds
        own = [phase.name for phase in row.phases if phase.name in events.STEP_PHASES]
        assert own == ["data", "forward", "backward", "optimizer"], row.step
        pauses.update(phase.name for phase in row.phases if phase.name not in events.STEP_PHASES)
    assert pauses[events.EVALUATION] == EPOCHS - 1, "the last one is after the last step"
    assert pauses[events.END_OF_EPOCH] == EPOCHS - 1
    after = step_seconds(steps[STEPS])
    assert after[events.END_OF_EPOCH] >= SAVE_SECONDS


def require_data_waits(ranks: Sequence[Sequence[StepRow]]) -> None:
    """Of the ranks the one that gets its batch last waits for it, and the others for this rank.

    Its steps take what they compute, and the wait for data: quick data tell the one of both.
    """
    computing = 0.0
    for number, name in enumerate(("slow generator", *MORE)):
        first = (EPOCHS + number - 1) * STEPS if number else STEPS
        several = name == MORE[3]
        late = max((_steps(rows[first + 3 : first + STEPS], each=3 if several else 1) for rows in ranks),
                   key=lambda parts: median([part[events.DATA] for part in parts]))  # fmt: skip
        length = median([sum(part.values()) for part in late])
        waited = median([part[events.DATA] for part in late])
        shown = f"{name}: {waited:.4f} s of {length:.4f} s"
        if name == MORE[0]:
            computing = length
            assert waited < 0.25 * length, shown
            continue
        # A generator makes the next batch while this one is computed, which a busy machine takes long for.
        assert 0.7 * (BATCH_SECONDS - (length - waited)) < waited < 1.3 * BATCH_SECONDS, shown
        if several:  # of a call the first wait is known, and those of the others are part of what is undivided
            seconds = [_steps(rows[first + 4 : first + STEPS], each=3) for rows in ranks]
            others = max(median([part[events.UNDIVIDED] for part in own]) for own in seconds)
            assert others > 0.3 * BATCH_SECONDS, others
        elif number:
            assert waited + computing > 0.8 * length, shown
        assert several or not any(part.get(events.UNDIVIDED) for part in late), shown


def _steps(rows: Sequence[StepRow], *, each: int) -> list[Counter[str]]:
    """Return the seconds of phases of one in `each` steps."""
    return [Counter(step_seconds(row)) for row in rows[::each]]


def require_verdict(run: Path) -> None:
    found = diagnose(run)
    titles = [each.title for each in found.findings]
    assert any(title.startswith("all ranks wait for data") for title in titles), titles
    assert NOT_DIVIDED in found.notes, "in the last training not all waits are known"
    text = to_text(found)
    for strange in ("DataLoader", "fd.shard", "fd.distribute", "torch"):
        assert strange not in text, text
    summary = summarise(run)
    assert summary.samples == 2 * BATCH * STEPS * (EPOCHS + len(MORE))
    assert summary.samples_per_second is not None
    assert summary.shares is not None
    assert summary.shares["data"] is None
    assert summary.last_loss is not None
    page = run / "page.html"
    write_report(run, page)
    assert "data loading" in page.read_text()
    assert [rank.step for rank in read_state(run).ranks] == [STEPS * (EPOCHS + len(MORE))] * 2


def require_timeline(path: Path) -> None:
    for own in (path, timeline_path(path, 1)):
        trace = json.loads(own.read_text())
        names = Counter(event.get("name") for event in trace)
        processes = [event["args"]["name"] for event in trace if event.get("name") == "process_name"]
        assert any(name.startswith("allreduce.DistributedSGD.0.") for name in processes), processes
        assert names["NEGOTIATE_ALLREDUCE"] >= STEPS, names
        assert names["ALLREDUCE"] >= STEPS, names
