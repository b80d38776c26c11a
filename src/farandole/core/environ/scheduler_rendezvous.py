"""Where ranks meet when whoever started them does not say: derived from what it tells all of them alike.

Slurm and Open MPI give every rank its number but no meeting point. All ranks of a step or of an mpirun can
work out the same one: rank 0's host is the first of the nodes, and the port follows from the job's number,
so that two jobs on a host do not meet. Pure: reads a mapping of variables, asks nobody.

[Note: ports of jobs] Ports lie from 15000 to 29999: below those that the kernel hands out for outgoing
connections, which could sit on one by chance.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from ..vocabulary.errors import ConfigError
from .node_list import expand_node_list

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 15000, 15000
_STEPS = 31
"""Steps of a Slurm job before its ports meet those of the next job."""
_FIRST_SPECIAL_STEP = 0xFFFFFFFA
"""The steps of a batch script, of a shell of salloc, and others that hold no tasks of srun."""


def derive_meeting_point(
    family: str, environ: Mapping[str, str], *, one_host: bool
) -> tuple[str | None, int | None]:
    """Return the address and port at which the ranks of `family` meet; None for what cannot be derived."""
    if family == "Open MPI":
        return _open_mpi_address(environ, one_host), _open_mpi_port(environ)
    if family == "Slurm" or (family == "PMI" and _is_task_of_slurm(environ)):
        return slurm_address(environ), slurm_port(environ)
    return None, None


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task that srun started: a batch script or a shell of salloc is none."""
    step = environ.get("SLURM_STEP_ID", "")
    return bool(step) and not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)


def slurm_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the step, or of the job; an empty list outside both."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return expand_node_list(environ[name], where=name)
    return []


def slurm_address(environ: Mapping[str, str]) -> str | None:
    """Return the first node of the step: task 0 is there unless the distribution is arbitrary."""
    nodes = slurm_nodes(environ)
    if not nodes:
        return None
    return LOOPBACK if len(nodes) == 1 else nodes[0]


def slurm_port(environ: Mapping[str, str]) -> int | None:
    """Return a port for the step: neighbouring jobs and the steps of a job get different ones."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if not (job.isdecimal() and step.isdecimal()):
        return None
    return FIRST_PORT + (int(job) * _STEPS + int(step)) % PORTS


def slurm_tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Return how many tasks of the step each node has (``2(x3),1``); an empty list when it is not said."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        text = environ.get(name, "")
        if not text:
            continue
        counts: list[int] = []
        for piece in text.split(","):
            found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", piece.strip())
            if found is None:
                raise ConfigError(f"{name}={text!r}: expected tasks by node such as 2(x3),1")
            counts += [int(found[1])] * int(found[2] or 1)
        return counts
    return []


def _is_task_of_slurm(environ: Mapping[str, str]) -> bool:
    """A rank of ``srun --mpi=pmi2``, not of an mpirun inside a job of Slurm."""
    return in_slurm_step(environ) and environ.get("SLURM_PROCID") == environ.get("PMI_RANK")


def _open_mpi_address(environ: Mapping[str, str], one_host: bool) -> str | None:
    """Return the host of mpirun, where rank 0 is unless a host file says otherwise."""
    if one_host:
        return LOOPBACK
    # Open MPI 4: 12345.0;tcp://10.0.0.1,192.168.0.1:4711
    uri = re.search(r"tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri is not None:
        return uri[1]
    # Open MPI 5: prterun-HOST-PID@JOB
    name = re.fullmatch(r"prte(?:run)?-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", ""))
    return None if name is None else name[1]


def _open_mpi_port(environ: Mapping[str, str]) -> int | None:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri") or ""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job else None
