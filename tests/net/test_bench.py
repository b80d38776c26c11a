"""`farandole bench` on emulated hosts: tiny runs whose bytes must be those of the formula."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.net.test_emulate import usual
from tests.warm import run

pytestmark = pytest.mark.net


def bench(directory: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Return the JSON of a benchmark, and its progress."""
    result = run(directory, "bench", *words, "--json", timeout=55)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1, "the result and nothing else"
    found: dict[str, Any] = json.loads(result.stdout)
    return found, result.stderr


@pytest.mark.full("slow")
def test_collectives_send_what_the_formula_says(tmp_path: Path) -> None:
    found, progress = bench(
        tmp_path, "collectives", "--rate", "1gbit", "--sizes", "100kB,400kB", "--rounds", "2",
        "--operations", "all_reduce,reduce_scatter,all_gather",
    )  # fmt: skip
    assert "all_gather of 400000 bytes" in progress
    assert (found["hosts"], found["ranks"], found["bits_per_second"], found["absent"]) == (2, 2, 1e9, [])
    assert found["congestion_control"] == usual()
    assert len(found["rows"]) == 12
    for row in found["rows"]:
        assert set(row) == {
            "operation", "size_bytes", "route", "seconds", "interval", "ratio_to_first", "ratio_interval",
            "bound_seconds", "share_of_bound", "sent_bytes", "formula_bytes", "samples",
        }  # fmt: skip
        passes = 2 if row["operation"] == "all_reduce" else 1
        assert row["formula_bytes"] == passes * row["size_bytes"] // 2
        if (row["route"], row["operation"]) != ("gloo", "reduce_scatter"):  # gloo's sends twice as much
            assert row["formula_bytes"] < row["sent_bytes"] < 1.05 * row["formula_bytes"], row
        assert row["interval"][0] <= row["seconds"] <= row["interval"][1]
        assert len(row["samples"]) == 2
    assert list(tmp_path.iterdir()) == [], "no run directory is left"


@pytest.mark.full("slow")
def test_collectives_on_four_hosts(tmp_path: Path) -> None:
    found, _ = bench(
        tmp_path, "collectives", "--hosts", "4", "--sizes", "400kB", "--rounds", "1", "--routes", "connections"
    )
    (row,) = found["rows"]
    assert row["formula_bytes"] == 600_000
    assert row["formula_bytes"] < row["sent_bytes"] < 1.05 * row["formula_bytes"]


@pytest.mark.full("further")
def test_collectives_over_the_loopback_have_no_bound(tmp_path: Path) -> None:
    found, progress = bench(
        tmp_path, "collectives", "--hosts", "1", "--slots", "2", "--sizes", "64KiB", "--rounds", "1"
    )
    assert "over its loopback" in progress
    assert (found["hosts"], found["ranks"], found["bits_per_second"]) == (1, 2, None)
    assert [(row["route"], row["share_of_bound"]) for row in found["rows"]] == [
        ("gloo", None),
        ("connections", None),
    ]


@pytest.mark.full("slow")
def test_routes_of_ours_on_hosts_of_two_ranks(tmp_path: Path) -> None:
    found, _ = bench(
        tmp_path, "collectives", "--slots", "2", "--sizes", "800kB", "--rounds", "1",
        "--routes", "connections,hierarchical",
    )  # fmt: skip
    sent = {row["route"]: row["sent_bytes"] for row in found["rows"]}
    # Everybody to everybody: a host of two ranks sends twice what it must.
    assert 1.0 < sent["connections"] / 1_600_000 < 1.05
    assert 1.0 < sent["hierarchical"] / 800_000 < 1.05
    assert found["absent"] == []


@pytest.mark.full("slow")
def test_slices_that_fill_the_link_arrive_before_their_host_waits(tmp_path: Path) -> None:
    """A rank waits for its host only when its own frames are on their way: the other hosts wait for them."""
    found, _ = bench(
        tmp_path, "collectives", "--slots", "2", "--rate", "1gbit", "--sizes", "25MiB", "--rounds", "9",
        "--operations", "all_reduce", "--routes", "hierarchical",
    )  # fmt: skip
    (row,) = found["rows"]
    assert row["formula_bytes"] == 25 * 2**20
    assert row["formula_bytes"] < row["sent_bytes"] < 1.05 * row["formula_bytes"]


