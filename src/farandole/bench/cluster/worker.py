"""One rank of ``farandole measure``: all phases in turn; rank 0 reports progress, and the cluster as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.cluster.cluster import Cluster
from ...core.host.process_status import CoreTime, busy_machines
from ...core.vocabulary.units import format_seconds
from ...train.session import init, shutdown
from ..measure.machine import machine_facts
from .compute import measure_codec_costs, measure_device
from .exchanges import measure_tiers, open_tiers
from .overlap import measure_overlap
from .rounds import SHARES, PhaseBudget
from .storage import measure_disk, measure_loader

_OVER = 0.05
"""A share of the time that is not worth a word."""


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
    """Return what this world gives; called by all ranks. All phases together take about `seconds`.

    Raises:
        ConfigError: the hosts have different numbers of ranks; on all ranks.
    """
    tiers = open_tiers(world)
    phases = _Phases(world, [each for each in SHARES if each != "overlap" or world.size > 1], seconds)
    begin = CoreTime.now()
    device, speeds = measure_device(world, phases.begin("compute"))
    facts: dict[str, Any] = {}
    costs = measure_tiers(world, tiers, phases.begin("collectives"))
    if world.size > 1:
        outer = tiers[-1]
        slowdowns = measure_overlap(world, outer.runs["all_reduce"], outer.width, phases.begin("overlap"))
        facts["compute_slowdown"], facts["exchange_slowdown"] = slowdowns
    facts["codecs"] = measure_codec_costs(world, phases.begin("codecs"))
    facts["loader_bytes_per_second"] = measure_loader(world, phases.begin("loader"))
    written, read = measure_disk(world, directory, phases.begin("disk"))
    phases.end()
    own = dataclasses.asdict(CoreTime.now().since(begin))
    busy = busy_machines([CoreTime(**each) for each in all_gather_json(world, "measure/busy", own)])
    return Cluster(
        name=name,
        device=device,
        tiers=costs,
        disk_write_bytes_per_second=written,
        disk_read_bytes_per_second=read,
        rank_speeds=speeds,
        fingerprint={**fingerprint(world), **({"busy": busy} if busy else {})},
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


class _Phases:
    """The time of each phase, and lines of rank 0 that name it. See [Note: all ranks decide alike]."""

    def __init__(self, world: World, names: Sequence[str], seconds: float) -> None:
        self._world, self._seconds, self._begin_seconds = world, seconds, time.monotonic()
        self._budget = PhaseBudget(names, seconds, agree=self._of_first)

    def begin(self, phase: str) -> float:
        """Return the seconds of `phase`, which begins."""
        passed = time.monotonic() - self._begin_seconds
        self._show(f"measuring {phase}: {format_seconds(passed)} of about ")
        return self._budget.begin(phase)

    def end(self) -> None:
        """Report if the phases took longer than they were given: fewer rounds than they made there are not."""
        over = -self._budget.left_seconds
        if over > _OVER * self._seconds:
            self._show(f"the fewest rounds of all phases took {format_seconds(over)} more than was left of ")

    def _show(self, text: str) -> None:
        if self._world.rank == 0:
            _say({"progress": text + format_seconds(self._seconds)})

    def _of_first(self, value: float) -> float:
        """Return the value of rank 0."""
        return float(all_gather_json(self._world, "measure/budget", value)[0])


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
