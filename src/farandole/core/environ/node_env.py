"""Which node of a job this is, for those who start one command a node and leave the ranks to it.

[Note: rank or node] For one rank `read_rank_variables` answers. Here the starter knows nodes only: Slurm with
one task a node, SkyPilot, dstack, Kubeflow Trainer and torchrun's own variables (``PET_*``), an indexed Job
of Kubernetes. ``farandole run`` on each node then starts that node's ranks with the right numbers. A process
that is a rank of farandole already is no node: its starter has used these variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..vocabulary.errors import ConfigError
from .scheduler_rendezvous import in_slurm_step, slurm_address, slurm_nodes, slurm_port

DEFAULT_PORT = 29500
"""Where nodes meet that have a network of their own, as torchrun does."""


@dataclass(frozen=True)
class NodeInfo:
    """One node's place among those of its job."""

    source: str
    node_rank: int
    node_count: int
    address: str
    """Node 0, as the others reach it."""
    port: int
    slots: int | None = None
    """Ranks a node, where the starter says so."""
    second: str = ""
    """Node 1, as node 0 reaches it; empty: nobody says."""


@dataclass(frozen=True)
class LauncherEnv:
    """The variables of one starter. Several names for one thing are tried in order."""

    name: str
    node_rank: str
    node_count: str
    address: tuple[str, ...]
    """A list of addresses, one a line, means its first."""
    port: tuple[str, ...] = ("MASTER_PORT",)
    slots: tuple[str, ...] = ()


NODE_FAMILIES = (
    LauncherEnv(
        "Kubernetes", "JOB_COMPLETION_INDEX", "FARANDOLE_NODE_COUNT",
        ("FARANDOLE_ADDRESS",), ("FARANDOLE_PORT",), ("FARANDOLE_LOCAL_SIZE",),
    ),
    LauncherEnv(
        "torchrun's variables (PET_*)", "PET_NODE_RANK", "PET_NNODES",
        ("PET_MASTER_ADDR", "MASTER_ADDR"), ("PET_MASTER_PORT", "MASTER_PORT"), ("PET_NPROC_PER_NODE",),
    ),
    LauncherEnv(
        "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES",
        ("MASTER_ADDR", "SKYPILOT_NODE_IPS"), slots=("SKYPILOT_NUM_GPUS_PER_NODE",),
    ),
    LauncherEnv(
        "dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM",
        ("MASTER_ADDR", "DSTACK_MASTER_NODE_IP"), slots=("DSTACK_GPUS_PER_NODE",),
    ),
)  # fmt: skip


def read_node_place(environ: Mapping[str, str]) -> NodeInfo | None:
    """Return this node's place; None on the only node of a job, and where nobody speaks of nodes.

    Raises `ConfigError` naming the variable for a value that makes no sense or is missing.
    """
    if "FARANDOLE_RANK" in environ:
        return None
    for family in NODE_FAMILIES:
        if family.node_rank in environ and _count_of(family, environ) is not None:
            return _read(family, environ)
    return _read_slurm(environ)


def _count_of(family: LauncherEnv, environ: Mapping[str, str]) -> str | None:
    if family.name == "SkyPilot" and family.node_count not in environ:
        addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
        return str(len(addresses)) if addresses else None
    return environ.get(family.node_count)


def _read(family: LauncherEnv, environ: Mapping[str, str]) -> NodeInfo | None:
    count_text = _count_of(family, environ)
    assert count_text is not None, "looked at before"
    if family.name.startswith("torchrun") and ":" in count_text:
        raise ConfigError(
            f"{family.node_count}={count_text}: a number of nodes that may change is torchrun's own",
            remedy="start the script with torchrun, or give farandole run --min-np and hosts",
        )
    count = _whole(count_text, family.node_count, 1)
    if count == 1:
        return None
    rank = _whole(environ[family.node_rank], family.node_rank, 0)
    if rank >= count:
        raise ConfigError(f"{family.node_rank}={rank}, {family.node_count}={count}: expected a node below {count}")
    address = next((environ[name].split()[0] for name in family.address if environ.get(name, "").strip()), None)
    if address is None:
        raise ConfigError(
            f"{family.name}: this is node {rank} of {count}, but nobody says where node 0 is",
            remedy=f"set {' or '.join(family.address)}",
        )
    port_name = next((name for name in family.port if environ.get(name)), None)
    port = DEFAULT_PORT if port_name is None else _whole(environ[port_name], port_name, 1)
    listed = environ.get("SKYPILOT_NODE_IPS", "").split() if family.name == "SkyPilot" else []
    return NodeInfo(family.name, rank, count, address, port, _slots(family, environ), "".join(listed[1:2]))


def _slots(family: LauncherEnv, environ: Mapping[str, str]) -> int | None:
    for name in family.slots:
        text = environ.get(name, "").strip()
        if text.isdecimal() and int(text) > 0:
            return int(text)
        if text and not text.isdecimal() and text not in ("auto", "cpu", "gpu", "xpu"):
            raise ConfigError(f"{name}={text!r}: expected a whole number")
    return None


def _read_slurm(environ: Mapping[str, str]) -> NodeInfo | None:
    """Return the place of the one task of a node; a step of several tasks a node has ranks, not nodes."""
    if not in_slurm_step(environ) or "SLURM_PROCID" not in environ:
        return None
    tasks = _whole(environ.get("SLURM_STEP_NUM_TASKS", "1"), "SLURM_STEP_NUM_TASKS", 1)
    nodes = _whole(environ.get("SLURM_STEP_NUM_NODES", "1"), "SLURM_STEP_NUM_NODES", 1)
    if tasks == 1:
        return None
    if tasks != nodes:
        raise ConfigError(
            f"srun started {tasks} tasks on {nodes} node(s), and farandole run starts a node's ranks itself",
            remedy="start it with srun --ntasks-per-node=1, or let srun start the script: srun python train.py",
        )
    address = environ.get("MASTER_ADDR") or slurm_address(environ)
    port_text = environ.get("MASTER_PORT", "")
    port = _whole(port_text, "MASTER_PORT", 1) if port_text else slurm_port(environ)
    if address is None or port is None:
        raise ConfigError(
            "Slurm names neither the job nor its nodes (SLURM_JOB_ID, SLURM_STEP_NODELIST)",
            remedy="set MASTER_ADDR and MASTER_PORT",
        )
    rank = _whole(environ["SLURM_PROCID"], "SLURM_PROCID", 0)
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    slots = int(gpus) if gpus.isdecimal() and int(gpus) > 0 else None
    return NodeInfo("Slurm", rank, nodes, address, port, slots, "".join(slurm_nodes(environ)[1:2]))


def _whole(text: str, name: str, least: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise ConfigError(f"{name}={text!r}: expected a whole number, at least {least}")
    return int(text)
