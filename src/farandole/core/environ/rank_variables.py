"""A rank's place in its job, as the variables of whoever started it say it.

[Note: whose rank variables] A process may sit inside several launchers at once: ``farandole run``
inside a Slurm allocation, ``torchrun`` inside ``srun``. The innermost one started *this* process, so
families are read from the most specific to the most general, and a family counts only when it gives
rank and size. A farandole family that contradicts the torch spelling is different: one launcher wrote both, so
somebody changed one of them, and that is an error naming both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..vocabulary.errors import ConfigError
from .env import GENERATION, NONCE, own_environment
from .env_parsing import read_number
from .scheduler_rendezvous import derive_meeting_point, in_slurm_step, slurm_tasks_per_node


@dataclass(frozen=True)
class Family:
    """The variable names one launcher uses. Several names for one thing are tried in order."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    node_count: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    equal: tuple[str, str] | None = None
    """A variable that must have this value for the family to count."""


FAMILIES = (
    Family(
        "farandole",
        rank=("FARANDOLE_RANK",),
        size=("FARANDOLE_SIZE",),
        local_rank=("FARANDOLE_LOCAL_RANK",),
        local_size=("FARANDOLE_LOCAL_SIZE",),
        node_rank=("FARANDOLE_NODE_RANK",),
        node_count=("FARANDOLE_NODE_COUNT",),
        address=("FARANDOLE_ADDRESS",),
        port=("FARANDOLE_PORT",),
    ),
    Family(
        "torch",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        node_count=("GROUP_WORLD_SIZE",),
    ),
    Family(
        "horovod",
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        node_rank=("HOROVOD_CROSS_RANK",),
        node_count=("HOROVOD_CROSS_SIZE",),
    ),
    Family(
        "Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Family(
        "PMI",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
        local_size=("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
    Family(
        "Slurm",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        node_count=("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
    ),
    Family(
        "torchrun's variables (PET_*)",  # one process a node, and nobody between
        rank=("PET_NODE_RANK",),
        size=("PET_NNODES",),
        node_rank=("PET_NODE_RANK",),
        node_count=("PET_NNODES",),
        address=("PET_MASTER_ADDR", "MASTER_ADDR"),
        port=("PET_MASTER_PORT", "MASTER_PORT"),
        equal=("PET_NPROC_PER_NODE", "1"),
    ),
)

_SCHEDULERS = ("Open MPI", "PMI", "Slurm")

RANK_NAMES = frozenset(
    [name for family in FAMILIES[:3] for field in ("rank", "size", "local_rank", "local_size", "node_rank",
     "node_count", "address", "port") for name in getattr(family, field)]
    + [GENERATION, "HOROVOD_HOSTNAME"]
)  # fmt: skip
"""What this package's launcher tells a rank of its place, in all spellings; it changes with the generation."""


@dataclass(frozen=True)
class RankVariables:
    """What whoever started this process said about its place."""

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
    """True when the starter already serves the store at the address (torchrun's agent)."""


def read_rank_variables(environ: Mapping[str, str] | None = None) -> RankVariables | None:
    """Return this process's place, or None when nobody gave it one (a world of one).

    Raises `ConfigError` naming the variable for a value that is no number or out of range, and
    naming both for the farandole and torch spellings that contradict each other.
    """
    environ = own_environment() if environ is None else environ
    found = [family for family in FAMILIES if _counts(family, environ)]
    if not found:
        return None
    chosen = _read_family(found[0], environ)
    if [family.name for family in found[:2]] == ["farandole", "torch"]:
        _refuse_contradiction(environ)
    return chosen


def adopt_rank_variables(values: Mapping[str, str]) -> None:
    """Take a new place in the job: what is read from now on, by scripts too. Other variables stay."""
    unknown = sorted(set(values) - RANK_NAMES - {NONCE})
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} do not describe a rank's place")
    own_environment().update(values)


def _counts(family: Family, environ: Mapping[str, str]) -> bool:
    if family.equal is not None and environ.get(family.equal[0]) != family.equal[1]:
        return False
    if family.name == "Slurm" and not in_slurm_step(environ):
        return False  # a batch script has SLURM_PROCID=0 too
    return all(any(name in environ for name in names) for names in (family.rank, family.size))


def _read_family(family: Family, environ: Mapping[str, str]) -> RankVariables:
    def read(names: tuple[str, ...], default: int, least: int) -> int:
        name = next((name for name in names if name in environ), None)
        return default if name is None else read_number(environ, name, default, least)

    size = read(family.size, 1, 1)
    rank = read(family.rank, 0, 0)
    if rank >= size:
        names = f"{family.rank[0]}={rank}, {family.size[0]}={size}"
        raise ConfigError(f"{names}: the rank must be below the world size")
    node_count = read(family.node_count, 1, 1)
    # A launcher that does not say how many share the host: all of them, or an even part of them.
    local_size = read(family.local_size, _even_share(family, environ, size, node_count), 1)
    local_rank = read(family.local_rank, rank % local_size, 0)
    if family.name in _SCHEDULERS:
        _refuse_turns(family, rank, size, local_rank, local_size)
    node_count = max(node_count, -(-size // local_size)) if not _given(family.node_count, environ) else node_count
    port_name = next((name for name in family.port if name in environ), None)
    address = next((environ[name] for name in family.address if environ.get(name)), None)
    port = None if port_name is None else read_number(environ, port_name, 0, 1)
    if address is None or port is None:
        derived = derive_meeting_point(family.name, environ, one_host=local_size == size)
        address, port = address or derived[0], port or derived[1]
    return RankVariables(
        source=family.name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=read(family.node_rank, rank // local_size, 0),
        node_count=node_count,
        address=address,
        port=port,
        store_is_served=family.name == "torch" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _even_share(family: Family, environ: Mapping[str, str], size: int, node_count: int) -> int:
    """Return how many ranks share this host, when no variable says it in one number."""
    if family.name == "Slurm":
        tasks = slurm_tasks_per_node(environ)
        node = next((read_number(environ, name, 0, 0) for name in family.node_rank if name in environ), 0)
        if node < len(tasks) and sum(tasks) == size:
            return max(1, tasks[node])
    return max(1, size // node_count)


def _refuse_turns(family: Family, rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Neighbours on a host must have neighbouring ranks: groups of a host are made of them."""
    equal_hosts = size % local_size == 0
    if equal_hosts and rank % local_size != local_rank:
        raise ConfigError(
            f"{family.name} dealt ranks out to the hosts in turn: rank {rank} is number {local_rank} of "
            f"{local_size} on its host",
            remedy="start with srun --distribution=block" if family.name == "Slurm" else "mpirun --map-by slot",
        )


def _refuse_contradiction(environ: Mapping[str, str]) -> None:
    for mine, theirs in (("FARANDOLE_RANK", "RANK"), ("FARANDOLE_SIZE", "WORLD_SIZE")):
        if environ[mine].strip() != environ[theirs].strip():
            raise ConfigError(
                f"{mine}={environ[mine]} and {theirs}={environ[theirs]} contradict each other",
                remedy=f"one launcher set both; do not change {theirs} inside the job",
            )


def _given(names: tuple[str, ...], environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in names)
