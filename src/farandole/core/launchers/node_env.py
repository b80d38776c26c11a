"""Which node of a job this is, for launchers that start one command a node and leave the ranks to it.

[Note: rank or node] For one rank `read_rank_variables` answers. Here the launcher knows nodes only: Slurm with
one task a node, SkyPilot, dstack, Kubeflow Trainer and torchrun's own variables (``PET_*``), an indexed Job
of Kubernetes. ``farandole run`` on each node then starts that node's ranks with the right numbers. A process
that is a rank of farandole already is no node: its launcher has used these variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..environ.env import variables
from .launcher_env import NodeInfo
from .slurm import SLURM
from .table import DSTACK, KUBERNETES, SKYPILOT, TORCHRUN_NODES

NODE_LAUNCHERS = (KUBERNETES, TORCHRUN_NODES, SKYPILOT, DSTACK, SLURM)


def read_node_info(environ: Mapping[str, str] | None = None) -> NodeInfo | None:
    """Return this node's place; None on the only node of a job, and where no launcher speaks of nodes.

    Raises `ConfigError` naming the variable for a value that makes no sense or is missing.
    """
    environ = variables(environ)
    if "FARANDOLE_RANK" in environ:
        return None
    for launcher in NODE_LAUNCHERS:
        if launcher.started_node(environ):
            return launcher.read_node(environ)
    return None
