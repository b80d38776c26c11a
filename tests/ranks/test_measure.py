"""`farandole measure` on two ranks of this host: a complete file whose figures are possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.core.cluster.cluster import OPERATIONS
from farandole.core.cluster.cluster_file import read_cluster
from farandole.core.cluster.compare import figures_of
from farandole.core.step_model.prediction import CANDIDATES
from tests.warm import run


@pytest.mark.timeout(240)
def test_two_ranks_are_measured(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "measure",
        "-np",
        "2",
        "--seconds",
        "1",
        "--out",
        "two.toml",
        "--name",
        "here",
        "--json",
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    for phase in ("compute", "collectives", "overlap", "codecs", "loader", "disk"):
        assert f"measuring {phase}" in done.stderr, done.stderr
    cluster = read_cluster(tmp_path / "two.toml")
    assert json.loads(done.stdout)["name"] == cluster.name == "here"
    (host,) = cluster.tiers
    assert (host.name, host.ranks, tuple(host.collectives)) == ("host", 2, OPERATIONS)
    assert list(cluster.device.compute) == ["fp32", "bf16"]
    assert [rate.flops for rate in cluster.device.compute["fp32"]][:2] == [2 * 64**3, 2 * 128**3]
    assert set(cluster.codecs) == set(CANDIDATES)
    assert cluster.codecs["bf16"].ratio == 0.5
    assert cluster.loader_bytes_per_second is not None
    assert cluster.disk_write_bytes_per_second is not None
    assert cluster.disk_read_bytes_per_second is not None
    for path, figure in figures_of(cluster):
        if path.endswith(("seconds", "per_second", "slowdown", "memory_bytes", "per_byte")):
            low, high = figure.interval()
            assert figure.source == "measured", path
            assert 0 < low <= figure.value <= high, path
    assert cluster.fingerprint["ranks"] == "2"
    assert cluster.fingerprint["backend"] == "gloo"
    left = [path.name for path in tmp_path.iterdir() if path.name != "two.toml"]
    assert not left, "no run directory and no measured file is left"
