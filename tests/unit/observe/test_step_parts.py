"""The parts of a step are the same numbers wherever they are said."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.core.vocabulary.events import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    GARBAGE_COLLECTION,
    OPTIMIZER,
    DataWait,
    Exchange,
    Phase,
    Started,
    StepDone,
)
from farandole.observe.diagnose import step_table
from farandole.observe.figures.step_parts import SHARES, shares_of, step_parts
from farandole.observe.figures.summary import summarise
from farandole.observe.records.run_reader import read_run
from farandole.observe.records.step_recorder import EXCHANGES_KEPT, EventWriter, StepRecorder
from farandole.observe.records.timeline_reader import read_events
from farandole.observe.report.content import mean_parts, read

from .runs import progress_of

STEPS = 12
STEP_SECONDS = 1.0
NAMED, BUCKETS, BOTH, MANY = "named operations", "buckets", "both", "many exchanges"


def events(kind: str, rank: int, begin: float) -> list[object]:
    """Return the events of one step; rank 1 is 0.1 s later than rank 0 and so waits less."""
    computed = begin + 0.5 + 0.1 * rank
    found: list[object] = [
        DataWait(begin, begin + 0.05, 8),
        Phase(FORWARD, begin + 0.05, begin + 0.2),
        Phase(BACKWARD, begin + 0.2, computed),
    ]
    if kind in (BUCKETS, BOTH):
        # The collector runs while this rank waits: the innermost has the time.
        found += [Exchange((computed,), computed, begin + 0.7, 1000)]
        found += [Phase(GARBAGE_COLLECTION, begin + 0.65, begin + 0.67)]
    if kind in (NAMED, BOTH):
        found += [Phase(EXCHANGE, begin + 0.7, begin + 0.85)]
    if kind == MANY:
        width = (begin + 0.85 - computed) / (2 * EXCHANGES_KEPT)
        for number in range(2 * EXCHANGES_KEPT):
            at = computed + number * width
            found += [Exchange((at,), at, at + width, 10)]
    return [*found, Phase(OPTIMIZER, begin + 0.85, begin + 0.95)]


def record(directory: Path, kind: str) -> list[dict[str, float]]:
    """Write a run; return the rows of its progress."""
    rows: list[dict[str, float]] = []
    for rank in range(2):
        writer = StepRecorder([EventWriter(directory, rank)])
        all_events: list[object] = [Started(rank, 2, "a", 1, 0, 0.0, "2026-11-21T10:00:00", "clock")]
        for step in range(STEPS):
            all_events += [*events(kind, rank, step * STEP_SECONDS), StepDone(step + 1, (step + 1) * STEP_SECONDS)]
        for event in all_events:
            writer.record(event)  # type: ignore[arg-type]
        if rank == 0:
            rows = progress_of(all_events)
        writer.close()
    return rows


@pytest.mark.parametrize(
    ("kind", "communication", "waiting"),
    [
        (NAMED, (0.15, 0.15), (0.0, 0.0)),
        (BUCKETS, (0.09, 0.08), (0.09, 0.0)),
        (BOTH, (0.24, 0.23), (0.09, 0.0)),
        (MANY, None, None),
    ],
)
def test_everybody_says_the_same(
    tmp_path: Path, kind: str, communication: tuple[float, ...] | None, waiting: tuple[float, ...] | None
) -> None:
    rows = record(tmp_path, kind)
    parts = step_parts([read_events(tmp_path / f"events-rank{rank}.jsonl") for rank in range(2)])
    for rank, own in enumerate(parts):
        for part in own:
            assert part.busy + part.communication + part.waiting + part.data == pytest.approx(part.seconds)
            assert sum(part.share_seconds().values()) == pytest.approx(STEP_SECONDS)
        if communication is not None and waiting is not None:
            assert own[5].communication == pytest.approx(communication[rank], abs=1e-5)
            assert own[5].waiting == pytest.approx(waiting[rank], abs=1e-5)
    exposed = [own[5].communication + own[5].waiting for own in parts]
    assert all(seconds > 0.05 for seconds in exposed)

    summary = summarise(tmp_path)
    assert summary.shares == pytest.approx(shares_of([part for own in parts for part in own]), abs=1e-4)

    page = read(tmp_path)
    for own, mine in zip(page.counted_parts, parts, strict=True):
        means = mean_parts(own)
        assert {name: means[name] for name in SHARES[1:]} == pytest.approx(
            {name: mine[5].share_seconds()[name] for name in SHARES[1:]}, abs=1e-5
        )

    diagnosed = step_table.make_step_table(read_run(tmp_path, for_diagnosis=True))
    for cells, mine in zip(diagnosed.cells, parts, strict=True):
        for cell in cells:
            assert cell.communication == pytest.approx(mine[5].communication, abs=1e-5)
            assert cell.waiting == pytest.approx(mine[5].waiting, abs=1e-5)
            assert cell.work == pytest.approx(mine[5].busy + mine[5].data, abs=1e-5)
            assert sum(cell.phases.values()) == pytest.approx(cell.work, abs=1e-5)

    assert rows[-1]["wait_share"] == pytest.approx(exposed[0], abs=1e-4)
    assert rows[-1]["data_share"] == pytest.approx(parts[0][5].data, abs=1e-4)
