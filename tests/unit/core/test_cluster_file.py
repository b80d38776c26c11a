"""`cluster.toml`: what is written reads back equal, and what cannot be is refused with the path of the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from farandole.core.cluster import (
    OPERATIONS,
    Cluster,
    CodecCost,
    Coefficient,
    CollectiveCost,
    CollectiveWork,
    ComputeRate,
    Device,
    Tier,
    collective_work,
    compare_clusters,
    figures_of,
    is_changed,
)
from farandole.core.cluster_file import number_text, read_cluster, write_cluster
from farandole.core.vocabulary.errors import ConfigError


def cost(seconds: float = 2e-5, rate: float = 1.25e8) -> CollectiveCost:
    """Return a measured cost."""
    return CollectiveCost(Coefficient(seconds, "measured", 1e-5, 3e-5), Coefficient(rate, "measured"))


def small_cluster(**changes: object) -> Cluster:
    """Return a cluster of two hosts of two ranks with something in every field."""
    device = Device(
        "4 cores",
        Coefficient(8e9),
        Coefficient(1.1e10, "measured", 1e10, 1.2e10),
        Coefficient(0.0, "fitted"),
        {"fp32": (ComputeRate(524288.0, Coefficient(3e10)), ComputeRate(1e9, Coefficient(4e10)))},
        {"fp32": 4e10},
        True,
    )
    collectives = {name: cost() for name in OPERATIONS}
    cluster = Cluster(
        'two "racks", ö',
        device,
        (Tier("host", 2, collectives), Tier("network", 4, collectives, Coefficient(1.25e8))),
        {
            "powersgd:rank=4": CodecCost(Coefficient(1.5e-9), 0.03125, 4, Coefficient(1e-4)),
            "none": CodecCost(Coefficient(0.0), 1.0),
        },
        compute_slowdown=Coefficient(1.25),
        disk_write_bytes_per_second=Coefficient(2.5e8),
        rank_speeds={3: 0.66},
        price_per_rank_hour=0.0,
        fingerprint={"hosts": "a, b\x7f\n", "date": "2026-11-23"},
    )
    return replace(cluster, **changes)  # type: ignore[arg-type]


def test_hosts_of_one_rank_are_read_as_they_are_written(tmp_path: Path) -> None:
    collectives = {name: cost() for name in OPERATIONS}
    cluster = small_cluster(tiers=(Tier("host", 1, {}), Tier("network", 4, collectives)))
    write_cluster(cluster, tmp_path / "c.toml")
    assert read_cluster(tmp_path / "c.toml") == cluster


def text_of(path: Path) -> str:
    """Write the cluster and return the file."""
    write_cluster(small_cluster(), path)
    return path.read_text(encoding="utf-8")


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = text_of(path)
    assert read_cluster(path) == small_cluster()
    assert 'memory_bytes_per_second = { value = 1.1e10, source = "measured", low = 1e10, high = 1.2e10 }' in text
    assert "[tiers.collectives.all_reduce]" in text
    assert '[codecs."powersgd:rank=4"]' in text
    assert "price_per_rank_hour = 0" in text, "a price of nothing is not a price that is not known"
    assert list(tmp_path.iterdir()) == [path], "written in one piece, and nothing beside it"


def test_numbers_are_short_and_exact() -> None:
    for number in (0.0, 1.0, 0.1, 1 / 3, 1e-9, 123456.789, 1.25e9, 2**60 + 0.0, 5e-324, 1.7976931348623157e308):
        assert float(number_text(number)) == number, number
    assert [number_text(each) for each in (1.25e9, 0.5, 8, 2.5e-5)] == ["1.25e9", "0.5", "8", "2.5e-5"]


REFUSED = [
    (
        "bytes_per_second = { value = 1.25e8",
        "bytes_per_second = { value = 0",
        "tiers.0.collectives.all_reduce.bytes_per_second = 0, expected more than 0",
    ),
    (
        "bytes_per_second = { value = 1.25e8",
        "bytes_per_second = { value = -1",
        "tiers.0.collectives.all_reduce.bytes_per_second = -1, expected more than 0",
    ),
    (
        "memory_bytes = { value = 8e9",
        "memory_bytes = { value = nan",
        "device.memory_bytes.value = nan, expected a finite",
    ),
    (
        "memory_bytes = { value = 8e9",
        "memory_bytes = { value = inf",
        "device.memory_bytes.value = inf, expected a finite",
    ),
    (
        "memory_bytes = { value = 8e9",
        "memory_bytes = { value = 1" + "0" * 400,
        "device.memory_bytes.value is too large",
    ),
    ("low = 1e10, high = 1.2e10", "low = 1.2e10, high = 1e10", "low = 1.2e+10 is above high = 1e+10"),
    ("low = 1e10, high = 1.2e10", "low = 1.15e10, high = 1.2e10", "= 1.1e+10 is outside of its interval"),
    ("low = 1e10", "low = -1", "device.memory_bytes_per_second.low = -1, expected more than 0"),
    ("low = 1e10", 'low = "1e10"', "device.memory_bytes_per_second.low = '1e10', expected a number"),
    ("low = 1e10", "lo = 1e10", "device.memory_bytes_per_second.lo: unknown key; did you mean 'low'?"),
    ('source = "measured", low = 1e10', 'source = "measurd", low = 1e10', "source = 'measurd', expected one of"),
    ('source = "measured", low = 1e10', "low = 1e10", "device.memory_bytes_per_second.source is missing"),
    ("memory_bytes = { value = 8e9", "memory_bytes = { source", "cluster.toml"),
    ("memory_bytes = {", "memory_byte = {", "device.memory_byte: unknown key; did you mean 'memory_bytes'?"),
    (
        'memory_bytes = { value = 8e9, source = "preset" }\n',
        "",
        "device.memory_bytes is missing; add it: memory_bytes = {",
    ),
    (
        'memory_bytes = { value = 8e9, source = "preset" }',
        "memory_bytes = 8e9",
        "= 8000000000.0, expected a figure such as",
    ),
    ("ranks = 4", "ranks = 2", "tiers.1.ranks = 2, but the tier inside of it has 2: tiers must grow"),
    ("ranks = 4", "ranks = 3", "tiers.1.ranks = 3, which 2 ranks of the tier inside of it do not divide"),
    ("ranks = 4", f"ranks = 1{400 * '0'}", "tiers.1.ranks is too large for a number"),
    ("3 = 0.66", f"{5000 * '3'} = 0.66", ": expected a whole number from 0 as key"),
    ("ranks = 4", "ranks = 4.5", "tiers.1.ranks = 4.5, expected a whole number"),
    ("ranks = 4", "ranks = true", "tiers.1.ranks = True, expected a whole number"),
    ("ranks = 2", "ranks = 0", "tiers.0.ranks = 0, expected at least 1"),
    ("flops = 1e9", "flops = 1e3", "device.compute.fp32.1.flops = 1000 follows 524288: sizes must grow"),
    (
        "flops_per_second = { value = 4e10",
        "flops_per_second = { value = 5e10",
        "device.compute.fp32.1.flops_per_second = 5e+10 is beyond the device's peak of 4e+10",
    ),
    (
        "[device.peak_flops_per_second]",
        '[device.attention_flops_per_second]\nfp32 = { value = 5e10, source = "preset" }\n'
        "[device.peak_flops_per_second]",
        "device.attention_flops_per_second.fp32 = 5e+10 is beyond the device's peak of 4e+10",
    ),
    (
        "[device.peak_flops_per_second]",
        '[device.attention_flops_per_second]\nfp8 = { value = 5e9, source = "preset" }\n'
        "[device.peak_flops_per_second]",
        "device.attention_flops_per_second.fp8: unknown precision",
    ),
    (
        "line_bytes_per_second = { value = 1.25e8",
        "line_bytes_per_second = { value = 1e8",
        "tiers.1.collectives.all_reduce.bytes_per_second = 1.25e+08 is beyond what the link gives",
    ),
    (
        "line_bytes_per_second = { value = 1.25e8",
        'pair_bytes_per_second = { value = 2e8, source = "preset" }\nline_bytes_per_second = { value = 1.25e8',
        "pair_bytes_per_second = 2e+08 is beyond what the link gives",
    ),
    ("compute.fp32]]", "compute.fp23]]", "device.compute.fp23: unknown precision; did you mean 'fp32'?"),
    (
        "collectives.all_reduce]",
        "collectives.allreduce]",
        "tiers.0.collectives.allreduce: unknown operation; did you",
    ),
    (
        "ratio = 1\n",
        'ratio = 1\nseconds_per_bucket = { value = -1, source = "measured" }\n',
        "codecs.none.seconds_per_bucket = -1, expected 0 or more",
    ),
    ("ratio = 1\n", "ratio = 0\n", "codecs.none.ratio = 0, expected more than 0"),
    ("[codecs.none]", "[codecs.nine]", "codecs.nine: "),
    ("[codecs.none]", "[codecs.auto]", "codecs.auto: chooses among codecs"),
    (
        "compute_slowdown = { value = 1.25",
        "compute_slowdown = { value = 0.9",
        "compute_slowdown = 0.9, expected at least 1",
    ),
    ("3 = 0.66", "4 = 0.66", "rank_speeds.4: there are ranks 0 to 3"),
    ("3 = 0.66", "3 = 0", "rank_speeds.3 = 0, expected more than 0"),
    ("3 = 0.66", "x = 0.66", "rank_speeds.x: expected a whole number from 0 as key"),
    (
        "version = 1",
        "version = 2\nfancy = 1",
        "version = 2, and this farandole reads files up to version 1; upgrade",
    ),
    ("version = 1", "version = 0", "version = 0, expected at least 1"),
    ("shares_core = true", 'shares_core = "yes"', "device.shares_core = 'yes', expected true or false"),
    ("[rank_speeds]", "[rank_sped]", "rank_sped: unknown key; did you mean 'rank_speeds'?"),
    ("[device]", "[device", "is not TOML"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED, ids=[row[2][:50] for row in REFUSED])
def test_what_cannot_be_is_refused_with_its_path(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = text_of(path)
    assert old in text, "the case changes something"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_cluster(path)
    assert message in str(refused.value), str(refused.value)
    assert str(refused.value).startswith((f"{path}: ", f"{path} is not")), "the file is named first"
    assert refused.value.exit_code == 2, "bad input"


def test_a_file_that_is_not_there_and_a_cluster_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*; farandole measure --out cluster.toml writes one"):
        read_cluster(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"tiers is empty"):
        write_cluster(small_cluster(tiers=()), tmp_path / "cluster.toml")
    with pytest.raises(ConfigError, match="name is empty"):
        write_cluster(small_cluster(name=" "), tmp_path / "cluster.toml")
    with pytest.raises(ConfigError, match="cannot write"):
        write_cluster(small_cluster(), tmp_path)
    with pytest.raises(ConfigError, match=r"ends in .toml"):
        write_cluster(small_cluster(), tmp_path / "cluster.json")
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_a_tier_of_several_ranks_has_all_operations() -> None:
    bare = small_cluster(tiers=(Tier("host", 2, {"all_reduce": cost()}),), rank_speeds={})
    with pytest.raises(ConfigError, match=r"tiers.0.collectives.all_gather is missing"):
        write_cluster(bare, "cluster.toml")


def test_the_work_of_collectives() -> None:
    assert collective_work("all_reduce", 2, 1000) == CollectiveWork(1000.0, 2)
    assert collective_work("all_reduce", 8, 800) == CollectiveWork(1400.0, 6)
    assert collective_work("all_gather", 4, 1000) == CollectiveWork(750.0, 2)
    assert collective_work("reduce_scatter", 5, 1000) == CollectiveWork(800.0, 3)
    assert collective_work("send", 2, 10) == CollectiveWork(10.0, 1)
    assert collective_work("broadcast", 1, 10) == CollectiveWork(0.0, 0)
    with pytest.raises(ConfigError, match="did you mean 'all_reduce'"):
        collective_work("allreduce", 2, 1)


def test_two_clusters_are_compared_figure_by_figure() -> None:
    before = small_cluster()
    faster = {**before.tiers[1].collectives, "send": cost(4e-6, 2.5e8)}
    faster["send"] = CollectiveCost(Coefficient(4e-6, "measured", 3e-6, 5e-6), Coefficient(2.5e8, "measured"))
    after = replace(
        before,
        tiers=(before.tiers[0], replace(before.tiers[1], collectives=faster)),
        disk_write_bytes_per_second=None,
        loader_bytes_per_second=Coefficient(1e8),
    )
    assert not [each for each in compare_clusters(before, before) if is_changed(each)], "equal to itself"
    changed = {each.path: each for each in compare_clusters(before, after) if is_changed(each)}
    assert set(changed) == {
        "tiers.network.collectives.send.latency_seconds", "tiers.network.collectives.send.bytes_per_second",
        "disk_write_bytes_per_second", "loader_bytes_per_second",
    }  # fmt: skip
    latency = changed["tiers.network.collectives.send.latency_seconds"]
    assert latency.ratio == pytest.approx(0.2)
    assert latency.is_disjoint
    rate = changed["tiers.network.collectives.send.bytes_per_second"]
    assert (rate.ratio, rate.is_disjoint) == (2.0, None), "without intervals nothing is known"
    assert changed["loader_bytes_per_second"].ratio is None, "only one has it"
    assert len(dict(figures_of(before))) == len(list(figures_of(before))), "every path is there once"
