"""Horovod's launcher (horovodrun, Spark, Ray), which names the hosts' dimension ``cross``."""

from __future__ import annotations

from .launcher_env import LauncherEnv, RankNames

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
)
