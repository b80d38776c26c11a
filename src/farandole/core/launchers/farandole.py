"""``farandole run``: its own variables, beside which it sets those of torchrun for the user's script."""

from __future__ import annotations

from collections.abc import Mapping

from ..vocabulary.errors import ConfigError
from .launcher_env import LauncherEnv, RankNames


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
