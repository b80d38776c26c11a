"""`farandole measure` on two ranks of this host: a complete file of possible figures, in the time it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import farandole as fd
from farandole.bench.cluster.compute import measure_codec_costs
from farandole.bench.cluster.worker import measure
from farandole.comm.autotune import probe
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.cluster import OPERATIONS, Cluster, figures_of
from farandole.core.cluster_file import read_cluster
from farandole.core.step_model import CANDIDATES
from tests.ranks.pool import ranks, takes
from tests.ranks.test_device_engine import simulated
from tests.warm import run

SECONDS, START_SECONDS = 8.0, 4.0
"""For the measurements; and for the start of the command and its ranks, which comes on top."""


@takes(90.0)
@ranks(2)
def test_all_phases_give_possible_figures() -> None:
    world = fd.init()
    with tempfile.TemporaryDirectory() as directory:
        cluster = measure(world, "here", directory, 2.0)
        assert not list(Path(directory).iterdir()), "no measured file is left"
    require_possible(cluster)


@pytest.mark.full("further")
@ranks(2)
def test_codecs_are_measured_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated one, whose clock is the host's; the figures are the same on both ranks."""
    world = fd.init()
    monkeypatch.setattr(probe, "_DEVICE_ELEMENTS", 2**18)
    with simulated():
        costs = measure_codec_costs(world, 1.0)
    assert tuple(costs) == CANDIDATES
    for name, cost in costs.items():
        assert cost.seconds_per_byte.source == "measured"
        assert (cost.seconds_per_bucket is None) == (name == "none"), "the backend adds up at once"
    # Each operation of the simulation takes microseconds, so that some 20 of them are more than a millionth.
    launches = [cost.seconds_per_bucket.value for cost in costs.values() if cost.seconds_per_bucket is not None]
    assert max(launches) > 1e-6
    assert costs["bf16"].ratio == 0.5
    assert all_gather_json(world, "costs", repr(costs)) == [repr(costs)] * 2


@pytest.mark.full("slow")
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_the_command_takes_the_time_that_it_is_given(tmp_path: Path) -> None:
    words = ("measure", "-np", "2", "--seconds", f"{SECONDS:g}", "--out", "two.toml", "--name", "here", "--json")
    took: list[float] = []
    most = 1.25 * SECONDS + START_SECONDS
    while not took or (min(took) >= most and len(took) < 3):  # something else may have used the machine
        begin = time.monotonic()
        done = run(tmp_path, *words, timeout=70)
        took.append(time.monotonic() - begin)
        assert done.returncode == 0, done.stderr
    assert min(took) < most, took
    for phase in ("compute", "collectives", "overlap", "codecs", "loader", "disk"):
        assert f"measuring {phase}" in done.stderr, done.stderr
    cluster = read_cluster(tmp_path / "two.toml")
    assert json.loads(done.stdout)["name"] == cluster.name == "here"
    require_possible(cluster)
    left = [path.name for path in tmp_path.iterdir() if path.name != "two.toml"]
    assert not left, "no run directory and no measured file is left"


@pytest.mark.full("slow")
@pytest.mark.alone
def test_a_busy_machine_is_named_in_the_output_and_in_the_file(tmp_path: Path) -> None:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        done = run(tmp_path, "measure", "-np", "1", "--seconds", "3", "--out", "busy.toml", timeout=100)
    finally:
        for each in burners:
            each.kill()
            each.wait()
    assert done.returncode == 0, done.stderr
    assert "warning: other programs took " in done.stderr, done.stderr
    assert "cores meanwhile" in read_cluster(tmp_path / "busy.toml").fingerprint["busy"]


def require_possible(cluster: Cluster) -> None:
    """Look at a cluster of two ranks of one host."""
    (host,) = cluster.tiers
    assert (host.name, host.ranks, tuple(host.collectives)) == ("host", 2, OPERATIONS)
    assert list(cluster.device.compute) == ["fp32", "bf16"]
    assert [rate.flops for rate in cluster.device.compute["fp32"]][:2] == [2 * 64**3, 2 * 128**3]
    assert set(cluster.codecs) == set(CANDIDATES)
    assert cluster.codecs["bf16"].ratio == 0.5
    assert {cost.seconds_per_bucket for cost in cluster.codecs.values()} == {None}, "on a CPU bytes count alone"
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
