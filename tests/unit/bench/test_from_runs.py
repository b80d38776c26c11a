"""`farandole measure --from RUN`: virtual runs with planted figures correct a cluster that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.bench.cluster import from_runs
from farandole.bench.cluster.from_runs import correct_cluster, describe_refit
from farandole.cli.main import run
from farandole.core.cluster import collective_work
from farandole.core.cluster_file import read_cluster, write_cluster
from farandole.core.vocabulary.errors import ConfigError
from farandole.plan.refit import Observation
from tests.unit.observe.synthetic import Machine, write_run
from tests.unit.plan.held.test_refit import CLUSTER

PREDICTED = {"step_seconds": 0.11, "compute": 0.09, "optimizer": 0.006, "data": 0.014, "ranks": 4}
MACHINE = Machine(
    plan={"predicted": PREDICTED},
    bytes_per_second=3e8,
    latency_seconds=1e-3,
    bucket_bytes=(1_000_000, 4_000_000, 8_000_000, 2_000_000),
)


TYPED = "farandole run --plan p.toml --set tensor=1 --set=zero=1 -- python t.py --set x"


def test_the_link_and_a_slow_rank_are_found_and_the_rest_stays(tmp_path: Path) -> None:
    slow = replace(MACHINE, extra={"backward": lambda rank, step: 0.045 * (rank == 2)})
    found = correct_cluster(CLUSTER, [write_run(tmp_path / "run", slow)])
    cost = found.cluster.tiers[0].collectives["all_reduce"]
    assert cost.bytes_per_second.value == pytest.approx(3e8, rel=0.06)
    assert cost.bytes_per_second.source == "fitted"
    rounds = collective_work("all_reduce", 4, 0).rounds
    assert rounds * cost.latency_seconds.value == pytest.approx(2 * 1e-3, rel=0.25), "planted: 2 of 1 ms"
    assert found.cluster.rank_speeds == {2: pytest.approx(0.0905 / 0.1355, rel=0.03)}
    assert found.cluster.device == CLUSTER.device, "compute and optimizer were predicted as they are"
    assert found.error_after < 0.05 < found.error_before
    text = describe_refit(found, CLUSTER)
    assert "tiers.0.collectives.all_reduce.bytes_per_second" in text
    assert "rank_speeds.2" in text
    assert max(map(len, text.splitlines())) <= 100
    with pytest.raises(ConfigError, match="fitted to run already"):
        correct_cluster(found.cluster, [tmp_path / "run"])


def test_the_command_writes_the_corrected_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_directory, cluster, out = write_run(tmp_path / "run", MACHINE), tmp_path / "c.toml", tmp_path / "out.toml"
    write_cluster(CLUSTER, cluster)
    line = ["measure", "--from", str(run_directory), "--cluster", str(cluster), "--out", str(out)]
    assert run(line) == 0
    assert "bytes_per_second" in capsys.readouterr().out
    assert read_cluster(out).tiers[0].collectives["all_reduce"].bytes_per_second.source == "fitted"
    assert run([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corrections"][0]["after"]["source"] == "fitted"
    for words, problem in (
        (line[:5], "--from without --out"),
        (["measure", "--from", "r", "--out", str(out)], "--from without --cluster"),
        ([*line, "-np", "2"], "-np has no effect with --from"),
        (["measure", "--cluster", str(cluster)], "--cluster has no effect without --from"),
        (["measure", "--from", str(tmp_path / "no"), *line[3:]], "is not a run directory"),
    ):
        assert run(words) == 2, words
        assert problem in capsys.readouterr().err, words


def test_compute_that_is_off_changes_the_rates_of_its_precision(tmp_path: Path) -> None:
    wrong = replace(MACHINE, plan={"predicted": {**PREDICTED, "compute": 0.045}})
    rates = correct_cluster(CLUSTER, [write_run(tmp_path / "run", wrong)]).cluster.device.compute["fp32"]
    assert [rate.flops_per_second.value for rate in rates] == pytest.approx([0.5e9, 2.5e9], rel=0.03)


def test_runs_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    for machine, problem in (
        (replace(MACHINE, plan={}), "predicts nothing"),
        (replace(MACHINE, steps=8), "expected at least 10"),
        (replace(MACHINE, plan={"predicted": {**PREDICTED, "ranks": 8}}), "for 8 ranks, and 4 ran"),
        (replace(MACHINE, plan={"predicted": {**PREDICTED, "global_batch": 64}}), "for 64 samples a step, and 32"),
        (
            replace(
                MACHINE,
                facts={
                    "command": ["python", "t.py", "--set", "x"],
                    "typed_command": TYPED.split(),
                },
            ),
            "predicted without --set tensor=1 --set zero=1: no test",
        ),
    ):
        run = write_run(tmp_path / problem[-8:], machine)
        with pytest.raises(ConfigError, match=problem):
            correct_cluster(CLUSTER, [run])


def test_an_operation_is_told_once() -> None:
    """By buckets of a data parallel run, and not by the one number of a tensor parallel run as well."""
    path = "tiers.0.collectives.all_reduce"
    buckets = Observation("buckets of a", 0.01, {f"{path}.latency_seconds": 2.0, f"{path}.bytes_per_second": 1e6})
    compute = Observation("compute of b", 0.1, {"device.compute.fp32.*": 0.1})
    gathered = Observation("tensor of b", 0.02, {f"{path}.*": 0.01})
    kept, left = from_runs._told_once([buckets, gathered, compute, gathered])
    assert kept == [buckets, compute]
    assert left == ["tensor of b: buckets of gradients tell more of its operation"]
    assert from_runs._told_once([gathered, compute]) == ([gathered, compute], [])
