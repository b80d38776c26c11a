"""`farandole bench scaling`: warm-up, intervals, cases, comparison and pages. Nothing is measured here."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.bench import launch_ranks, scaling
from farandole.bench.intervals import nested_interval, nested_ratio
from farandole.bench.machine import busy_note, has_16_bits, machine_facts, machine_line
from farandole.bench.scaling import (
    MeasuredRun,
    ScalingCase,
    chart,
    compare,
    drifts,
    format_scaling,
    make_cases,
    read_changes,
    read_measured,
    read_sizes,
    settle,
    to_words,
    write_html,
)
from farandole.core.vocabulary.errors import ConfigError, DataError, FarandoleError
from tests.unit.cli.test_cli import call
from tests.unit.observe.phased_run import STEP, make_phased_run


@pytest.mark.parametrize("seed", range(20))
def test_warm_up_is_found_under_noise(seed: int) -> None:
    draw = random.Random(seed)
    slow = [1.0 + 3.0 * 0.7**i for i in range(12)]
    values = [value * draw.gauss(1, 0.03) for value in [*slow, *([1.0] * 188)]]
    found = settle(values)
    assert 5 <= found.warm_up <= 40, "what is left of the decay after 5 steps is half a step's time"
    assert max(values[found.warm_up :]) < 2


def test_false_alarms_of_drift_are_as_rare_as_the_test_says() -> None:
    draws = [random.Random(seed) for seed in range(400)]
    alarms = sum(drifts([draw.gauss(1, 0.1) for _ in range(100)]) for draw in draws)
    assert alarms <= 12, "about one in a hundred"


def test_a_late_stall_is_no_warm_up() -> None:
    draw = random.Random(1)
    values = [draw.gauss(1, 0.02) for _ in range(200)]
    values[90] = 60.0
    assert settle(values).warm_up < 60


def test_what_drifts_is_not_steady() -> None:
    draw = random.Random(2)
    assert not settle([1 + i / 100 + draw.gauss(0, 0.05) for i in range(200)]).steady
    assert not settle([3 - i / 100 + draw.gauss(0, 0.05) for i in range(200)]).steady
    assert settle([1.0] * 50) == settle([1.0] * 50)
    assert settle([1.0] * 50).steady


TICKING = [
    3800.0, 259.2, 252.1, 60.0, 51.9, 60.2, 55.8, 55.4, 51.7, 56.5, 51.5, 56.9, 55.8, 59.5, 52.0, 56.5, 56.2,
    51.9, 56.2, 60.1, 51.9, 56.1, 60.0, 51.9, 55.8, 56.3, 60.1, 55.8, 60.1, 55.9, 55.8, 56.1, 58.6, 56.2,
    57.3, 51.5, 56.3, 56.0, 56.0, 55.8,
]  # fmt: skip
"""Milliseconds of steps: the script slept 250 in the first three, 50 in the others, on a busy machine."""


def test_warm_up_is_found_where_most_steps_take_the_same_time_to_a_tick() -> None:
    """Their median deviation is next to nothing; the warm-up is fifty times what the others deviate."""
    found = settle(TICKING)
    assert 3 <= found.warm_up <= 12
    assert found.steady


@pytest.mark.parametrize("count", range(9))
def test_short_runs_lose_one_step_and_promise_nothing(count: int) -> None:
    found = settle([1.0] * count)
    assert found.warm_up == (0 if count < 2 else 1)
    assert not found.steady


def test_rounds_count_more_than_steps() -> None:
    """Two rounds that differ by a fifth leave an interval that spans both, however many steps each has."""
    draw = random.Random(3)
    fast, slow = ([draw.gauss(mean, 0.01) for _ in range(500)] for mean in (1.0, 1.2))
    middle, (low, high) = nested_interval([fast, slow])
    assert middle == pytest.approx(1.1, abs=0.01)
    assert low < 1.01
    assert high > 1.19
    ratio, (least, most) = nested_ratio([[2 * v for v in fast], [2 * v for v in slow]], [fast, slow])
    assert ratio == pytest.approx(2.0, abs=0.01)
    assert most - least < 0.02, "what both share cancels"
    assert nested_interval([[3.0]]) == (3.0, (3.0, 3.0))


def test_rates_and_times_agree_however_far_two_rounds_are_apart() -> None:
    """A step of 16 samples took ten times longer in the second round."""
    slow, fast = [[0.025] * 9, [0.25] * 9], [[0.02] * 9, [0.04] * 9]
    step, _ = nested_interval(slow)
    rate, _ = nested_interval([[16 / seconds for seconds in round_] for round_ in slow])
    assert rate == pytest.approx(16 / step)
    by_times, _ = nested_ratio(slow, fast)
    assert by_times == pytest.approx(step / nested_interval(fast)[0])
    assert nested_interval([*slow, [0.03]])[0] == pytest.approx(0.03), "of three it is the one in the middle"


def test_sizes() -> None:
    assert read_sizes("4, 1,2") == [1, 2, 4]
    for text in ("", "1", "1,1", "0,2", "1,x", "1,-2", "1,99999"):
        with pytest.raises(ConfigError, match="--np"):
            read_sizes(text)


def test_cases_fill_in_the_batch() -> None:
    found = make_cases(["t.py", "--b={batch}", "{np}"], [1, 2, 4], "both", 8)
    assert [(case.mode, case.ranks, case.command[1:]) for case in found] == [
        ("weak", 1, ("--b=8", "1")), ("weak", 2, ("--b=8", "2")), ("weak", 4, ("--b=8", "4")),
        ("strong", 1, ("--b=8", "1")), ("strong", 2, ("--b=4", "2")), ("strong", 4, ("--b=2", "4")),
    ]  # fmt: skip
    for words, mode, batch, text in [
        (["t.py"], "strong", None, "does not say where its batch is"),
        (["t.py"], "weak", 8, "has no {batch}"),
        (["t.py", "{batch}"], "weak", None, "but no --batch"),
        (["t.py", "{batch}"], "strong", 7, "--batch 7 cannot be divided among 2 ranks"),
    ]:
        with pytest.raises(ConfigError) as caught:
            make_cases(words, [1, 2], mode, batch)
        assert text in caught.value.message


def measured(ranks: int, seconds: float, samples: int = 0) -> MeasuredRun:
    shares = {"compute": 0.8, "communication": 0.1, "waiting": 0.06, "data": 0.04}
    rates = [samples / seconds] * 20 if samples else []
    return MeasuredRun(ranks, [seconds] * 20, rates, 30 * seconds, 25, 5, True, shares, 0.02, 0.9, None, 10**9)


def rows_of(*runs: tuple[ScalingCase, MeasuredRun]) -> list[dict[str, Any]]:
    return compare(
        [case for case, _ in runs], {(case.ranks, case.command, case.changes): [run] * 2 for case, run in runs}
    )


def test_speedup_is_by_rates_where_samples_are_known() -> None:
    one, four = ScalingCase("weak", 1, ("a",)), ScalingCase("weak", 4, ("a",))
    rows = rows_of((one, measured(1, 0.1, samples=8)), (four, measured(4, 0.125, samples=32)))
    assert [(row["speedup"], row["efficiency"]) for row in rows] == [(1.0, 1.0), (pytest.approx(3.2), 0.8)]
    assert rows[1]["speedup_interval"] == (pytest.approx(3.2), pytest.approx(3.2))


@pytest.mark.parametrize(("mode", "speedup"), [("weak", 1.6), ("strong", 0.8)])
def test_speedup_by_times_knows_whose_work_grows(mode: str, speedup: float) -> None:
    two, four = ScalingCase(mode, 2, ("a",)), ScalingCase(mode, 4, ("b",))
    rows = rows_of((two, measured(2, 0.1)), (four, measured(4, 0.125)))
    assert rows[1]["speedup"] == pytest.approx(speedup)
    assert rows[1]["efficiency"] == pytest.approx(speedup / 2), "beside two ranks, four are twice as many"


def result() -> dict[str, Any]:
    rows = rows_of(
        (ScalingCase("weak", 1, ("a",)), measured(1, 0.1, samples=8)),
        (ScalingCase("weak", 2, ("a",)), measured(2, 0.11, samples=16)),
    )
    return {
        "machine": machine_facts(), "command": ["python", "<t>.py"], "sizes": [1, 2], "mode": "weak",
        "batch": None, "hosts": None, "plan": [], "changes": [], "rounds": 2, "rows": rows, "notes": ["a note"],
        "failed": [{"mode": "weak", "ranks": 4, "reason": "no <memory>"}],
    }  # fmt: skip


def test_table_and_page(tmp_path: Path) -> None:
    found = result()
    json.dumps(found)
    first, second, rest = (part.splitlines() for part in format_scaling(found).split("\n\n"))
    assert [first[0].split()[0], second[0].split()[0]] == ["ranks", "ranks"]
    assert " ".join(first[2].split()) == "2 weak 3.3 s 110 ms 110 ms to 110 ms 145 1.82 1.82 to 1.82 0.91"
    assert " ".join(second[2].split()) == "2 weak 10.0% 6.0% 4.0% 2.0% 0.90 1 GB"
    assert rest == [
        "warm-up: up to 5 steps left out by their times; 2 rounds",
        "no numbers for 4 ranks (weak): no <memory>",
        "note: a note",
    ]
    write_html(found, tmp_path / "s.html")
    page = (tmp_path / "s.html").read_text()
    assert "farandole bench scaling --np 1,2 --rounds 2 --mode weak -- python &#39;&lt;t&gt;.py&#39;" in page
    assert "Warm-up: up to 5 steps left out by their times; 2 rounds." in page
    assert "no numbers for 4 ranks (weak): no &lt;memory&gt;" in page
    assert "http" not in page, "it opens offline"
    assert page.count("<circle") == 2
    points = chart(found)["series"][0]["points"]
    assert points[0]["at"][1] > points[1]["at"][1], "more is higher"
    with pytest.raises(ConfigError, match="cannot write"):
        write_html(found, tmp_path / "s.html" / "x")


def test_two_plans_side_by_side_say_what_the_change_brought(tmp_path: Path) -> None:
    cases = make_cases(["t.py"], [1, 2], "weak", None, read_changes("codec=int8  bucket_bytes=4MiB"))
    assert [(case.ranks, case.changes) for case in cases] == [
        (1, ()), (2, ()), (2, ("codec=int8", "bucket_bytes=4MiB")),
    ]  # fmt: skip
    before, after = measured(2, 0.4, samples=16), measured(2, 0.1, samples=16)
    before.shares["communication"], after.shares["communication"] = 0.75, 0.125
    rows = rows_of(*zip(cases, [measured(1, 0.1, samples=8), before, after], strict=True))
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 0.5, 2.0])
    found = {**result(), "rows": rows, "changes": list(cases[2].changes), "failed": []}
    line = (
        "codec=int8 bucket_bytes=4MiB on 2 ranks (weak): a step 400 ms before, 100 ms after (4.00x); "
        "communication 75.0% of it before, 12.5% after"
    )
    assert line in format_scaling(found).splitlines()
    assert to_words(found)[-5:-3] == ["--compare", "codec=int8 bucket_bytes=4MiB"]
    write_html(found, tmp_path / "s.html")
    page = (tmp_path / "s.html").read_text()
    assert f"<p>{line}</p>" in page
    assert page.count("<polyline") == 2, "a line for each plan"
    for text in ("", "int8", "codec=int8 4"):
        with pytest.raises(ConfigError, match="--compare"):
            read_changes(text)


def test_a_base_that_failed_is_never_replaced_by_the_other_plan() -> None:
    changed, plain = ScalingCase("weak", 2, ("a",), ("codec=int8",)), ScalingCase("weak", 4, ("a",))
    rows = rows_of((changed, measured(2, 0.1, samples=16)), (plain, measured(4, 0.1, samples=32)))
    assert [(row["beside_ranks"], row["speedup"]) for row in rows] == [(4, 0.5), (4, 1.0)]


def test_bars_of_two_modes_stand_beside_each_other() -> None:
    found = result()
    found["rows"] += [{**row, "mode": "strong"} for row in found["rows"]]
    weak, strong = chart(found)["series"]
    assert [a["at"][0] < b["at"][0] for a, b in zip(weak["points"], strong["points"], strict=True)] == [True] * 2


def test_the_command_of_a_result_makes_it_again() -> None:
    found = {**result(), "mode": "both", "batch": 16, "hosts": "a:2,b:2", "command": ["t.py", "{batch}"]}
    assert to_words(found)[5:] == [
        "--rounds", "2", "--mode", "both", "--batch", "16", "--hosts", "a:2,b:2", "--", "t.py", "{batch}",
    ]  # fmt: skip
    found = {**result(), "plan": ["--set", "codec=int8"]}
    assert to_words(found)[-5:] == ["--set", "codec=int8", "--", "python", "<t>.py"]


def test_a_table_fits_a_terminal_of_100_columns() -> None:
    found = result()
    for row in found["rows"]:
        row.update(mode="strong", training_seconds=1234.5, step_seconds=0.1234, step_interval=(0.1111, 0.1333))
        row.update(samples_per_second=12345.6, speedup=12.34, speedup_interval=(11.11, 13.33))
    found["notes"] = found["failed"] = []
    assert max(len(line) for line in format_scaling(found).splitlines()) <= 100


def failing(*bad: tuple[int, int], code: int = 1) -> Callable[..., MeasuredRun]:
    """Return what stands for a run of the script: fails where (ranks, which of its runs) is in `bad`."""
    made: dict[int, int] = {}

    def run(ranks: int, *_: object) -> MeasuredRun:
        made[ranks] = made.get(ranks, 0) + 1
        if (ranks, made[ranks]) in bad:
            problem = FarandoleError(f"broken on {ranks}")
            problem.exit_code = code
            raise problem
        return measured(ranks, 0.1, samples=8 * ranks)

    return run


def scale(monkeypatch: pytest.MonkeyPatch, run: Callable[..., MeasuredRun]) -> tuple[dict[str, Any], list[str]]:
    monkeypatch.setattr(scaling, "_run", run)
    said: list[str] = []
    found = scaling.bench_scaling(
        ["t"], sizes=[1, 2, 4], rounds=2, mode="weak", batch=None, hosts=None, say=said.append
    )
    return found, said


def test_a_size_that_fails_leaves_the_others_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = scale(monkeypatch, failing((4, 1)))
    assert [row["ranks"] for row in found["rows"]] == [1, 2]
    assert found["failed"] == [{"mode": "weak", "ranks": 4, "reason": "broken on 4"}]
    assert sum(line.endswith("4 ranks: t") for line in said) == 1, "what fails is not run again"
    assert "no numbers for 4 ranks: broken on 4" in said
    json.dumps(found)


def test_ranks_that_share_the_cores_of_one_host_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    found, _ = scale(monkeypatch, failing())
    assert any(note.endswith("fewer each: 2 with 1, 1 with 2, 0.5 with 4") for note in found["notes"])


def test_a_smallest_size_that_fails_late_is_no_measure_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = scale(monkeypatch, failing((1, 2)))
    assert [(row["ranks"], row["beside_ranks"]) for row in found["rows"]] == [(2, 2), (4, 2)]
    assert found["rows"][1]["speedup"] == pytest.approx(2.0)
    assert [gone["ranks"] for gone in found["failed"]] == [1]


def test_all_that_fail_and_an_interrupt_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FarandoleError, match="broken on 1"):
        scale(monkeypatch, failing((1, 1), (2, 1), (4, 1)))
    with pytest.raises(FarandoleError, match="broken on 2") as caught:
        scale(monkeypatch, failing((2, 1), code=130))
    assert caught.value.exit_code == 130


@pytest.mark.parametrize(("code", "kept"), [(3, 1), (130, 0), (0, 0)])
def test_only_a_failed_run_leaves_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kept: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scaling, "run_here", lambda command: code)
    with pytest.raises(FarandoleError):  # a run that ended well has no records here
        scaling._run(2, ["t"], None, ())
    assert len(list(tmp_path.iterdir())) == kept
    monkeypatch.setattr(launch_ranks, "run_here", lambda command: code)
    with pytest.raises(FarandoleError, match="ranks of the benchmark failed"):
        launch_ranks.run_on_hosts(launch_ranks.Hosts(1, 2, None), "m", [], say=lambda line: None)
    assert len(list(tmp_path.iterdir())) == 2 * kept


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_in_order_and_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    cleaned = []

    def work() -> None:
        with launch_ranks.ending_in_order():
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)
                cleaned.append("all")

    with pytest.raises(SystemExit) as caught:
        work()
    assert caught.value.code == 128 + number
    assert cleaned == ["all"]
    assert signal.getsignal(number) is before


def test_a_run_is_read_after_its_warm_up(tmp_path: Path) -> None:
    found = read_measured(make_phased_run(tmp_path / "r", steps=30))
    assert (found.ranks, found.steps) == (2, 30)
    assert len(found.step_seconds) == 30 - found.warm_up_steps
    assert found.step_seconds[0] == pytest.approx(STEP, abs=1e-5)
    assert found.rates[0] == pytest.approx(8 / STEP, rel=1e-3)
    assert found.shares["communication"] == pytest.approx(10 / 68, abs=0.01)
    assert found.shares["waiting"] == pytest.approx(10 / 68, abs=0.01)
    assert found.load_deviation == pytest.approx(10 / 46, abs=0.01), "36 and 56 ms of compute"
    assert (found.busy_cores, found.resident_bytes) == (1.5, 123_000_000)
    (tmp_path / "r" / "events-rank1.jsonl").unlink()
    with pytest.raises(DataError, match="1 of 2 ranks recorded steps"):
        read_measured(tmp_path / "r")


def test_machine_facts_are_a_sentence() -> None:
    facts = machine_facts()
    assert f"{facts['cores']} cores of {facts['processor']}" in machine_line(facts)
    assert busy_note({**facts, "load": [0.0, 0, 0]}) is None
    assert "was busy" in (busy_note({**facts, "load": [50.0, 0, 0]}) or "")


def test_a_commit_that_is_not_what_was_measured_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert machine_facts()["commit"] is None
    (tmp_path / "f").write_text("a")
    who = ("-c", "user.name=n", "-c", "user.email=e")
    for words in (["init", "-q"], ["add", "f"], [*who, "commit", "-qm", "m"], [*who, "tag", "-am", "t", "v1"]):
        subprocess.run(["git", *words], check=True)
    commit = machine_facts()["commit"]
    assert len(commit) == 40
    (tmp_path / "f").write_text("b")
    assert machine_facts()["commit"] == f"{commit}+"


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("flags\t\t: fpu avx2", False),
        ("flags\t\t: fpu avx2 avx512f", True),
        ("Features\t: asimd", True),
        ("", True),
    ],
)
def test_processors_without_16_bits_are_known(text: str, has: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}\n")
    assert has_16_bits(tmp_path / "cpuinfo") is has
    assert has_16_bits(tmp_path / "none")


TRAIN = ["--", "python", "train.py"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["scaling", *TRAIN], "the following arguments are required: --np"),
        (["scaling", "--np", "1,2"], "no command was given; for example: --np 1,2 -- python train.py"),
        (["scaling", "--np", "1,2", "--"], "no command was given; for example: --np"),
        (["scaling", "--np", "1,2", "--html", "x", "--output", "./x", *TRAIN], "--html and --output: both are x"),
        (["scaling", "--np", "1,2", "--", "python", "tran.py"], "did you mean 'train.py'?"),
        (["scaling", "--np", "1", *TRAIN], "one size shows no scaling"),
        (["scaling", "--np", "1,2", "--rounds", "0", *TRAIN], "--rounds 0"),
        (["scaling", "--np", "1,2", "--batch", "0", *TRAIN], "--batch 0"),
        (["scaling", "--np", "1,2", "--mode", "strong", *TRAIN], "does not say where its batch is"),
        (["scaling", "--np", "1,2", "-H", "a:1,b", *TRAIN], "Invalid host input"),
        (["scaling", "--np", "1,4", "-H", "a:1,b:2", *TRAIN], "Requested more processes (4)"),
        (
            ["scaling", "--np", "1,2", "--html", "no/x.html", *TRAIN],
            "--html: cannot write no/x.html: No such file",
        ),
        (["scaling", "--np", "1,2", "--output", ".", *TRAIN], "--output: cannot write .: Is a directory"),
        (["step", "--precision", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    code, out, err = call("bench", *words)
    assert (code, out) == (2, ""), err
    assert text in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "asking leaves no file behind"
