"""A rank's place in its job, as the variables of its launcher say it.

[Note: whose rank variables] A process may sit inside several launchers at once: ``farandole run``
inside a Slurm allocation, ``torchrun`` inside ``srun``. The innermost one started *this* process, so
launchers are asked from the most specific to the most general, and one counts only when it gives
rank and size. Farandole's variables that contradict the torch spelling are different: one launcher wrote both, so
one of them was changed since, and that is an error naming both.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from .env import GENERATION, NONCE, own_environment, read_number, variables
from .launcher_env import FIRST_PORT, LOOPBACK, PORTS, LauncherEnv, NodeNames, RankNames, read_first
from .slurm import SLURM, in_slurm_step
from .vocabulary.errors import ConfigError

# The launchers whose variables say it all: farandole run, torchrun, Horovod, and those of one command a node.
#
# Those that have more to work out have files of their own: `slurm`, `mpi`.


class _Farandole(LauncherEnv):
    def refuse_contradiction(self, environ: Mapping[str, str]) -> None:
        """Both spellings were set by one launcher: where they differ, one was changed inside the job."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return
        for mine, theirs in (("FARANDOLE_RANK", "RANK"), ("FARANDOLE_SIZE", "WORLD_SIZE")):
            if environ[mine].strip() != environ[theirs].strip():
                raise ConfigError(
                    f"{mine}={environ[mine]} and {theirs}={environ[theirs]} contradict each other",
                    remedy=f"one launcher set both; do not change {theirs} inside the job",
                )


class _Torchrun(LauncherEnv):
    def serves_store(self, environ: Mapping[str, str]) -> bool:
        """Return whether torchrun's agent serves the store."""
        return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class _TorchrunNodes(LauncherEnv):
    def started_rank(self, environ: Mapping[str, str]) -> bool:
        """One process a node is a rank: no launcher stands between."""
        return environ.get("PET_NPROC_PER_NODE") == "1" and super().started_rank(environ)

    def node_count(self, environ: Mapping[str, str]) -> str | None:
        """Return PET_NNODES; raise `ConfigError` for a range (2:4), which only torchrun itself serves."""
        count = super().node_count(environ)
        if count is not None and ":" in count:
            raise ConfigError(
                f"PET_NNODES={count}: a number of nodes that may change is torchrun's own",
                remedy="start the script with torchrun, or give farandole run --min-np and hosts",
            )
        return count


class _SkyPilot(LauncherEnv):
    def node_count(self, environ: Mapping[str, str]) -> str | None:
        """Return SKYPILOT_NUM_NODES, else how many addresses there are."""
        given = super().node_count(environ)
        listed = environ.get("SKYPILOT_NODE_IPS", "").split()
        return str(len(listed)) if given is None and listed else given

    def second_node(self, environ: Mapping[str, str]) -> str:
        """Return the second address."""
        return "".join(environ.get("SKYPILOT_NODE_IPS", "").split()[1:2])


FARANDOLE = _Farandole(
    "farandole",
    RankNames(
        rank=("FARANDOLE_RANK",),
        size=("FARANDOLE_SIZE",),
        local_rank=("FARANDOLE_LOCAL_RANK",),
        local_size=("FARANDOLE_LOCAL_SIZE",),
        node_rank=("FARANDOLE_NODE_RANK",),
        node_count=("FARANDOLE_NODE_COUNT",),
        address=("FARANDOLE_ADDRESS",),
        port=("FARANDOLE_PORT",),
    ),
)
"""It sets the variables of torchrun and Horovod too, for the script."""

TORCHRUN = _Torchrun(
    "torch",
    RankNames(
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        node_count=("GROUP_WORLD_SIZE",),
    ),
    command="torchrun",
)

