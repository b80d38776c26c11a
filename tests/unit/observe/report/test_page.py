"""The page: the run's own numbers, in order, escaped, small, and honest about what is missing."""

from __future__ import annotations

import json
import random
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.errors import ConfigError, DataError
from farandole.observe.diagnose import diagnose
from farandole.observe.figures.summary import summarise
from farandole.observe.report import write_report
from tests.unit.observe.report.full_runs import full_run
from tests.unit.observe.report.pages import Page
from tests.unit.observe.runs import make_run

HOSTILE = "<script>alert('x')</script>&\"'"
ALL = ["fixes", "step", "late", "timeline", "curves", "network", "balance", "scaling", "environment"]


def page_of(run: Path) -> Page:
    return Page(write_report(run))


def test_the_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    make_run(tmp_path / "alone", compute=[0.2], samples=8)
    run = make_run(tmp_path / "both", compute=[0.100, 0.150], wire=0.012, data=0.0)
    path = write_report(run)
    assert path == run / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    page = Page(path)
    assert page.figure("samples/s") == "49.4"
    assert page.figure("speedup") == "1.25x efficiency 0.62"
    assert page.figure("waiting for others") == "15% 25 ms a step"
    assert page.figure("exposed communication") == "7.4% 12 ms a step"
    assert page.figure("standard deviation of compute") == "25 ms 20.0% of the mean"
    assert page.figure("slowest rank") == "150 ms rank 1, 1.20x the mean"
    assert "both" in page.text
    assert "compute 77%" in summarise(run).to_text()
    assert "77% of the ranks' time is compute, with pauses and the rest." in page.text


def test_the_verdict_comes_first_and_all_sections_in_order(tmp_path: Path) -> None:
    full_run(tmp_path / "one", ranks=1, hosts=["node-a"])
    page = page_of(full_run(tmp_path / "r", slow={2: {"backward": 0.05}}))
    assert page.sections == ALL
    assert "rank 2" in page.heading
    assert "backward" in page.heading
    assert "ms a step" in page.heading
    assert "could be saved" not in page.heading, "a heading ends after the cost"
    found = re.search(r'<p class="saving">(About .* could be saved.*)</p>', page.html)
    assert found
    verdict = diagnose(tmp_path / "r").verdict
    assert verdict == f"{page.heading.removesuffix('.')}; {found[1][0].lower()}{found[1][1:]}"
    assert page.html.index("<h1>") < page.html.index('class="figures"') < page.html.index('id="fixes"')
    assert "Rank 2 on node-b takes 50 ms more in backward than the typical rank" in page.text
    assert "Should save" in page.text
    assert "4 ranks, 2 hosts, 40 steps" in page.text


