"""What the sections compute: parts of a step, who is late, achieved rates, scaling."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from farandole.core.vocabulary.events import DevicePhases, Phase, Sample
from farandole.observe.figures.figures import busy_seconds
from farandole.observe.records.rows import encode_device_phases, encode_sample
from farandole.observe.records.timeline_reader import read_events
from farandole.observe.report import content as report_run
from farandole.observe.report import curves, late, network, scaling, timeline
from farandole.observe.report.content import PARTS, Charts, mean_parts
from farandole.observe.report.curves import rates
from farandole.observe.report.page import write_report
from tests.unit.observe.report.full_runs import PHASES, full_run


def test_parts_add_up_and_are_the_truth(tmp_path: Path) -> None:
    run = report_run.read(full_run(tmp_path / "r", slow={1: {"backward": 0.04}}, pauses={30: 0.2}))
    for own in run.parts:
        for part in own:
            assert sum(getattr(part, name) for name in PARTS) == pytest.approx(part.seconds, abs=2e-5)
    means = [mean_parts(own) for own in run.counted_parts]
    compute = sum(seconds for name, seconds in PHASES.items() if name != "data")
    assert means[0]["compute"] == pytest.approx(compute, rel=0.02)
    assert means[1]["compute"] == pytest.approx(compute + 0.04, rel=0.02)
    assert means[0]["pauses"] == pytest.approx(0.2 / len(run.counted_parts[0]), rel=0.01)
    assert means[2]["waiting"] > 0.04 > means[1]["waiting"]
    # 6 buckets of 12 ms; the last cannot be hidden.
    assert means[1]["communication"] == pytest.approx(0.012, rel=0.05)
    assert means[1]["hidden"] == pytest.approx(0.060, rel=0.05)


@pytest.mark.parametrize(("steps", "drawn"), [(60, ["Loss"]), (120, ["Loss", "Throughput"])])
def test_a_run_of_a_few_seconds_has_no_curve_of_throughput(steps: int, drawn: list[str], tmp_path: Path) -> None:
    run = report_run.read(full_run(tmp_path / "r", steps=steps, ranks=2))
    section = curves.make(run)
    assert section is not None
    charts = [chart for block in section.blocks if isinstance(block, Charts) for chart in block.charts]
    assert [chart.title for chart in charts if "Memory" not in chart.title and "use" not in chart.title] == drawn
    assert any("Memory" in chart.title for chart in charts) is (len(drawn) > 1)


def test_spans_that_overlap_count_once() -> None:
    assert busy_seconds([]) == 0.0
    assert busy_seconds([(0, 1), (0.5, 2), (0.6, 0.7), (4, 3)]) == 2.0


def test_who_is_late_is_told_by_phase_and_by_bucket(tmp_path: Path) -> None:
    run = report_run.read(full_run(tmp_path / "r", slow={3: {"forward": 0.03}, 1: {"backward": 0.06}}))
    extra = late.extra_seconds(run.counted_parts)
    assert extra[3]["forward"] == pytest.approx(0.03, rel=0.05)
    assert extra[1]["backward"] == pytest.approx(0.06, rel=0.05)
    assert extra[1]["forward"] < 0.002
    lateness = late.lateness(run)
    assert [len(own) for own in lateness] == [6] * 4
    found = [value or 0.0 for value in lateness[1]]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(0.06, rel=0.05)


def test_ranks_that_take_turns_are_not_late(tmp_path: Path) -> None:
    pauses = dict.fromkeys(range(10, 41, 3), 0.05)
    run = report_run.read(full_run(tmp_path / "r", ranks=2, pauses=pauses))
    assert max(value or 0.0 for own in late.lateness(run) for value in own) < 0.005


def test_a_typical_and_the_slowest_steps(tmp_path: Path) -> None:
    run = report_run.read(full_run(tmp_path / "r", steps=60, pauses={40: 0.5, 50: 0.3}))
    typical, slowest = timeline.choose(timeline.common_rows(run))
    assert slowest == [40, 50]
    assert typical not in slowest
    healthy = report_run.read(full_run(tmp_path / "h", steps=60))
    assert timeline.choose(timeline.common_rows(healthy))[1] == []


def test_rates_of_the_wire(tmp_path: Path) -> None:
    run = report_run.read(full_run(tmp_path / "r", wire=0.02))
    busy, rate, best = network.achieved(run.counted, one_clock=run.one_clock)
    assert busy == pytest.approx(6 * 0.02, rel=0.05)
    assert rate == pytest.approx((1 << 20) / 0.02, rel=0.05)
    assert best == pytest.approx((1 << 20) / 0.02, rel=0.05)


def test_throughput_counts_every_rank_as_long_as_it_went(tmp_path: Path) -> None:
    directory = full_run(tmp_path / "r", steps=100)
    path = directory / "events-rank3.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:60]))
    run = report_run.read(directory)
    points = rates(run.timelines)
    step = run.summary.step_seconds
    assert step is not None
    assert points[10][1] == pytest.approx(4 * 32 / step, rel=0.03)
    assert points[-2][1] == pytest.approx(3 * 32 / step, rel=0.03)
    total = sum(rate for _, rate in points) * (points[1][0] - points[0][0])
    assert total == pytest.approx(sum(row.samples for t in run.timelines for row in t.steps[1:]), rel=1e-6)


def test_scaling_is_fitted_to_the_runs_beside_it(tmp_path: Path) -> None:
    full_run(tmp_path / "one", ranks=1, hosts=["node-a"])
    for size, rate in ((2, 600.0), (8, 1500.0)):
        other = tmp_path / f"of-{size}"
        full_run(other, ranks=size, steps=2)
        (other / "summary.json").write_text(json.dumps({"size": size, "samples_per_second": rate}))
    broken = tmp_path / "broken"
    full_run(broken, ranks=2, steps=2)
    (broken / "summary.json").write_text("[")
    run = report_run.read(full_run(tmp_path / "r", ranks=4))
    assert sorted((m.processes, m.samples_per_second) for m in scaling.siblings(run)) == [(2, 600.0), (8, 1500.0)]
    section = scaling.make(run)
    assert section is not None
    rows = [row[:2] for block in section.blocks if block.kind == "table" for row in block.rows]  # type: ignore[union-attr]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "8", "16", "32"]
    assert rows[4][1] == "predicted"


def test_without_a_run_of_one_process_the_page_says_how_to_get_one(tmp_path: Path) -> None:
    section = scaling.make(report_run.read(full_run(tmp_path / "r", command=["python", "a b.py"])))
    assert section is not None
    assert [block.text for block in section.blocks if block.kind == "code"] == [  # type: ignore[union-attr]
        "farandole run -np 1 -- python 'a b.py'"
    ]


def test_what_accelerators_did_is_drawn(tmp_path: Path) -> None:
    path = full_run(tmp_path / "r", ranks=2, steps=12, hosts=("node-a",))
    assert "on the accelerator" not in (write_report(path)).read_text()
    for rank in (0, 1):
        rows = read_events(path / f"events-rank{rank}.jsonl").steps
        with (path / f"events-rank{rank}.jsonl").open("a") as file:
            for row in rows:
                begin = row.begin_seconds + 0.01
                marks = (Phase("forward", begin, begin + 0.03), Phase("backward", begin + 0.03, begin + 0.09))
                file.write(json.dumps(encode_device_phases(DevicePhases(row.step, marks))) + "\n")
    page = write_report(path).read_text()
    assert "<title>backward, on the accelerator 60 ms</title>" in page
    assert "Between them what its accelerator did" in page


def test_the_rate_beside_the_speed_of_the_link(tmp_path: Path) -> None:
    path = full_run(tmp_path / "r", ranks=2, steps=12, hosts=("node-a",))
    assert "share of the link" not in write_report(path).read_text()
    sample = Sample(101.0, 1.0, link_bits_per_second=10e9)
    with (path / "events-rank0.jsonl").open("a") as file:
        file.write(json.dumps(encode_sample(sample)) + "\n")
    run = report_run.read(path)
    rate = network.achieved(run.counted, one_clock=run.one_clock)[1]
    page = write_report(path).read_text()
    tile = page.partition("<dt>share of the link</dt>")[2].partition("</div>")[0]
    assert f"<dd>{8 * rate / 10e9:.1%}</dd>" in tile
    assert "10 Gbit/s" in page


@pytest.mark.parametrize("apart", [False, True])
def test_the_page_and_the_diagnosis_say_the_same(apart: bool, tmp_path: Path) -> None:
    directory = full_run(tmp_path / "r", slow={1: {"backward": 0.06}, 2: {"forward": 0.02}})
    if apart:  # nobody compared the clocks of the two hosts
        for path in directory.glob("events-rank*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if '{"clock":[' not in line))
    run = report_run.read(directory)
    assert run.one_clock is not apart
    page = mean_parts([part for own in run.counted_parts for part in own])
    assert page["communication"] == pytest.approx(run.diagnosis.parts["communication"])
    assert page["waiting"] == pytest.approx(run.diagnosis.parts["waiting"])
    assert page["hidden"] == pytest.approx(run.diagnosis.hidden_seconds)
    assert page["seconds"] == pytest.approx(run.diagnosis.step_seconds)
    shares = run.summary.shares or {}
    assert page["communication"] / page["seconds"] == pytest.approx(shares["communication"], rel=1e-3)
    # Ranks hand their buckets over up to 60 ms before rank 1 does: that is no time of the wire. With clocks apart,
    # the rank that waits least waits for another a little too.
    busy = network.achieved(run.counted, one_clock=run.one_clock)[0]
    assert busy == pytest.approx(6 * 0.012, rel=0.2 if apart else 0.05)


def test_a_bucket_is_drawn_on_the_wire_once_the_last_rank_sends_it(tmp_path: Path) -> None:
    run = report_run.read(
        full_run(tmp_path / "r", ranks=2, hosts=("a",), slow={1: {"backward": 0.06}}, wire=0.005)
    )
    section = timeline.make(run)
    assert section is not None
    (svg,) = [str(b.svg) for b in section.blocks if b.kind == "chart" and "typical" in b.title]  # type: ignore[union-attr]
    drawn = re.findall(r"bucket 5, on the wire ([0-9.]+) ms", svg)
    assert [float(each) for each in drawn] == pytest.approx([5.0, 5.0], abs=0.1)


def test_steps_that_not_all_ranks_have_are_in_no_mean(tmp_path: Path) -> None:
    directory = full_run(tmp_path / "r", ranks=2, hosts=("a",), slow={1: {"backward": 0.03}})
    path = directory / "events-rank1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    run = report_run.read(directory)
    assert len(run.counted[0]) == len(run.counted[1]) < len(run.timelines[0].steps) - 4
    last = run.timelines[1].steps[-1].step
    assert any(
        f"the records of rank 1 end at step {last}, those of others at 40" in n for n in run.diagnosis.notes
    )
    page = mean_parts([part for own in run.counted_parts for part in own])
    assert page["communication"] == pytest.approx(run.diagnosis.parts["communication"])
    assert page["communication"] == pytest.approx(0.012, rel=0.05)


def test_a_rank_is_called_slow_only_if_it_is_in_most_steps(tmp_path: Path) -> None:
    slow = late.make(report_run.read(full_run(tmp_path / "s", slow={1: {"backward": 0.06}})))
    assert slow is not None
    assert slow.lead.startswith("Rank 1 on node-a takes 60")
    assert slow.lead.endswith("step after step.")
    directory = full_run(tmp_path / "r", ranks=3, hosts=("a",), pauses=dict.fromkeys(range(10, 41, 4), 0.1))
    turns = late.make(report_run.read(directory))
    assert turns is not None
    assert turns.lead.startswith("No rank is slow in step after step. Rank 0 on a takes")


def test_nothing_is_predicted_from_runs_that_are_not_alike(tmp_path: Path) -> None:
    command = ["python", "t.py"]
    full_run(tmp_path / "one", ranks=1, hosts=["node-a"], command=command, slow={0: {"backward": 0.9}})
    section = scaling.make(report_run.read(full_run(tmp_path / "r", ranks=4, command=command)))
    assert section is not None
    tables = [block for block in section.blocks if block.kind == "table"]
    assert [row[0] for row in tables[0].rows] == ["1", "4"]  # type: ignore[union-attr]
    assert "nothing is predicted" in tables[0].note  # type: ignore[union-attr]


def test_what_goes_through_memory_is_not_said_to_be_sent_over_a_link(tmp_path: Path) -> None:
    directory = full_run(tmp_path / "r", ranks=2, hosts=("node-a",))
    for path in directory.glob("events-rank*.jsonl"):
        path.write_text(path.read_text().replace('"route":"hierarchical"', '"route":"shared"'))
    section = network.make(report_run.read(directory))
    assert section is not None
    assert "a step through the memory of the host at" in section.lead
