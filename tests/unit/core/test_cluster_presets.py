"""Presets of clusters: all are valid and marked as not measured; names and ranks that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.core.cluster import figures_of, with_ranks
from farandole.core.cluster_file import check_cluster, read_cluster, write_cluster
from farandole.core.cluster_presets import DEVICES, NETWORKS, find_cluster, preset_cluster
from farandole.core.vocabulary.errors import ConfigError


def test_every_device_with_every_network_is_a_possible_cluster() -> None:
    for device in DEVICES:
        for network in NETWORKS:
            cluster = preset_cluster(f"2x{device}+{network}", 8)
            check_cluster(cluster, f"{device}+{network}")
            assert {figure.source for _, figure in figures_of(cluster)} == {"preset"}, "nothing was measured"
            inner, outer = (tier.collectives["all_reduce"].bytes_per_second.value for tier in cluster.tiers)
            assert outer <= DEVICES[device].tcp_cap.high or not NETWORKS[network].is_tcp, (device, network)
            assert inner > 0, (device, network)


def test_the_published_figures_are_there(tmp_path: Path) -> None:
    cluster = preset_cluster("dgx-a100", 32)
    rates = cluster.device.compute["bf16"]
    shares = [rate.flops_per_second.value / 312e12 for rate in rates]
    assert shares[1:] == pytest.approx([0.38, 0.71, 0.76, 0.81]), "1,024 to 8,192 rows, of the table"
    assert rates[-1].flops_per_second.high == pytest.approx(271.2e12, rel=0.01), "the most that was reached"
    attention = cluster.device.attention_flops_per_second
    assert (attention["bf16"].value, attention["fp16"], "fp32" in attention) == (165e12, attention["bf16"], False)
    host, network = cluster.tiers
    assert (host.ranks, network.ranks) == (8, 32)
    bandwidth = host.collectives["all_reduce"].bytes_per_second
    assert (bandwidth.low, bandwidth.high) == (179e9, 232e9), "8x A100 of the table"
    assert network.collectives["all_reduce"].bytes_per_second.value == pytest.approx(0.80 * 25e9)
    write_cluster(cluster, tmp_path / "dgx.toml")
    assert read_cluster(tmp_path / "dgx.toml") == cluster


def test_tcp_of_a_fast_line_is_that_of_a_slower_one() -> None:
    fast = [
        preset_cluster(f"8xa100+{name}", 16).tiers[-1].collectives["send"].bytes_per_second
        for name in ("100gbe", "200gbe", "400gbe")
    ]
    assert {each.value for each in fast} == {5e9 / 8}, "NCCL's sockets reach 4 to 6 GB/s of 100 Gbit/s"
    slower = preset_cluster("8xa100+40gbe", 16).tiers[-1].collectives["send"].bytes_per_second
    assert slower.value == pytest.approx(0.6 * 5e9 / 8)


def test_the_gpus_of_an_nvl72_are_one_host() -> None:
    assert [tier.ranks for tier in preset_cluster("gb200", 72).tiers] == [72]
    host, network = preset_cluster("gb200-nvl72", 144).tiers
    assert (host.ranks, network.ranks) == (72, 144)
    assert network.line_bytes_per_second is not None
    assert network.line_bytes_per_second.value == 50e9, "an interface for each GPU"
    with pytest.raises(ConfigError, match="is one host, of up to 16 ranks, not 72"):
        preset_cluster("b200", 72)


def test_a_rank_has_its_part_of_the_interfaces_of_its_host() -> None:
    one, two, shared = (
        preset_cluster(name, 4).tiers[-1].collectives["send"].bytes_per_second.value
        for name in ("1xa100+100roce", "1xa100+2x100roce", "2xa100+100roce")
    )
    assert (two / one, shared / one) == pytest.approx((2.0, 0.5), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "same"),
    [("h100x8", "8xh100"), ("h100x8+ndr-ibx8", "8xh100+8xndr-ib"), ("rtx-4090x4+25gbe", "4xrtx-4090+25gbe")],
)
def test_a_number_may_follow_what_it_counts(name: str, same: str) -> None:
    assert preset_cluster(name, 8).tiers == preset_cluster(same, 8).tiers
    assert preset_cluster(name, 8).device == preset_cluster(same, 8).device


def test_devices_that_differ_in_memory_alone() -> None:
    """An A100 of 40 GB has half the memory of one of 80, and an H200 more than an H100; peaks are the same."""
    for small, large, share in (("a100-40", "a100", 0.5), ("h100", "h200", 84 / 149)):
        less, more = preset_cluster(small, 8).device, preset_cluster(large, 8).device
        assert less.peak_flops_per_second == more.peak_flops_per_second
        assert less.memory_bytes.value / more.memory_bytes.value == pytest.approx(share, abs=0.01)
    assert preset_cluster("dgx-h200", 16).device == preset_cluster("h200", 8).device


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("dgx-a10", 8, "unknown preset 'dgx-a10'; did you mean 'dgx-a100'? devices: a100, a100-40, h100"),
        ("a100+hdr", 8, "unknown network of a preset 'hdr' in 'a100+hdr'; did you mean 'hdr-ib'?"),
        ("b100+hdr-ib", 8, "unknown device of a preset 'b100' in 'b100+hdr-ib'"),
        ("", 8, "unknown preset ''"),
        ("2xa100x4", 8, "unknown preset '2xa100x4'"),
        ("a100x0", 8, "unknown preset 'a100x0'; did you mean 'a100'?"),
        ("dgx-a100", 13, "13 ranks do not fill hosts of 8; take 8 or 16 ranks"),
        ("dgx-a100", 0, "0 ranks: expected at least 1"),
        ("rtx-4090", 17, "is one host, of up to 16 ranks, not 17; name the network between hosts: rtx-4090+25gbe"),
    ],
)
def test_what_there_is_not(name: str, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        preset_cluster(name, ranks)
    assert message in str(refused.value), str(refused.value)


def test_more_and_fewer_of_the_same_machines(tmp_path: Path) -> None:
    cluster = preset_cluster("dgx-a100", 16)
    assert [tier.ranks for tier in with_ranks(cluster, 4096).tiers] == [8, 4096]
    assert [tier.ranks for tier in with_ranks(cluster, 5).tiers] == [5]
    assert with_ranks(cluster, 16) is cluster
    with pytest.raises(ConfigError, match="12 ranks do not fill hosts of 8"):
        with_ranks(cluster, 12)
    for name, told in (("dgx-h100", "name the preset, which has one: --cluster dgx-h100; or m"), ("h100", "m")):
        with pytest.raises(ConfigError, match=f"one host of 8 ranks, and 16 need a network; {told}easure on two"):
            with_ranks(preset_cluster(name, 8), 16)
    with pytest.raises(ConfigError, match="one host of 1 rank, and 2 need a network"):
        with_ranks(preset_cluster("cpu", 1), 2)
    write_cluster(cluster, tmp_path / "c.toml")
    assert find_cluster(str(tmp_path / "c.toml"), 32).ranks == 32
    assert find_cluster("dgx-a100", 32) == preset_cluster("dgx-a100", 32)
    with pytest.raises(ConfigError, match="has no number of ranks"):
        find_cluster("dgx-a100")
    with pytest.raises(ConfigError, match="there is no file"):
        find_cluster("missing.toml", 8)
