"""How a model is timed on this machine, so that it is timed as a rank of a cluster will run it."""

from __future__ import annotations

from typing import Any

from ...comm.device.accelerator import gpu_count
from ...core.cluster.cluster import Cluster
from ...core.vocabulary.errors import ConfigError


def as_a_rank_of(cluster: Cluster) -> dict[str, Any]:
    """Return the device, the threads and the neighbours of a rank, as `Timing` takes them.

    Raises:
        ConfigError: ranks of the cluster compute on GPUs, and this machine has none.
    """
    if not cluster.on_cpus:
        refuse_without_gpu(cluster, "measure")
        return {"device": cluster.operations}
    threads = cluster.fingerprint.get("threads", "")
    return {
        "device": cluster.operations,
        "threads": max(1, int(threads)) if threads.isdecimal() else None,
        "neighbours": cluster.tiers[0].ranks - 1 if cluster.tiers else 0,
    }


def refuse_without_gpu(cluster: Cluster, what: str) -> None:
    """Raise `ConfigError` where `what` would time CPUs of this machine instead of the cluster's GPUs."""
    if not cluster.on_cpus and not gpu_count():
        raise ConfigError(
            f"{what}: ranks of the cluster compute on {cluster.device.name}, and this machine has no GPU",
            remedy=f"run it on a machine of the cluster, or leave {what} out",
        )
