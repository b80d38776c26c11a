"""What a rank is told: its place and the meeting point, in every spelling that scripts read."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core import env
from ...core.launcher_env import LOOPBACK
from ...core.rank_variables import RankVariables, write_rank_variables
from ...core.vocabulary.errors import ConfigError
from .hosts import HostNamespaces

FROZEN_SECONDS = 1.5
"""How long a rank may be stopped by a signal. Noticing it, taking stacks and ending all ranks takes 0.6 s more."""
GRACE_SECONDS = 30.0
"""How long ranks have to save and end after SIGTERM to their launcher: what Kubernetes and Slurm give."""

SHIM = Path(__file__).resolve().parent / "shim"
"""A folder for PYTHONPATH with a `sitecustomize`, which says what it is for."""

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
    spare_cores: tuple[int, ...] = ()
    """Cores of the host that no rank is bound to: for workers of data loaders."""
    host: HostNamespaces | None = None
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

    @property
    def hostname(self) -> str:
        """The host's name as the list of hosts has it, or this machine's own."""
        return self.host_name or socket.gethostname()

    def cross(self) -> tuple[int, int]:
        """Return the index among the hosts that have this local rank, and their number."""
        return (
            self.node_rank if self.cross_rank is None else self.cross_rank,
            self.node_count if self.cross_size is None else self.cross_size,
        )

    def variables(self, job: JobSpec) -> RankVariables:
        """Return what the rank reads of its place in `job`."""
        return RankVariables(
            "farandole", self.rank, self.size, self.local_rank, self.local_size, self.node_rank, self.node_count,
            job.address, job.port,
        )  # fmt: skip


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
    grace_seconds: float = GRACE_SECONDS
    """How long ranks have to end after SIGTERM to the launcher."""
    verify_deep: bool = False
    outlives_ranks: bool = False
    """Whether the others go on when a rank is killed: servers hold what they train."""


def rank_environment(place: RankSpec, job: JobSpec, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables to set for one rank, beside those it inherits.

    Thread counts and the network interface are left alone where `inherited` has them already.
    """
    inherited = env.inherited_environment() if inherited is None else inherited
    values: dict[str, object] = dict(write_rank_variables(place.variables(job), place.cross(), place.hostname))
    values |= {env.RUN_DIRECTORY: job.run_directory, env.GENERATION: job.generation}
    if job.generation:
        values["TORCHELASTIC_RESTART_COUNT"] = job.generation  # torchrun's word for it, which scripts read
    if job.secret:
        values[env.SECRET] = job.secret
    if job.plan_file is not None:
        values[env.PLAN_FILE] = job.plan_file
    if job.verify_steps:
        values[env.VERIFY_STEPS] = job.verify_steps
    if job.verify_deep:
        values[env.VERIFY_DEEP] = 1
    if place.cores:
        values[env.CORES] = env.CoreShares(place.cores, place.spare_cores).to_text()
    values |= {name: "" for name in (env.CORES, env.TYPED) if name in inherited and name not in values}
    values["PYTHONUNBUFFERED"] = 1
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & inherited.keys():
        values["OMP_NUM_THREADS"] = job.threads
    values |= _tensorflow_threads(job, inherited)
    if place.host is not None:
        values["GLOO_SOCKET_IFNAME"] = place.host.interface
    elif place.interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        values |= {name: place.interface for name in names if name not in inherited}
    elif (place.node_count == 1 or job.address == LOOPBACK) and "GLOO_SOCKET_IFNAME" not in inherited:
        # One machine: whatever its name resolves to, the loopback interface works and is the fastest.
        values["GLOO_SOCKET_IFNAME"] = "lo"
    if place.visible_devices:
        values[_DEVICES] = _devices(place.visible_devices, inherited.get(_DEVICES))
    told = {name: str(value) for name, value in values.items()} | dict(job.environment)
    if env.read_backend(told) == "farandole" or env.recording_is_wanted(told):
        told["PYTHONPATH"] = _with_shim({**inherited, **told}.get("PYTHONPATH", ""))
    return told


def _with_shim(path: str) -> str:
    """Return a PYTHONPATH with the shim of this host's farandole in front."""
    entries = [entry for entry in path.split(os.pathsep) if entry]
    return os.pathsep.join([str(SHIM), *(entry for entry in entries if Path(entry).resolve() != SHIM)])


def _tensorflow_threads(job: JobSpec, inherited: Mapping[str, str]) -> dict[str, object]:
    """Return TensorFlow's thread pools. It does not read OMP_NUM_THREADS: by default each rank takes all cores."""
    threads = env.read_thread_count({**inherited, **job.environment}) or job.threads
    pools = {
        "TF_NUM_INTRAOP_THREADS": threads,
        # Operations that wait (input pipelines, Python functions) hold a thread of this pool: one must be left.
        "TF_NUM_INTEROP_THREADS": max(2, threads),
    }
    return {name: count for name, count in pools.items() if name not in inherited}


def _devices(chosen: tuple[int, ...], visible: str | None) -> str:
    """Return the devices of the chosen slots: numbers, or the entries of what is visible to us already."""
    if visible is None:
        return ",".join(map(str, chosen))
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if not entries:
        return visible  # none is to be seen: slots are ranks alone
    if max(chosen) >= len(entries):
        raise ConfigError(
            f"slot {max(chosen)} was chosen, but {_DEVICES}={visible} has {len(entries)} device(s)",
            remedy=f"choose other slots, or unset {_DEVICES}",
        )
    return ",".join(entries[number] for number in chosen)
