"""`farandole measure` on emulated hosts: a tier inside of hosts and one across them, and unequal hosts refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.core.cluster import OPERATIONS
from farandole.core.cluster_file import read_cluster
from tests.warm import run

pytestmark = [pytest.mark.net, pytest.mark.full("slow")]
ON_HOSTS = ("emulate", "--hosts", "2", "--slots", "2", "--rate", "1gbit", "--", "farandole", "measure")


@pytest.mark.timeout(240)
def test_hosts_have_two_tiers(tmp_path: Path) -> None:
    done = run(tmp_path, *ON_HOSTS, "--seconds", "30", "--out", "four.toml", timeout=230)
    assert done.returncode == 0, done.stderr
    cluster = read_cluster(tmp_path / "four.toml")
    assert [(tier.name, tier.ranks, tuple(tier.collectives)) for tier in cluster.tiers] == [
        ("host", 2, OPERATIONS),
        ("network", 4, OPERATIONS),
    ]
    assert {cost.bytes_per_second.source for tier in cluster.tiers for cost in tier.collectives.values()} == {
        "measured"
    }
    assert cluster.fingerprint["hosts"] == "host0, host1"
    assert "network (4 ranks) all_reduce" in done.stdout


@pytest.mark.timeout(240)
def test_hosts_of_different_sizes_are_refused_by_name(tmp_path: Path) -> None:
    done = run(
        tmp_path, *ON_HOSTS, "-H", "host0:1,host1:2", "--seconds", "30", "--out", "x.toml", timeout=230,
        environment={"TMPDIR": str(tmp_path)},  # its logs are kept
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "the hosts have 1 and 2 ranks: tiers need equally many on each" in done.stderr
    assert not (tmp_path / "x.toml").exists(), "nothing was measured"
    assert len(list(tmp_path.glob("farandole-measure-*/run/logs"))) == 1, "the logs that the message names"