TORCHRUN_NODES = _TorchrunNodes(
    "torchrun's variables (PET_*)",
    RankNames(
        rank=("PET_NODE_RANK",),
        size=("PET_NNODES",),
        node_rank=("PET_NODE_RANK",),
        node_count=("PET_NNODES",),
        address=("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "MASTER_PORT"),
    ),
    NodeNames(
        "PET_NODE_RANK", "PET_NNODES", ("PET_MASTER_ADDR", "MASTER_ADDR"), ("PET_MASTER_PORT", "MASTER_PORT"),
        slots=("PET_NPROC_PER_NODE",),
    ),
    "torchrun",
)  # fmt: skip
"""Kubeflow Trainer and others set these and start one command a node, which need not be torchrun."""

HOROVOD = LauncherEnv(
    "horovod",
    RankNames(
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        node_rank=("HOROVOD_CROSS_RANK",),
        node_count=("HOROVOD_CROSS_SIZE",),
    ),
    command="horovodrun",
)
"""horovodrun, Spark, Ray: they name the hosts' dimension ``cross``."""

KUBERNETES = LauncherEnv(
    "Kubernetes",
    nodes=NodeNames(
        "JOB_COMPLETION_INDEX", "FARANDOLE_NODE_COUNT",
        ("FARANDOLE_ADDRESS",), ("FARANDOLE_PORT",), ("FARANDOLE_LOCAL_SIZE",),
    ),
)  # fmt: skip
"""An indexed Job, as `launch` writes it: one command a pod, and where pod 0 is."""

SKYPILOT = _SkyPilot(
    "SkyPilot",
    nodes=NodeNames(
        "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", ("MASTER_ADDR", "SKYPILOT_NODE_IPS"),
        slots=("SKYPILOT_NUM_GPUS_PER_NODE",),
    ),
)  # fmt: skip
"""One command a node, and the addresses of all nodes, one a line."""

DSTACK = LauncherEnv(
    "dstack",
    nodes=NodeNames(
        "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", ("MASTER_ADDR", "DSTACK_MASTER_NODE_IP"),
        slots=("DSTACK_GPUS_PER_NODE",),
    ),
)  # fmt: skip


# mpirun: Open MPI's own variables, and those of PMI, by which MPICH, Intel MPI and PALS tell a rank its place.
#
# Open MPI names no rendezvous, but all ranks of one mpirun are told the same name of it: the host of mpirun, where
# rank 0 is unless a host file says otherwise, and a port that follows from the name.


_IN_BLOCKS = "mpirun --map-by slot"


class _OpenMpi(LauncherEnv):
    def rendezvous(self, environ: Mapping[str, str], *, one_host: bool) -> tuple[str | None, int | None]:
        """Return the host and a port that follow from the name of this mpirun."""
        return LOOPBACK if one_host else _host_of_mpirun(environ), _port_of_mpirun(environ)


class _Pmi(LauncherEnv):
    def rendezvous(self, environ: Mapping[str, str], *, one_host: bool) -> tuple[str | None, int | None]:
        """Return Slurm's for a rank of ``srun --mpi=pmi2``; an mpirun inside a job of Slurm has none."""
        if in_slurm_step(environ) and environ.get("SLURM_PROCID") == environ.get("PMI_RANK"):
            return SLURM.rendezvous(environ, one_host=one_host)
        return None, None


def _host_of_mpirun(environ: Mapping[str, str]) -> str | None:
    # Open MPI 4: 12345.0;tcp://10.0.0.1,192.168.0.1:4711
    uri = re.search(r"tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri is not None:
        return uri[1]
    # Open MPI 5: prterun-HOST-PID@JOB
    name = re.fullmatch(r"prte(?:run)?-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", ""))
    return None if name is None else name[1]


def _port_of_mpirun(environ: Mapping[str, str]) -> int | None:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri") or ""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job else None


OPEN_MPI = _OpenMpi(
    "Open MPI",
    RankNames(
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    command="mpirun",
    block_remedy=_IN_BLOCKS,
)

PMI = _Pmi(
    "PMI",
    RankNames(
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
        local_size=("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
    command="mpirun",
    block_remedy=_IN_BLOCKS,
)


RANK_LAUNCHERS = (FARANDOLE, TORCHRUN, HOROVOD, OPEN_MPI, PMI, SLURM, TORCHRUN_NODES)
"""From the most specific to the most general."""

RANK_NAMES = frozenset(
    [name for launcher in (FARANDOLE, TORCHRUN, HOROVOD) if launcher.ranks for name in launcher.ranks.all_names()]
    + [GENERATION, "HOROVOD_HOSTNAME"]
)
"""What this package's launcher tells a rank of its place, in all spellings; it changes with the generation."""


@dataclass(frozen=True)
class RankVariables:
    """What the launcher of this process said about its place."""

    source: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    node_count: int
    address: str | None
    port: int | None
    store_is_served: bool = False
    """True when the launcher already serves the store at the address (torchrun's agent)."""


def read_rank_variables(environ: Mapping[str, str] | None = None) -> RankVariables | None:
    """Return this process's place, or None when no launcher gave it one (a world of one).

    Raises `ConfigError` naming the variable for a value that is no number or out of range, and
    naming both for the farandole and torch spellings that contradict each other.
    """
    environ = variables(environ)
    for launcher in RANK_LAUNCHERS:
        if launcher.ranks is not None and launcher.started_rank(environ):
            place = _read(launcher, launcher.ranks, environ)
            launcher.refuse_contradiction(environ)
            return place
    return None


def how_to_start_all(environ: Mapping[str, str] | None = None) -> str:
    """Return what to do where ranks do not come, of which the variables of a launcher speak."""
    environ = variables(environ)
    found = [each for each in RANK_LAUNCHERS if each.ranks is not None and each.started_rank(environ)]
    if not found or not found[0].command:
        return "each of them must call farandole.init() too"
    first, names = found[0], [each.ranks for each in found if each.ranks is not None]
    size = next(name for name in names[0].size if name in environ)
    unset = " ".join(name for each in names for name in each.rank if name in environ)
    return (
        f"{first.name} says {size}={environ[size]}: start each rank with {first.command}, or train in this "
        f"process alone: unset {unset}"
    )


def write_rank_variables(place: RankVariables, cross: tuple[int, int], hostname: str) -> dict[str, str]:
    """Return the variables by which a rank reads `place`, in the spellings of farandole, torchrun and Horovod.

    `cross` is the rank's index among the hosts that have its local rank, and their number; Horovod's programs read
    these and the name of the host.
    """
    values: dict[str, str] = {}
    for launcher in (FARANDOLE, TORCHRUN, HOROVOD):
        assert launcher.ranks is not None, "each of them starts ranks"
        for field, names in vars(launcher.ranks).items():
            values |= {name: str(getattr(place, field)) for name in names}
    cross_rank, cross_size = cross
    return values | {
        "HOROVOD_CROSS_RANK": str(cross_rank),
        "HOROVOD_CROSS_SIZE": str(cross_size),
        "HOROVOD_HOSTNAME": hostname,
    }


def adopt_rank_variables(values: Mapping[str, str]) -> None:
    """Take a new place in the job: what is read from now on, by scripts too. Other variables stay."""
    unknown = sorted(set(values) - RANK_NAMES - {NONCE})
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} do not describe a rank's place")
    own_environment().update(values)


def _read(launcher: LauncherEnv, names: RankNames, environ: Mapping[str, str]) -> RankVariables:
    size = read_first(environ, names.size, 1, 1)
    rank = read_first(environ, names.rank, 0, 0)
    if rank >= size:
        given = f"{names.rank[0]}={rank}, {names.size[0]}={size}"
        raise ConfigError(f"{given}: the rank must be below the world size")
    node_count = read_first(environ, names.node_count, 1, 1)
    # A launcher that does not say how many share the host: all of them, or an even part of them.
    local_size = read_first(environ, names.local_size, launcher.ranks_here(environ, size, node_count), 1)
    local_rank = read_first(environ, names.local_rank, rank % local_size, 0)
    if launcher.block_remedy and local_size == size:
        # Open MPI numbers the ranks of an oversubscribed host in an order of its own: 0, 2, 1, 3.
        local_rank = rank
    elif launcher.block_remedy:
        _refuse_turns(launcher, rank, size, local_rank, local_size)
    if not any(name in environ for name in names.node_count):
        node_count = max(node_count, -(-size // local_size))
    port_name = next((name for name in names.port if name in environ), None)
    address = next((environ[name] for name in names.address if environ.get(name)), None)
    port = None if port_name is None else read_number(environ, port_name, 0, 1)
    if address is None or port is None:
        derived = launcher.rendezvous(environ, one_host=local_size == size)
        address, port = address or derived[0], port or derived[1]
    return RankVariables(
        source=launcher.name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=read_first(environ, names.node_rank, rank // local_size, 0),
        node_count=node_count,
        address=address,
        port=port,
        store_is_served=launcher.serves_store(environ),
    )


def _refuse_turns(launcher: LauncherEnv, rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Neighbours on a host must have neighbouring ranks: groups of a host are made of them."""
    equal_hosts = size % local_size == 0
    if equal_hosts and rank % local_size != local_rank:
        raise ConfigError(
            f"{launcher.name} dealt ranks out to the hosts in turn: rank {rank} is number {local_rank} of "
            f"{local_size} on its host",
            remedy=launcher.block_remedy,
        )