@pytest.mark.full("busy")
@pytest.mark.alone  # the kernel counts what goes over this machine's loopback, also of other tests
def test_routes_of_ours_on_one_host(tmp_path: Path) -> None:
    found, _ = bench(
        tmp_path, "collectives", "--hosts", "1", "--slots", "2", "--sizes", "10B,400kB", "--rounds", "1",
        "--routes", "connections,hierarchical", "--operations", "all_reduce,reduce_scatter,all_gather",
    )  # fmt: skip
    sent = {(row["operation"], row["size_bytes"]): row["sent_bytes"] for row in found["rows"]}
    assert len(sent) == 6
    for (operation, size), count in sent.items():
        if size > 1000:
            assert 1.0 < count / ((2 if operation == "all_reduce" else 1) * size / 2) < 1.05
    assert {gone["route"] for gone in found["absent"]} == {"hierarchical"}


@pytest.mark.full("further")
def test_steps_and_a_contender_that_cannot_run(tmp_path: Path) -> None:
    found, progress = bench(
        tmp_path, "step", "--rate", "1gbit", "--contenders", "ddp;missing.Codec;none;bf16", "--rounds", "2",
        "--model", "small", "--batch", "1",
    )  # fmt: skip
    assert "round 2 of 2 is done" in progress
    assert found["reference"] == "ddp"
    rows = {row["contender"]: row for row in found["rows"]}
    assert sorted(rows) == ["bf16", "ddp", "none"]
    assert [gone["contender"] for gone in found["absent"]] == ["missing.Codec"]
    assert "missing" in found["absent"][0]["reason"]
    for row in rows.values():
        assert {
            "seconds",
            "interval",
            "ratio",
            "ratio_interval",
            "processor_seconds",
            "sent_bytes",
            "loss",
        } <= set(row)
    # 433,664 parameters; what is small travels as it is.
    assert 1.0 < rows["ddp"]["sent_bytes"] / (4 * 433_664) < 1.05
    assert 1.0 < rows["none"]["sent_bytes"] / (4 * 433_664) < 1.05
    assert 1.0 < rows["bf16"]["sent_bytes"] / (2 * 433_664) < 1.05
    assert rows["none"]["loss"] == pytest.approx(rows["ddp"]["loss"], rel=1e-3)


@pytest.mark.full("further")
def test_nothing_that_runs_is_exit_code_1(tmp_path: Path) -> None:
    result = run(tmp_path, "bench", "step", "--link", "none", "--contenders", "missing.Codec", "--model", "small")
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("did not run: missing.Codec: ")


@pytest.mark.full("further")
def test_codecs(tmp_path: Path) -> None:
    found, _ = bench(tmp_path, "codecs", "--codecs", "none;int8;topk:0.01;powersgd", "--rounds", "1")
    rows = {row["codec"]: row for row in found["rows"] if row["device"] == "cpu"}
    assert list(rows) == ["none", "int8", "topk:density=0.01", "powersgd:rank=4"]
    for row in rows.values():
        assert row["gigabytes_per_second"] > 0
        assert row["processor"]
    assert rows["none"]["ratio"] == pytest.approx(1.0)
    assert rows["none"]["relative_error"] < 1e-6
    assert rows["int8"]["ratio"] == pytest.approx(0.254, abs=0.003)
    assert 0 < rows["int8"]["relative_error"] < 0.05
    assert rows["topk:density=0.01"]["ratio"] < 0.03
    assert rows["powersgd:rank=4"]["ratio"] < 0.1


def test_making_hosts_and_printing_help_import_no_torch() -> None:
    code = """
import sys
from farandole.bench import collectives
from farandole.bench import launch_ranks
from farandole.bench import step
from farandole.cli.commands import bench
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
