"""One rank of ``farandole measure``: all phases in turn; rank 0 reports progress, and the cluster as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster.cluster import Cluster
from ...core.cluster.presets import codecs_by_passes
from ...core.vocabulary.units import format_seconds
from ...train.session import init, shutdown
from ..measure.machine import machine_facts
from .codecs import measure_codec_costs
from .compute import measure_device
from .exchanges import measure_tiers, open_tiers
from .overlap import measure_overlap
from .storage import measure_disk, measure_loader

SHARES = {"compute": 0.3, "collectives": 0.35, "overlap": 0.12, "codecs": 0.11, "loader": 0.05, "disk": 0.07}
"""Parts of the time."""


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--disk", required=True, help="folder whose disk is measured")
    options = parser.parse_args()
    world = init(progress=False)
    cluster = measure(world, options.name, options.disk, options.seconds)
    if world.rank == 0:
        _say({"result": dataclasses.asdict(cluster)})
    shutdown()


def measure(world: World, name: str, directory: str, seconds: float) -> Cluster:
    """Return what this world gives; called by all ranks. Takes about `seconds`."""
    progress = _PhaseReport(world, seconds)
    tiers = open_tiers(world)
    progress.show("compute")
    device, speeds = measure_device(world, seconds * SHARES["compute"])
    facts: dict[str, Any] = {}
    progress.show("collectives")
    costs = measure_tiers(world, tiers, seconds * SHARES["collectives"])
    if world.size > 1:
        progress.show("overlap")
        outer = tiers[-1]
        slowdowns = measure_overlap(world, outer.runs["all_reduce"], outer.width, seconds * SHARES["overlap"])
        facts["compute_slowdown"], facts["exchange_slowdown"] = slowdowns
    if world.device.type == "cpu":
        progress.show("codecs")
        facts["codecs"] = measure_codec_costs(world, seconds * SHARES["codecs"])
    else:
        facts["codecs"] = codecs_by_passes(device.memory_bytes_per_second.value, is_cpu=False)
    progress.show("loader")
    facts["loader_bytes_per_second"] = measure_loader(world, seconds * SHARES["loader"])
    progress.show("disk")
    written, read = measure_disk(world, directory, seconds * SHARES["disk"])
    return Cluster(
        name=name,
        device=device,
        tiers=costs,
        disk_write_bytes_per_second=written,
        disk_read_bytes_per_second=read,
        rank_speeds=speeds,
        fingerprint=fingerprint(world),
        **facts,
    )


def fingerprint(world: World) -> dict[str, str]:
    """Return what was measured, and with what. Called by all ranks."""
    hosts = list(dict.fromkeys(all_gather_json(world, "measure/hosts", world.host)))
    facts = machine_facts()
    return {
        "date": facts["when"],
        "hosts": ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""),
        "ranks": str(world.size),
        "processor": facts["processor"],
        "cores": str(facts["cores"]),
        "threads": str(torch.get_num_threads()),
        "backend": world.backend,
        "farandole": facts["versions"]["farandole"],
        "torch": facts["versions"]["torch"],
        "load": str(facts["load"][0]),
    }


class _PhaseReport:
    """Lines of rank 0: which phase has begun, after how long."""

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds, self._begin = world, seconds, time.monotonic()

    def show(self, phase: str) -> None:
        """Report that `phase` begins."""
        if self._world.rank == 0:
            passed = format_seconds(time.monotonic() - self._begin)
            _say({"progress": f"measuring {phase}: {passed} of about {format_seconds(self._seconds)}"})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
