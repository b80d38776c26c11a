"""The launchers whose variables say it all: farandole run, torchrun, Horovod, and those of one command a node.

Those that have more to work out have files of their own: `slurm`, `mpi`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..vocabulary.errors import ConfigError
from .launcher_env import LauncherEnv, NodeNames, RankNames


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
