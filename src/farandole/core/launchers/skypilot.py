"""SkyPilot: one command a node, and the addresses of all nodes, one a line."""

from __future__ import annotations

from collections.abc import Mapping

from .launcher_env import LauncherEnv, NodeNames


class _SkyPilot(LauncherEnv):
    def node_count(self, environ: Mapping[str, str]) -> str | None:
        """Return SKYPILOT_NUM_NODES, else how many addresses there are."""
        given = super().node_count(environ)
        listed = environ.get("SKYPILOT_NODE_IPS", "").split()
        return str(len(listed)) if given is None and listed else given

    def second_node(self, environ: Mapping[str, str]) -> str:
        """Return the second address."""
        return "".join(environ.get("SKYPILOT_NODE_IPS", "").split()[1:2])


SKYPILOT = _SkyPilot(
    "SkyPilot",
    nodes=NodeNames(
        "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", ("MASTER_ADDR", "SKYPILOT_NODE_IPS"),
        slots=("SKYPILOT_NUM_GPUS_PER_NODE",),
    ),
)  # fmt: skip
