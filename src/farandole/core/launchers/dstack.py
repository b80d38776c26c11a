"""dstack: one command a node."""

from __future__ import annotations

from .launcher_env import LauncherEnv, NodeNames

DSTACK = LauncherEnv(
    "dstack",
    nodes=NodeNames(
        "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", ("MASTER_ADDR", "DSTACK_MASTER_NODE_IP"),
        slots=("DSTACK_GPUS_PER_NODE",),
    ),
)  # fmt: skip
