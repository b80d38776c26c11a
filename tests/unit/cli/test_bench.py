"""`farandole bench`: what it refuses, how it compares, and its tables. Nothing is measured here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from farandole.bench.codecs import format_codecs
from farandole.bench.collectives import OPERATIONS, ROUTES, format_collectives
from farandole.bench.intervals import (
    bound_seconds,
    least_bytes,
    median_interval,
    paired_ratio,
    sent_bytes,
)
from farandole.bench.step import (
    check_contender,
    compare,
    expand,
    format_step,
    plan_of,
    read_contenders,
    settings_of,
)
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.core.vocabulary.text import format_table
from tests.unit.cli.test_cli import call


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["colectives"], "bench: unknown benchmark 'colectives'; did you mean 'collectives'?"),
        (["--rounds", "3"], "the following arguments are required: BENCHMARK"),
        (["collectives", "--hots", "2"], "unknown option --hots; did you mean '--hosts'?"),
        (["collectives", "--routes", "glo"], "--routes 'glo': unknown route; did you mean 'gloo'?"),
        (["collectives", "--routes", "gloo,gloo"], "expected names, each once"),
        (["collectives", "--routes", ","], "expected names, each once"),
        (["collectives", "--operations", "allreduce"], "unknown operation; did you mean 'all_reduce'?"),
        (["collectives", "--sizes", "big"], "--sizes 'big' is not a number of bytes such as 25MiB"),
        (["collectives", "--sizes", ","], "--sizes ',': expected numbers of bytes"),
        (["collectives", "--sizes", "0"], "--sizes 0: expected 1 byte to 4 GiB"),
        (["collectives", "--rate", "fast"], "--rate 'fast' is not a rate such as 200mbit or 1gbit"),
        (["collectives", "--hosts", "0"], "--hosts 0: expected 1 to 200"),
        (["collectives", "--hosts", "1"], "one rank has no other to exchange with"),
        (
            ["collectives", "--hosts", "1", "--slots", "1", "--rate", "none"],
            "give at least two hosts or two slots",
        ),
        (["collectives", "--slots", "0"], "--slots 0: expected 1 to 64"),
        (["collectives", "--rounds", "-1"], "--rounds -1: expected 1 to 10000"),
        (["collectives", "--rounds", "many"], "expected a whole number, got 'many'"),
        (["codecs", "--codecs", "int9"], "--codecs = 'int9': unknown codec 'int9'; did you mean 'int8'?"),
        (["codecs", "--codecs", "topk:density=2"], "expected a share above 0 and at most 1"),
        (["codecs", "--codecs", "auto"], "--codecs auto: it chooses among codecs"),
        (["codecs", "--codecs", ";"], "--codecs ';': expected names"),
        (["codecs", "--rounds", "0"], "--rounds 0: expected 1 to 10000"),
        (["step", "--contenders", "dpp"], "contender 'dpp': unknown codec or rival 'dpp'; did you mean 'ddp'?"),
        (["step", "--contenders", ";"], "--contenders: expected names"),
        (["step", "--contenders", "none;none"], "--contenders: 'none' is given twice"),
        (["step", "--contenders", "ddp:fast"], "expected ddp, or ddp:N with the megabytes of a bucket"),
        (["step", "--contenders", "ddp:0"], "expected ddp, or ddp:N"),
        (["step", "--contenders", "horovod:3"], "unknown codec or rival 'horovod'"),
        (["step", "--contenders", "none+bucket_byte=4MiB"], "did you mean 'bucket_bytes'?"),
        (["step", "--contenders", "none+fast"], "contender 'none+fast': 'fast' is no key=value"),
        (["step", "--batch", "0"], "--batch 0: expected 1 to 1048576 samples a rank"),
        (["step", "--batch", "99999999999999999999"], "expected 1 to 1048576 samples a rank"),
        (
            ["collectives", "--sizes", "1MiB,1048576"],
            "--sizes 1048576,1048576: expected numbers of bytes, each once",
        ),
        (["codecs", "--codecs", "int8,sign,int8"], "--codecs: 'int8' is given twice"),
        (["step", "--model", "huge"], "invalid choice: 'huge'"),
        (["step", "--set", "codec=int8"], 'contenders are codecs; for example: --contenders "ddp;none;int8"'),
        (["step", "--set", "bucket_byte=4MiB"], "--set: unknown key 'bucket_byte'; did you mean 'bucket_bytes'?"),
        (["step", "--plan", "no.toml"], "there is no file no.toml"),
        (["scaling", "--np", "1,2", "--set", "codec=int9", "--", "true"], "did you mean 'int8'?"),
        (["scaling", "--np", "1,2", "--compare", "codec=int9", "--", "true"], "did you mean 'int8'?"),
        (["scaling", "--np", "1,2", "--compare", "int8", "--", "true"], "--compare 'int8': expected KEY=VALUE"),
        (
            ["codecs", "--set", "codec=int8"],
            "unknown option --set; commands that take a plan: run, verify, tune, emula",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(words: list[str], text: str) -> None:
    """Each option of each benchmark has its own check, and so a case of its own."""
    code, out, err = call("bench", *words)
    assert (code, out) == (2, ""), err
    assert text in err
    assert err.startswith("farandole: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["collectives", "--help"], ["codecs", "-h"], ["step", "--help"]]
)
def test_help_has_examples(words: list[str]) -> None:
    code, out, err = call("bench", *words)
    assert (code, err) == (0, "")
    assert "examples:\n  farandole bench " in out


def test_names_of_contenders() -> None:
    assert read_contenders(" ddp ; none;int8:block=64 ") == ["ddp", "none", "int8:block=64"]
    assert expand(["ddp:5", "ddp-tuned", "none"]) == ["ddp:5", "ddp:1", "ddp:25", "ddp:100", "none"]
    for name in ("ddp:25", "ddp-powersgd:2", "ddp-fp16", "topk:0.01+bucket_bytes=4MiB", "auto"):
        check_contender(name)
    with pytest.raises(ConfigError, match="share above 0"):
        check_contender("topk:7")


def test_a_plan_holds_for_our_contenders_and_a_contender_says_the_last_word(tmp_path: Path) -> None:
    settings = settings_of(Plan(lossy=True, bucket_bytes=2**20))
    assert read_contenders("ddp;auto;none+bucket_bytes=4MiB", settings)
    assert plan_of("auto", settings) == Plan(codec="auto", lossy=True, bucket_bytes=2**20)
    assert plan_of("none+bucket_bytes=4MiB", settings).bucket_bytes == 4 * 2**20


def test_the_plan_reaches_the_runs_of_scaling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []

    def fail(words: list[str]) -> int:
        started.append(list(words))
        return 1

    monkeypatch.setattr("farandole.bench.scaling.run_here", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text("accumulate = 2\n")
    code, _, _ = call(
        "bench", "scaling", "--np", "1,2", "--plan", "plan.toml", "--set", "codec=int8", "--", "true"
    )
    code, _, _ = call("bench", "scaling", "--np", "2,4", "--compare", "lossy=true codec=auto", "--", "true")
    settings = [[word for word in words if "=" in word] for words in started[2:]]
    assert settings == [[], ["lossy=true", "codec=auto"]] * 2
    del started[2:]
    assert code == 1
    assert len(started) == 2
    for words in started:
        at = words.index("--plan")
        assert words[at:] == ["--plan", str(tmp_path / "plan.toml"), "--set", "codec=int8", "--", "true"]


def test_every_route_says_what_it_is_and_has_an_all_reduce() -> None:
    for route in ROUTES.values():
        assert route.what
        assert all(hasattr(route, operation) for operation in OPERATIONS)


def test_least_bytes_and_the_bound() -> None:
    assert least_bytes("all_reduce", 100, 2) == 100
    assert least_bytes("all_reduce", 100, 4) == 150
    assert least_bytes("reduce_scatter", 100, 4) == least_bytes("all_gather", 100, 4) == 75
    assert bound_seconds(0.956e9 / 8, 1e9) == pytest.approx(1.0)
    assert sent_bytes(loopback=True) >= 0


def test_intervals_hold_the_median_and_do_not_change() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 4.0]
    median, (low, high) = median_interval(values)
    assert median == 1.05
    assert 0.9 <= low <= median <= high <= 4.0
    assert median_interval(values) == (median, (low, high))
    assert median_interval([2.0]) == (2.0, (2.0, 2.0))
    # The machine got twice as slow half way: the paired ratio does not care.
    theirs = [1.0, 1.0, 2.0, 2.0]
    ratio, between = paired_ratio([0.5 * value for value in theirs], theirs)
    assert (ratio, between) == (0.5, (0.5, 0.5))


def test_a_table_has_columns_and_no_blanks_at_the_ends() -> None:
    text = format_table(["name", "x"], [["a", "10.5"], ["longer", ""]])
    assert text.splitlines() == ["name       x", "a       10.5", "longer"]


def samples(*seconds: float) -> dict[str, list[float]]:
    count = len(seconds)
    return {
        "seconds": list(seconds),
        "processor_seconds": [0.01] * count,
        "sent_bytes": [1e6] * count,
        "loss": [3.0 - i for i in range(count)],
    }


def test_contenders_are_compared_with_the_first_ddp() -> None:
    measured = {"none": samples(1, 2), "ddp:5": samples(2, 4), "ddp:25": samples(1, 1)}
    result = compare(["none", "ddp:5", "ddp:25"], measured, {}, step_samples=6)
    assert result["reference"] == "ddp:5"
    assert [(row["contender"], row["ratio"], row["loss"]) for row in result["rows"]] == [
        ("none", 0.5, 2.0), ("ddp:5", 1.0, 2.0), ("ddp:25", 0.375, 2.0),
    ]  # fmt: skip


def test_tuned_is_the_best_of_four_and_only_if_asked() -> None:
    measured = {
        f"ddp:{mb}": samples(*times) for mb, times in {1: (5, 5), 5: (2, 2), 25: (3, 3), 100: (4, 4)}.items()
    }
    measured["none"] = samples(1, 1)
    result = compare(["ddp-tuned", "none"], measured, {}, step_samples=6)
    assert [(row["contender"], row["chosen"], row["ratio"]) for row in result["rows"]] == [
        ("ddp-tuned", "ddp:5", 1.0), ("none", None, 0.5),
    ]  # fmt: skip
    assert result["tuned_seconds"] == {"ddp:1": 5, "ddp:5": 2, "ddp:25": 3, "ddp:100": 4}
    assert "ddp-tuned (ddp:5)" in format_step(result)
    assert compare(["ddp:1", "none"], measured, {}, step_samples=6)["tuned_seconds"] == {}
    nothing = compare(
        ["ddp-tuned", "none"], {"none": samples(1)}, dict.fromkeys(expand(["ddp-tuned"]), "no"), step_samples=6
    )
    assert nothing["absent"] == [{"contender": "ddp-tuned", "reason": "no"}]


def test_what_does_not_run_gets_no_number() -> None:
    result = compare(["horovod", "none"], {"none": samples(1.5)}, {"horovod": "is not installed"}, step_samples=6)
    assert [row["contender"] for row in result["rows"]] == ["none"]
    assert result["rows"][0]["ratio"] is None
    assert result["rows"][0]["samples_per_second"] == 4.0
    *table, last = format_step(result).splitlines()
    assert last == "did not run: horovod: is not installed"
    assert not any("horovod" in line for line in table)
    assert format_step(compare(["horovod"], {}, {"horovod": "no"}, step_samples=6)) == "did not run: horovod: no"


def test_table_of_collectives() -> None:
    row: dict[str, Any] = {
        "operation": "all_reduce", "size_bytes": 25_000_000, "route": "gloo", "seconds": 0.21,
        "interval": (0.2, 0.22), "ratio_to_first": 1.0, "ratio_interval": (1.0, 1.0), "bound_seconds": 0.2,
        "share_of_bound": 0.952, "sent_bytes": 25_100_000, "formula_bytes": 25_000_000,
    }  # fmt: skip
    gone = {"operation": "all_reduce", "route": "shared", "reason": "several hosts"}
    head, line, last = format_collectives({"rows": [row], "absent": [gone]}).splitlines()
    assert "of bound" in head
    assert " ".join(line.split()) == ("all_reduce 25 MB gloo 210 ms 200 ms to 220 ms 1.000 0.952 25.1 MB 25 MB")
    assert last == "did not run: shared all_reduce: several hosts"
    loopback = format_collectives({"rows": [{**row, "share_of_bound": None}], "absent": []})
    assert "0.952" not in loopback


def test_table_of_codecs_is_one_for_each_processor() -> None:
    rows = [
        {"codec": codec, "device": device, "processor": "a chip", "gigabytes_per_second": 1.234,
         "interval": [1.2, 1.3], "ratio": 0.25, "relative_error": 0.01}
        for device, codec in itertools.product(["cpu", "cuda:0"], ["int8", "sign"])
    ]  # fmt: skip
    text = format_codecs({"rows": rows, "threads": 1, "elements": 5})
    assert text.count("a chip") == 2
    assert text.count("1.2 to 1.3") == 4
