"""An indexed Job of Kubernetes, as `launch` writes it: one command a pod, and where pod 0 is."""

from __future__ import annotations

from .launcher_env import LauncherEnv, NodeNames

KUBERNETES = LauncherEnv(
    "Kubernetes",
    nodes=NodeNames(
        "JOB_COMPLETION_INDEX", "FARANDOLE_NODE_COUNT",
        ("FARANDOLE_ADDRESS",), ("FARANDOLE_PORT",), ("FARANDOLE_LOCAL_SIZE",),
    ),
)  # fmt: skip
