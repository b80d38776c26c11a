"""What a rank is told: its place and the meeting point, in every spelling that scripts read."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.environ import env
from ...core.vocabulary.errors import ConfigError
from .emulated_hosts import EmulatedHost
from .host_access import LOOPBACK

FROZEN_SECONDS = 1.5
"""How long a rank may be stopped by a signal. Noticing it, taking stacks and ending all ranks takes 0.6 s more."""

_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class RankSpec:
    """One rank's place among all, and the cores it may use."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int = 0
    node_count: int = 1
    cores: tuple[int, ...] = ()
    """Cores to bind to; empty: not bound."""
    host: EmulatedHost | None = None
    """Where to start it; None: on this host."""
    host_name: str = ""
    """The host's name as the list of hosts has it; empty: this machine's."""
    cross_rank: int | None = None
    """Index among the hosts that have this local rank; None: the node's rank."""
    cross_size: int | None = None
    visible_devices: tuple[int, ...] = ()
    """Devices of the host that its ranks may use; empty: all."""
    interface: str = ""
    """Network interface that leads to the other hosts, as chosen on the rank's host; empty: not chosen."""


@dataclass(frozen=True)
class JobSpec:
    """What all ranks of a job are told alike."""

    address: str
    port: int
    run_directory: Path
    plan_file: Path | None = None
    threads: int = 1
    """Compute threads a rank should use: its share of the cores."""
    verify_steps: int = 0
    generation: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """What else was asked for; it replaces what a rank inherits."""
    secret: str = field(default="", repr=False)
    """What only the ranks of this job are told; empty where several launchers start them."""
    frozen_seconds: float = FROZEN_SECONDS
    """How long a rank may be stopped by a signal; 0: for ever."""
    verify_deep: bool = False


def rank_environment(place: RankSpec, job: JobSpec, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables to set for one rank, beside those it inherits.

    Thread counts and the network interface are left alone where `inherited` has them already.
    """
    inherited = env.inherited_environment() if inherited is None else inherited
    values = {
        "RANK": place.rank,
        "SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
    }
    told: dict[str, object] = {f"FARANDOLE_{name}": value for name, value in values.items()}
    told |= {
        "FARANDOLE_NODE_RANK": place.node_rank,
        "FARANDOLE_NODE_COUNT": place.node_count,
        "FARANDOLE_ADDRESS": job.address,
        "FARANDOLE_PORT": job.port,
        env.RUN_DIRECTORY: job.run_directory,
        env.GENERATION: job.generation,
    }
    if job.secret:
        told[env.SECRET] = job.secret
    if job.plan_file is not None:
        told[env.PLAN_FILE] = job.plan_file
    if job.verify_steps:
        told[env.VERIFY_STEPS] = job.verify_steps
    if job.verify_deep:
        told[env.VERIFY_DEEP] = 1
    # The spelling of torch.distributed and torchrun.
    told |= {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node_rank,
        "NODE_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.node_count,
        "MASTER_ADDR": job.address,
        "MASTER_PORT": job.port,
    }
    told |= {f"HOROVOD_{name}": value for name, value in values.items()}
    told |= {
        "HOROVOD_CROSS_RANK": place.node_rank if place.cross_rank is None else place.cross_rank,
        "HOROVOD_CROSS_SIZE": place.node_count if place.cross_size is None else place.cross_size,
        "HOROVOD_HOSTNAME": place.host_name or socket.gethostname(),
    }
    told["PYTHONUNBUFFERED"] = 1
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & inherited.keys():
        told["OMP_NUM_THREADS"] = job.threads
    if place.host is not None:
        told["GLOO_SOCKET_IFNAME"] = place.host.interface
    elif place.interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        told |= {name: place.interface for name in names if name not in inherited}
    elif (place.node_count == 1 or job.address == LOOPBACK) and "GLOO_SOCKET_IFNAME" not in inherited:
        # One machine: whatever its name resolves to, the loopback interface works and is the fastest.
        told["GLOO_SOCKET_IFNAME"] = "lo"
    if place.visible_devices:
        told[_DEVICES] = _devices(place.visible_devices, inherited.get(_DEVICES))
    return {name: str(value) for name, value in told.items()} | dict(job.environment)


def _devices(chosen: tuple[int, ...], visible: str | None) -> str:
    """Return the devices of the chosen slots: numbers, or the entries of what is visible to us already."""
    if visible is None:
        return ",".join(map(str, chosen))
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if max(chosen) >= len(entries):
        raise ConfigError(
            f"slot {max(chosen)} was chosen, but {_DEVICES}={visible} has {len(entries)} device(s)",
            remedy=f"choose other slots, or unset {_DEVICES}",
        )
    return ",".join(entries[number] for number in chosen)