def test_a_watched_page_loads_itself_again_and_a_finished_one_does_not(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r", steps=5)
    assert '<meta http-equiv="refresh" content="3.0">' in write_report(run, refresh_seconds=3.0).read_text()
    assert "http-equiv" not in write_report(run).read_text()


def test_hostile_text_is_shown_not_run(tmp_path: Path) -> None:
    run = full_run(
        tmp_path / "r",
        command=["python", HOSTILE],
        hosts=[HOSTILE, "b"],
        pauses={20: 0.2},
        phase_names={20: HOSTILE},
    )
    (run / "failure.json").write_text(
        json.dumps(
            {"rank": 1, "host": HOSTILE, "step": 3, "cause": HOSTILE, "traceback": HOSTILE, "remedy": HOSTILE}
        )
    )
    page = page_of(run)
    assert page.scripts == 1, "our own, and no other"
    assert f"Rank 1 on {HOSTILE} failed after step 3: {HOSTILE}" in page.text
    assert "<script>alert" not in page.html
    assert page.text.count("alert") >= 6


def test_the_failure_says_what_to_do(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r", steps=5)
    facts = {"rank": 1, "host": "b", "step": 0, "cause": "MemoryError", "traceback": "Traceback: x"}
    (run / "failure.json").write_text(json.dumps({**facts, "remedy": "use a smaller batch"}))
    text = page_of(run).text
    assert "Rank 1 on b failed before its first step: MemoryError use a smaller batch" in text
    for broken in ("", "{", "[]", '{"rank": 1}', "null"):
        (run / "failure.json").write_text(broken)
        assert "failure.json cannot be read" in page_of(run).text


@pytest.mark.full("further")
def test_a_thousand_steps_of_eight_ranks_are_small(tmp_path: Path) -> None:
    names = {step: f"a phase of the user's number {step}" for step in range(10, 1000, 10)}
    run = full_run(
        tmp_path / "r", ranks=8, steps=1000, buckets=2, pauses=dict.fromkeys(names, 0.1), phase_names=names
    )
    assert 100_000 < write_report(run).stat().st_size <= 500_000


def test_many_buckets_are_small(tmp_path: Path) -> None:
    path = write_report(full_run(tmp_path / "r", ranks=8, steps=20, buckets=120, wire=0.0005, pauses={15: 0.5}))
    assert path.stat().st_size <= 500_000


def test_hundreds_of_ranks_are_small_and_the_slowest_is_among_those_shown(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r", ranks=150, steps=6, buckets=3, slow={77: {"forward": 0.05}})
    path = write_report(run)
    assert path.stat().st_size <= 500_000
    page = Page(path)
    assert "The 32 ranks with the longest compute, of 150." in page.text
    assert "16 of 150 ranks, the slowest among them" in page.text
    assert page.html.count(">rank 77<") >= 2


def test_slow_steps_are_drawn_or_named(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "r", steps=100, pauses={60: 2.0}))
    assert "2 steps longer on a rank than the chart is tall: step 60 (2.13 s), step 1 (" in page.text
    assert "A slow step: step 60, 2.13 s" in page.text


def test_single_slow_steps_of_a_long_run_stay_visible(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "r", ranks=2, buckets=1, steps=450, pauses={300: 0.15}))
    assert "the slowest of each 3 steps" in page.text
    line = re.search(r'class="line peak" points="([^"]*)"', page.html)
    assert line is not None
    heights = [190 - float(point.split(",")[1]) for point in line[1].split()]
    assert max(heights[50:]) > 1.8 * sorted(heights)[75], "the pause is not averaged away"


def test_a_rank_that_stopped_early_does_not_shorten_the_charts(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r", steps=100)
    path = run / "events-rank3.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:30]))
    html = write_report(run).read_text()
    assert "step 100: compute" in html or "step 99: compute" in html


def test_sums_are_at_least_when_a_rank_is_missing(tmp_path: Path) -> None:
    full_run(tmp_path / "one", ranks=1, hosts=["node-a"])
    run = full_run(tmp_path / "r")
    (run / "events-rank2.jsonl").unlink()
    page = page_of(run)
    assert page.figure("samples/s").startswith("at least ")
    assert page.figure("samples/s").endswith("1 of 4 ranks not counted")
    assert page.figure("speedup").startswith("at least ")
    assert "events-rank2.jsonl" in page.text


def test_metrics_stand_in_for_events(tmp_path: Path) -> None:
    rows = [
        {"kind": "step", "step": i, "seconds": 0.1, "loss": 5.0 / i, "samples_per_second": 80.0}
        for i in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n[]\n")
    page = page_of(tmp_path)
    assert page.sections == ["curves", "environment"]
    assert page.html.count("<figure>") == 2
    assert "no step was recorded by farandole; the curves are rank 0's" in page.heading
    assert page.figure("samples/s") == "80 rank 0's, times the ranks"
    assert "metrics.jsonl: 2 lines cannot be read" in page.text


def test_metrics_of_the_script_are_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", compute=[0.1, 0.1], steps=20)
    before = page_of(run).html.count("<figure>")
    rows = [{"kind": "metrics", "step": i, "values": {"<b>accuracy": i / 10, "once": 1.0}} for i in (4, 8, 2)]
    rows += [{"kind": "metrics", "step": 9, "values": {"lr": 1e-3}}, {"kind": "metrics", "values": 3}]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    page = page_of(run)
    assert page.html.count("<figure>") == before + 2, "one value is no curve"
    assert "&lt;b&gt;accuracy" in page.html
    assert "metrics.jsonl: 1 line cannot be read" in page.text


def test_what_is_not_known_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", compute=[0.1], steps=1, samples=0, loss=False)
    (run / "run.json").unlink()
    page = page_of(run)
    assert page.figure("samples/s") == "unknown"
    assert "run.json is missing" in page.text
    assert "The plan is unknown" in page.text
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_text('{"size": 2}')
    assert page_of(empty).heading == "2 ranks: no step was recorded by farandole."


@pytest.mark.parametrize(
    "damage",
    [
        "nothing",
        "{",
        "[]",
        "null",
        '{"plan": 3, "hosts": 4, "versions": [], "command": "x", "size": -1}',
    ],
)
def test_run_json_of_any_kind(tmp_path: Path, damage: str) -> None:
    run = full_run(tmp_path / "r", steps=4)
    (run / "run.json").write_bytes(b"\xff\xfe" if damage == "nothing" else damage.encode())
    assert "timeline" in page_of(run).sections


@pytest.mark.parametrize("keep", [0, 1, 100, 2000, 20_000])
def test_a_file_cut_anywhere_gives_a_page(tmp_path: Path, keep: int) -> None:
    run = full_run(tmp_path / "r")
    path = run / "events-rank1.jsonl"
    path.write_bytes(path.read_bytes()[:keep])
    assert "curves" in page_of(run).sections


def test_garbage_between_the_lines_is_left_out_and_said(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r")
    path = run / "events-rank1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[10:10] = [b"\x00\xff\n", b'{"step": "x"}\n', b"[1, 2]\n"]
    path.write_bytes(b"".join(lines))
    page = page_of(run)
    assert page.sections == ALL
    assert "events-rank1.jsonl:11" in page.text


def test_versions_may_be_mixed_and_newer_ones_are_refused(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r", ranks=3, hosts=["h"])
    old = make_run(tmp_path / "old", compute=[0.1] * 3)
    row = {"begin_seconds": 100.0, "end_seconds": 100.2, "data_seconds": 0.0, "samples": 4, "exchanges": []}
    started = {**json.loads((old / "events-rank1.jsonl").read_text().splitlines()[0]), "version": 1}
    del started["clock"]
    lines = [started, *({**row, "step": step} for step in range(1, 41))]
    (run / "events-rank1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    newer = json.loads((run / "events-rank2.jsonl").read_text().splitlines()[0])
    (run / "events-rank2.jsonl").write_text(json.dumps({**newer, "version": 99}) + "\n")
    page = page_of(run)
    assert "events of version 99" in page.text
    assert "no phases were recorded by rank 1: " in page.text
    assert "at least" in page.figure("samples/s")


def test_clocks_an_hour_apart(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r", slow={0: {"backward": 0.05}})
    corrected = page_of(run)
    assert "All ranks on one clock" in corrected.text
    for path in run.glob("events-rank*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith('{"clock"')]
        path.write_text("".join(lines))
    bare = page_of(run)
    assert "the hosts' clocks cannot be compared" in bare.text
    assert "The clocks of the hosts cannot be compared, so arrivals of buckets cannot either" in bare.text
    assert "takes 50 ms more in backward" in bare.text


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    run = full_run(tmp_path / "r", ranks=1, hosts=["h"])
    path = run / "events-rank0.jsonl"
    path.write_text(path.read_text().replace('"step": 30,', '"step": 30, "x": 1,').replace('"loss":', '"loss":'))
    lines = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("step") in (30, 31):
            row["loss"] = float("nan")
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    assert "Not a number in 2 steps, first in step 30." in page_of(run).text


def test_directories_that_are_no_runs_and_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory"):
        write_report(tmp_path / "missing")
    with pytest.raises(DataError, match="holds nothing of a run"):
        write_report(tmp_path)
    make_run(tmp_path / "demo" / "np2", compute=[0.1])
    with pytest.raises(DataError, match="name one of the runs in it: np2"):
        write_report(tmp_path / "demo")
    run = make_run(tmp_path / "r", compute=[0.1])
    with pytest.raises(ConfigError, match=r"cannot write /proc/nowhere/x\.html"):
        write_report(run, Path("/proc/nowhere/x.html"))
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(run, tmp_path)
    with pytest.raises(DataError, match="is not a run directory"):
        write_report(full_run(tmp_path / "two", steps=4), baseline=tmp_path / "nowhere")


ODD: list[object] = [None, -1, 0, 1e308, float("nan"), float("inf"), "x", [], {}, [1, 2], 10**30, True, -1e18]


def _damaged(value: Any, chance: random.Random) -> Any:
    """Return a value with something odd somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        rest = {name: inner for name, inner in value.items() if name != key}
        return rest if chance.random() < 0.15 else {**rest, key: _damaged(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], _damaged(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD)


@pytest.mark.full("slow")
def test_odd_values_anywhere_give_a_page(tmp_path: Path) -> None:
    whole = full_run(tmp_path / "r", ranks=3, steps=12, buckets=3, pauses={5: 0.1})
    kept = {path: path.read_text() for path in whole.iterdir()}
    for seed in range(60):
        chance = random.Random(seed)
        for path in chance.sample(sorted(kept), 2):
            lines = [json.loads(line) for line in kept[path].splitlines()]
            for _ in range(chance.randrange(1, 6)):
                at = chance.randrange(len(lines))
                lines[at] = _damaged(lines[at], chance)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        html = write_report(whole, tmp_path / "page.html").read_text()
        assert not re.search(r'(points|x|y|width|height|d)="[^"]*(nan|inf)', html), f"seed {seed}"
        for path, text in kept.items():
            path.write_text(text)
