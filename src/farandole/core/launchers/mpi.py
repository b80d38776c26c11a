"""mpirun: Open MPI's own variables, and those of PMI, by which MPICH, Intel MPI and PALS tell a rank its place.

Open MPI names no rendezvous, but all ranks of one mpirun are told the same name of it: the host of mpirun, where
rank 0 is unless a host file says otherwise, and a port that follows from the name.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from .launcher_env import FIRST_PORT, LOOPBACK, PORTS, LauncherEnv, RankNames
from .slurm import SLURM, in_slurm_step

_IN_BLOCKS = "mpirun --map-by slot"


class _OpenMpi(LauncherEnv):
    def rendezvous(self, environ: Mapping[str, str], *, one_host: bool) -> tuple[str | None, int | None]:
        """Return the host and a port that follow from the name of this mpirun."""
        return LOOPBACK if one_host else _host_of_mpirun(environ), _port_of_mpirun(environ)


class _Pmi(LauncherEnv):
    def rendezvous(self, environ: Mapping[str, str], *, one_host: bool) -> tuple[str | None, int | None]:
        """Return Slurm's for a rank of ``srun --mpi=pmi2``; an mpirun inside a job of Slurm has none."""
        if in_slurm_step(environ) and environ.get("SLURM_PROCID") == environ.get("PMI_RANK"):
            return SLURM.rendezvous(environ, one_host=one_host)
        return None, None


def _host_of_mpirun(environ: Mapping[str, str]) -> str | None:
    # Open MPI 4: 12345.0;tcp://10.0.0.1,192.168.0.1:4711
    uri = re.search(r"tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri is not None:
        return uri[1]
    # Open MPI 5: prterun-HOST-PID@JOB
    name = re.fullmatch(r"prte(?:run)?-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", ""))
    return None if name is None else name[1]


def _port_of_mpirun(environ: Mapping[str, str]) -> int | None:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri") or ""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job else None


OPEN_MPI = _OpenMpi(
    "Open MPI",
    RankNames(
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    command="mpirun",
    block_remedy=_IN_BLOCKS,
)

PMI = _Pmi(
    "PMI",
    RankNames(
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
        local_size=("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
    command="mpirun",
    block_remedy=_IN_BLOCKS,
)
