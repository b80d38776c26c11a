"""The records of an unchanged Keras script on two ranks: steps, phases, bytes, and what is said of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from farandole.core.vocabulary import events
from farandole.observe.diagnose import diagnose, to_text
from farandole.observe.figures.summary import NOT_DIVIDED, summarise
from farandole.observe.format.phases import step_seconds
from farandole.observe.live.state import read_state
from farandole.observe.read.run_reader import read_run
from farandole.observe.read.timeline_reader import RankTimeline
from farandole.observe.report import write_report
from farandole.observe.trace.operation_timeline import timeline_path
from tests.ranks.keras_jobs import finish, needs_compiler, needs_tensorflow, start
from tests.ranks.keras_records_script import BATCH, EPOCHS, SAVE_SECONDS, STEPS

pytestmark = [needs_tensorflow, needs_compiler, pytest.mark.timeout(300)]


def test_a_fit_is_recorded(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    told = finish(start("keras_records_script", results, ranks=2, HOROVOD_TIMELINE="DYNAMIC"), results)
    run = tmp_path / "results.json.run"
    timelines = read_run(run).timelines
    assert [timeline.rank for timeline in timelines] == [0, 1]
    for timeline in timelines:
        require_steps(timeline, told["elements"])
    require_verdict(run)
    require_timeline(Path(f"{results}.timeline.json"))


def require_steps(timeline: RankTimeline, elements: int) -> None:
    steps = timeline.steps
    assert [row.step for row in steps] == list(range(1, EPOCHS * STEPS + 1))
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
        assert own == ["undivided", "backward", "optimizer"], row.step
        pauses.update(phase.name for phase in row.phases if phase.name not in events.STEP_PHASES)
    assert pauses[events.EVALUATION] == EPOCHS - 1, "the last one is after the last step"
    assert pauses[events.END_OF_EPOCH] == EPOCHS - 1
    after = step_seconds(steps[STEPS])
    assert after[events.END_OF_EPOCH] >= SAVE_SECONDS


def require_verdict(run: Path) -> None:
    found = diagnose(run)
    assert found.bound != "compute", "it is the data, which nothing tells from computing"
    assert NOT_DIVIDED in found.notes
    text = to_text(found)
    for strange in ("DataLoader", "fd.shard", "fd.distribute", "torch"):
        assert strange not in text, text
    summary = summarise(run)
    assert summary.samples == 2 * BATCH * STEPS * EPOCHS
    assert summary.samples_per_second is not None
    assert summary.shares is not None
    assert summary.shares["data"] is None
    assert summary.last_loss is not None
    page = run / "page.html"
    write_report(run, page)
    assert "data loading" in page.read_text()
    assert [rank.step for rank in read_state(run).ranks] == [STEPS * EPOCHS] * 2


def require_timeline(path: Path) -> None:
    for own in (path, timeline_path(path, 1)):
        trace = json.loads(own.read_text())
        names = Counter(event.get("name") for event in trace)
        processes = [event["args"]["name"] for event in trace if event.get("name") == "process_name"]
        assert any(name.startswith("allreduce.DistributedSGD.0.") for name in processes), processes
        assert names["NEGOTIATE_ALLREDUCE"] >= STEPS, names
        assert names["ALLREDUCE"] >= STEPS, names
