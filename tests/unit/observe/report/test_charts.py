"""Scales, labels, escaping and bounds of the charts."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.observe.report.charts import (
    Axes,
    Label,
    Line,
    Scale,
    apart,
    binned,
    frame,
    limit,
    line_chart,
    overlap,
    share_bar,
    stacked_area,
    tick_texts,
    ticks,
    whole_ticks,
)
from farandole.observe.report.late import heat_map, warm
from farandole.observe.report.timeline import GanttSpan, Row, gantt

HOSTILE = "</svg><script>alert('x')</script>&\"'"
AXES = Axes("step", "loss")


def parse(svg: str) -> ET.Element:
    """Parse as XML: what is not closed or not escaped fails."""
    return ET.fromstring(svg)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_within(low: float, span: float) -> None:
    high = low + span
    if not high > low + 1e-9 * abs(low):
        return
    found = ticks(low, high)
    assert 1 <= len(found) <= 9
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in found)
    assert all(a < b for a, b in pairwise(found))


def test_ticks_of_no_range_and_of_counts() -> None:
    assert ticks(3.0, 3.0)
    assert ticks(0.0, 0.0)
    assert whole_ticks(1, 1) == [1.0]
    assert whole_ticks(1, 1000) == [500.0, 1000.0]
    assert all(tick == int(tick) for tick in whole_ticks(1, 7))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        ([9998.0, 10000.0], ["9,998", "10,000"]),
        ([0, 2e8, 4e8], ["0", "200M", "400M"]),
        ([1e-7, 2e-7], ["1e-07", "2e-07"]),
    ],
)
def test_numbers_of_an_axis_are_written_alike(values: list[float], texts: list[str]) -> None:
    assert tick_texts(values) == texts


def test_a_scale_is_linear_and_clips() -> None:
    scale = Scale(10.0, 20.0)
    assert [scale.share(v) for v in (0.0, 10.0, 15.0, 20.0, 99.0)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert Scale(1.0, 1.0).share(1.0) == 0.5
    assert Scale(1.0, math.nan).share(1.0) == 0.5


def test_a_few_outliers_do_not_flatten_a_chart_and_many_are_no_outliers() -> None:
    assert limit([1.0] * 99 + [50.0]) == 4.0
    assert limit([1.0] * 50 + [50.0] * 50) == 50.0
    assert limit([1.0, 2.0, 3.0]) == 3.0
    assert limit([]) == limit([math.nan]) == 1.0


@given(st.lists(st.text("0123456789,.", min_size=1, max_size=12), min_size=1, max_size=40))
def test_labels_are_thinned_until_they_do_not_overlap(texts: list[str]) -> None:
    labels = [Label(i / max(1, len(texts) - 1), text) for i, text in enumerate(texts)]
    kept = apart(labels)
    assert kept[0] == labels[0]
    assert not any(overlap(a, b, 270) for a, b in pairwise(kept))


def test_lines_are_where_their_numbers_say() -> None:
    svg = str(line_chart([Line("mine", [(0, 0), (5, 10), (10, 5)], "mine")], AXES))
    points = re.search(r'class="line mine" points="([^"]*)"', svg)
    assert points is not None
    assert points[1] == "0,190 500,0 1000,95"
    assert "step 5: mine 10" in svg


def test_every_chart_is_well_formed_and_escapes_names() -> None:
    line = Line(HOSTILE, [(0, 1), (1, 2)], "mine", band=[(0, 0, 2), (1, 1, 3)])
    made = [
        line_chart([line], Axes(HOSTILE, HOSTILE)),
        stacked_area([1, 2, 3], [[1, 2, 3], [3, 2, 1]], [HOSTILE, "b"], ["part-data", "part-rest"], AXES),
        heat_map(
            [HOSTILE], [HOSTILE, "b"], [[1.0, None]],
            says=HOSTILE, across_name=HOSTILE, text=lambda v: HOSTILE, top=1.0,
        ),
        gantt([Row(HOSTILE, [GanttSpan(HOSTILE, 0.0, 1.0, "phase-data")])], says=HOSTILE),
        frame("", 10, says=HOSTILE, up=[Label(0, HOSTILE)], across=[Label(0, HOSTILE)], up_name=HOSTILE),
        share_bar([1.0], [HOSTILE], ["part-data"], whole=2.0),
        warm(HOSTILE, 1.0, 2.0),
    ]  # fmt: skip
    for chart in made:
        root = parse(str(chart))
        assert not list(root.iter("script"))
        assert "alert" in "".join(root.itertext()) + str(chart), "the name is shown"


def test_charts_are_of_bounded_size() -> None:
    points = [(float(i), math.nan if i % 3 == 0 else float(i)) for i in range(100_000)]
    assert len(binned(points)) <= 200
    assert len(line_chart([Line("a", points, "mine")], AXES)) < 12_000
    steps = [float(i) for i in range(100_000)]
    assert len(stacked_area(steps, [steps] * 6, ["n"] * 6, ["s"] * 6, AXES)) < 40_000


def test_nothing_to_draw_is_nothing() -> None:
    assert line_chart([], AXES) == ""
    assert line_chart([Line("a", [(1, 2)], "mine")], AXES) == ""
    assert line_chart([Line("a", [(1, math.nan), (2, math.inf)], "mine")], AXES) == ""
    assert stacked_area([1], [[1]], ["a"], ["s"], AXES) == ""
    assert gantt([Row("r", [])], says="") == ""
    assert parse(str(share_bar([0.0], ["a"], ["s"], whole=0.0))) is not None


def test_blocks_keep_their_times() -> None:
    chart = str(gantt([Row("rank 0", [GanttSpan("forward", 3600.1, 3600.2, "phase-forward")],
                           [GanttSpan("bucket 0", 3600.15, 3600.3, "wire")])], says=""))  # fmt: skip
    assert 'data-span="200"' in chart
    assert "<title>forward 100 ms</title>" in chart
    assert re.search(r'class="phase-forward" x="0" y="4" width="500" ', chart)
    assert re.search(r'class="wire" x="250" y="24" width="750" ', chart)
    assert ">100 ms<" in chart


def test_an_accelerator_has_a_row_of_its_own_between() -> None:
    host = [GanttSpan("forward", 0.0, 0.1, "phase-forward")]
    device = [GanttSpan("forward, on the accelerator", 0.05, 0.2, "phase-forward")]
    chart = str(
        gantt([Row("rank 0", host, [GanttSpan("b", 0.1, 0.2, "wire")], device), Row("rank 1", host)], says="")
    )
    assert re.search(r'class="phase-forward" x="250" y="24" width="750" height="12"><title>forward, on the', chart)
    assert re.search(r'class="wire" x="500" y="38" ', chart)
    assert re.search(r'class="phase-forward" x="0" y="52" width="500" ', chart), "all ranks have the same height"
    assert 'viewBox="0 0 1000 96"' in chart


def test_warmth_is_by_value() -> None:
    strengths = [re.search(r"--strength:([\d.]+)", str(warm("x", value, 2.0))) for value in (0.5, 2.0, 9.0)]
    assert [found and found[1] for found in strengths] == ["0.25", "1.00", "1.00"]
    assert "--strength" not in warm("x", 0.0, 2.0)
