"""What diagnosis and comparison make of runs that are broken, strange, long or none; and of the formulas."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.main import run
from farandole.core.vocabulary.errors import DataError
from farandole.observe.diagnose import compare, diagnose, to_text
from farandole.observe.diagnose.comparison import difference_interval
from farandole.observe.diagnose.finding import stands_out
from farandole.observe.diagnose.pauses import period_of
from farandole.observe.figures.figures import amdahl, fit_amdahl
from farandole.observe.records import timeline_reader as sampling
from farandole.observe.records.timeline_reader import read_events, turn
from tests.unit.observe.synthetic import healthy, only, write_run

LATE = healthy(extra={"backward": only(1, 0.05)})


def test_a_fit_of_amdahls_law_gives_back_what_was_put_in() -> None:
    sizes = [1, 2, 4, 8]
    assert fit_amdahl(sizes, [amdahl(0.83, n) for n in sizes]) == pytest.approx(0.83)
    assert fit_amdahl([1, 2], [1.0, 2.5]) == 1.0, "faster than perfect: nothing is serial"
    assert fit_amdahl([1], [1.0]) != fit_amdahl([1], [1.0]), "nothing measured: NaN"


def test_what_stands_out() -> None:
    assert stands_out([1.0, 1.1, 0.9, 1.0, 1.0, 1.05])
    assert not stands_out([1.0, -1.1, 0.9, -1.0, 0.2, -0.3])
    assert not stands_out([])
    assert period_of([100, 200, 300, 500]) == 100
    assert period_of([3, 50, 61, 200]) is None


@pytest.mark.parametrize("make", [None, "empty", "file"])
def test_no_run_is_an_error_of_two_lines(
    make: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    if make == "empty":
        path.mkdir()
    elif make == "file":
        path.write_text("no run")
    for words in (["diagnose", str(path)], ["compare", str(path), str(path)]):
        assert run(words) == 2
        assert str(path) in capsys.readouterr().err
    with pytest.raises(DataError):
        diagnose(path)


def test_a_run_without_a_step(tmp_path: Path) -> None:
    write_run(tmp_path / "run", healthy(steps=0))
    found = diagnose(tmp_path / "run")
    assert (found.bound, found.verdict) == ("unknown", "Nothing to diagnose: no step was recorded.")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text("{}")
    assert diagnose(tmp_path / "bare").bound == "unknown"
    write_run(tmp_path / "good", healthy())
    nothing = compare(tmp_path / "run", tmp_path / "good")
    assert (nothing.outcome, nothing.verdict) == ("unknown", "Nothing to compare: run recorded no step.")


def test_the_file_of_a_rank_is_missing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", LATE)
    (path / "events-rank3.jsonl").unlink()
    found = diagnose(path)
    assert found.findings[0].ranks == (1,)
    assert any("1 of 4 ranks left no events (events-rank3.jsonl)" in note for note in found.notes)
    (path / "events-rank1.jsonl").unlink()
    rest = diagnose(path)
    assert any("events-rank1.jsonl, events-rank3.jsonl" in note for note in rest.notes)
    assert (rest.bound, rest.findings[0].kind) == ("unknown", "absent"), "somebody of whom nothing is known"
    assert rest.findings[0].ranks == (1, 3)


def test_truncated_and_corrupt_files(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", LATE)
    one, two, three = (path / f"events-rank{rank}.jsonl" for rank in (1, 2, 3))
    one.write_bytes(one.read_bytes()[:-200])
    last_line = one.read_bytes().count(b"\n") + 1
    lines = two.read_text().splitlines()
    for number, bad in ((9, "{"), (12, "[]"), (15, '{"step": "x"}'), (18, "\x00\xff"), (21, '{"unheard": 1}')):
        lines[number] = bad
    two.write_text("\n".join(lines) + "\n")
    three.write_text("no header\n")
    found = diagnose(path)
    assert found.findings[0].ranks == (1,)
    assert found.findings[0].seconds == pytest.approx(0.05, rel=0.15)
    notes = "\n".join(found.notes)
    assert f"events-rank1.jsonl:{last_line}: cut short" in notes
    assert "events-rank2.jsonl:10: no record: not JSON" in notes
    assert "events-rank2.jsonl: 5 lines in all could not be read" in notes
    assert "events-rank3.jsonl: the first line does not say whose events these are" in notes
    (path / "run.json").write_text("{")
    assert any("run.json is missing or cannot be read" in note for note in diagnose(path).notes)


def test_files_of_both_versions_and_of_a_newer_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", healthy(ranks=3, extra={"data": only(1, 0.04)}))
    zero = path / "events-rank0.jsonl"
    rows = [_version_1(json.loads(line)) for line in zero.read_text().splitlines()]
    zero.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))
    two = path / "events-rank2.jsonl"
    two.write_text(
        two.read_text().replace('"version":2', '"version":99', 1).replace('"version": 2', '"version": 99', 1)
    )
    found = diagnose(path)
    assert (found.findings[0].ranks, found.findings[0].phase) == ((1,), "data"), to_text(found)
    assert any("events of version 99" in note for note in found.notes)


def _version_1(row: dict[str, Any]) -> dict[str, Any] | None:
    if "version" in row:
        return {**{k: v for k, v in row.items() if k != "clock"}, "version": 1}
    if "step" not in row:
        return None
    begin = row["begin"]
    data = sum(end - start for name, start, end in row["phases"] if name == "data") / 1e6
    exchanges = [
        {
            "launch_seconds": [begin + bucket[4] / 1e6 for bucket in exchange["buckets"]],
            "wait_begin_seconds": begin + exchange["wait"][0] / 1e6,
            "wait_end_seconds": begin + exchange["wait"][1] / 1e6,
            "sent_bytes": exchange["sent"],
        }
        for exchange in row["exchanges"]
    ]
    end = begin + row["us"] / 1e6
    return {
        "step": row["step"], "begin_seconds": begin, "end_seconds": end, "data_seconds": data,
        "samples": row["samples"], "exchanges": exchanges,
    }  # fmt: skip


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", LATE)
    (path / "events-rank9.jsonl").write_bytes((path / "events-rank1.jsonl").read_bytes())
    found = diagnose(path)
    assert found.findings[0].ranks == (1,)
    assert any("events-rank9.jsonl: says it is rank 1's" in note for note in found.notes)


def test_ranks_that_share_no_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", healthy(ranks=2))
    lines = (path / "events-rank0.jsonl").read_text().splitlines(keepends=True)
    (path / "events-rank0.jsonl").write_text("".join(lines[:20]))
    lines = (path / "events-rank1.jsonl").read_text().splitlines(keepends=True)
    (path / "events-rank1.jsonl").write_text("".join([lines[0], *lines[30:]]))
    found = diagnose(path)
    assert (found.bound, found.verdict) == ("unknown", "Nothing to diagnose: no step is known of all ranks.")


@pytest.mark.full("further")
def test_a_long_run_is_sampled_fairly_and_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, budget = 2_000, 40_000
    monkeypatch.setattr(sampling, "BUDGET", budget)
    source = write_run(tmp_path / "short", healthy(ranks=2, steps=40, bucket_bytes=(1_000_000,) * 30))
    path = tmp_path / "long"
    path.mkdir()
    (path / "run.json").write_text((source / "run.json").read_text())
    for rank in range(2):
        lines = (source / f"events-rank{rank}.jsonl").read_text().splitlines()
        head = [line for line in lines if '"step"' not in line[:10]]
        row = json.loads(lines[-1])
        with (path / f"events-rank{rank}.jsonl").open("w") as file:
            file.write("\n".join(head) + "\n")
            rest = json.dumps(row).partition(', "us"')[2]
            for step in range(1, steps + 1):
                begin = 1000 + step * row["us"] / 1e6
                file.write(f'{{"step": {step}, "begin": {begin:.6f}, "us"{rest}\n')
    begin = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = diagnose(path)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    seconds = time.process_time() - begin
    assert (found.steps, found.bound) == (steps, "compute"), to_text(found)
    assert found.steps_looked_at < budget // 2 // 36
    assert found.steps_looked_at > 200
    assert grown_bytes < 100e6, grown_bytes
    assert seconds < 10, seconds
    kept = read_events(path / "events-rank0.jsonl", bounded=True)
    assert kept.step_count == steps
    assert {row.step for row in kept.steps} == {s for s in range(1, steps + 1) if turn(s, kept.halvings)}
    hundreds = sum(turn(step, 5) for step in range(100, 1_000_000, 100))
    assert hundreds == pytest.approx(10_000 / 32, rel=0.1), "a rhythm has its fair share"


@pytest.mark.full("further")
def test_no_damage_ends_in_a_traceback(tmp_path: Path) -> None:
    """Bytes, values and lines are changed by chance; what comes out is a diagnosis or a `DataError`."""
    source = write_run(
        tmp_path / "source", healthy(ranks=2, steps=8, bucket_bytes=(1_000_000,) * 3, sample={0: {}})
    )
    values = ["null", "-1", "1e308", str(10**400), '"\\ud800\\u001b[2J"', "[]", "{}", "true", "99999999999", "NaN"]
    draw = random.Random(1)
    for case in range(40):
        path = tmp_path / str(case)
        shutil.copytree(source, path)
        for file in draw.sample(sorted(path.iterdir()), 2):
            text = file.read_text()
            for _ in range(draw.choice([1, 3, 30])):
                spots = [match.span() for match in re.finditer(r'-?[0-9.]+|"[a-z ]+"', text)] or [(0, 0)]
                begin, end = draw.choice(spots)
                text = text[:begin] + draw.choice(values) + text[end:]
            if draw.random() < 0.3:
                text = text[: draw.randrange(len(text))]
            file.write_text(text, errors="surrogatepass")
        try:
            found = diagnose(path)
            compare(path, source).to_text()
            compare(source, path).to_mapping()
        except DataError:
            continue
        assert to_text(found).isascii() or "\x1b" not in to_text(found)
        json.dumps(found.to_mapping())
        to_text(found).encode()


def test_exit_code_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_run(tmp_path / "run", LATE))
    assert run(["diagnose", path, "--fail-over", "20"]) == 3
    assert "[straggler] rank 1 is late in backward" in capsys.readouterr().out
    assert run(["diagnose", path, "--fail-over", "50%", "--json"]) == 0
    mapping = json.loads(capsys.readouterr().out)
    assert mapping["findings"][0]["ranks"] == [1]
    assert mapping["findings"][0]["fixes"][0]["gain"]["basis"]
    for wrong in ("x", "-1", "101", "nan"):
        assert run(["diagnose", path, f"--fail-over={wrong}"]) == 2
        assert "expected per cent" in capsys.readouterr().err


def test_what_changed_between_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = healthy(bytes_per_second=200e6)
    after = healthy(bytes_per_second=200e6, sent_factor=0.254, plan={"codec": "int8"}, seed=1)
    one, two = write_run(tmp_path / "before", before), write_run(tmp_path / "after", after)
    found = compare(one, two)
    assert found.outcome == "faster"
    assert found.step is not None
    assert found.step.interval[0] <= found.step.difference <= found.step.interval[1] < 0
    assert "most of it in communication" in found.verdict
    assert found.plan == {"codec": (None, "int8")}
    assert found.environment == {}
    assert compare(two, one).outcome == "slower"
    assert found.loss is not None
    assert not found.loss.is_certain
    assert run(["compare", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert "plan: codec: None -> int8" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert run(["compare", str(one), str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "faster"


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_two_runs_of_the_same_thing_do_not_differ(noise: float, tmp_path: Path) -> None:
    for seed in range(4):
        one = write_run(tmp_path / f"a{seed}", healthy(noise=noise, seed=seed, steps=40))
        two = write_run(tmp_path / f"b{seed}", healthy(noise=noise, seed=100 + seed, steps=40))
        found = compare(one, two)
        assert found.outcome == "no difference", found.verdict
        assert found.verdict.startswith("No difference beyond noise")


def test_runs_of_other_sizes_and_environments(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", healthy(ranks=2))
    two = write_run(tmp_path / "b", healthy(ranks=4, hosts=("a", "b")))
    facts = json.loads((two / "run.json").read_text())
    (two / "run.json").write_text(json.dumps({**facts, "versions": {"torch": "3"}, "commit": "def+"}))
    found = compare(one, two)
    assert found.environment == {
        "commit": ("abc", "def+"),
        "size": (2, 4),
        "torch": ("2", "3"),
        "hosts": ("a", "a, b"),
    }
    assert any("not the same work" in note for note in found.notes)
    few = write_run(tmp_path / "few", healthy(ranks=2, steps=5))
    assert compare(one, few).outcome == "unknown"


def test_intervals_hold_the_truth() -> None:
    low, high = difference_interval([1.0, 1.1, 0.9, 1.0] * 20, [1.2, 1.3, 1.1, 1.2] * 20)
    assert low == pytest.approx(0.2, abs=0.03)
    assert high == pytest.approx(0.2, abs=0.03)
    assert difference_interval([1.0], [1.0]) == (0.0, 0.0)
