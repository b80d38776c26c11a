"""torchrun: the variables of its ranks, and those by which its own command line is set on each node (``PET_*``).

Kubeflow Trainer and others set ``PET_*`` and start one command a node, which need not be torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..vocabulary.errors import ConfigError
from .launcher_env import LauncherEnv, NodeNames, RankNames


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
)  # fmt: skip
