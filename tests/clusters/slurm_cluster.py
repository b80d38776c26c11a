"""A real Slurm on this machine: munged, slurmctld and two slurmd, with their own files and ports, and their end.

The nodes are called node1 and node2; both are this machine. Their names are known to what runs in the cluster
by a hosts file of its own, laid over the machine's in a mount namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NODES = 2
PROCESSORS = 4
START_SECONDS = 30.0
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
AuthInfo=socket={place}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool.%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
ReturnToService=2
KillWait=2
NodeName=node1 NodeAddr=127.0.0.1 NodeHostname={host} Port={first} CPUs={processors}
NodeName=node2 NodeAddr=127.0.0.1 NodeHostname={host} Port={second} CPUs={processors}
PartitionName=debug Nodes=ALL Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster: how to run commands that speak to it."""

    place: Path

    def run(
        self, *words: str, directory: Path, timeout: float = 40, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm, or one that runs some."""
        return subprocess.run(
            self.inside(*words), cwd=directory, capture_output=True, text=True, timeout=timeout, check=False,
            env=self.environment(**variables),
        )  # fmt: skip

    def start(self, *words: str, directory: Path) -> subprocess.Popen[str]:
        """Start a command that goes on; its output is read by the caller."""
        return subprocess.Popen(
            self.inside(*words), cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=self.environment(),
        )  # fmt: skip

    def inside(self, *words: str) -> list[str]:
        """Return a command that knows the nodes by name."""
        lay = f'mount --bind "{self.place}/hosts" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", lay, "sh", *words]

    def environment(self, **variables: str) -> dict[str, str]:
        """Return our environment with what leads to this cluster."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "SLURM_CONF": f"{self.place}/slurm.conf", **variables}

    def wait_for(self, job: str, directory: Path, seconds: float = 40.0) -> None:
        """Wait until a batch job is over."""
        deadline = time.monotonic() + seconds
        while self.run("squeue", "-h", "-j", job, directory=directory).stdout.strip():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.place.glob("*.log")))


def why_impossible() -> str:
    """Return what keeps this machine from running Slurm; nothing when it can."""
    missing = [tool for tool in ("munged", "slurmctld", "slurmd", "srun", "unshare") if _find(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install slurm-wlm munge util-linux)"
    if os.geteuid() != 0:
        return "slurmd starts tasks as root only"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no mount namespaces here: {tried.stderr.strip()}"


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Start the daemons, yield the cluster when both nodes are idle, and end all of them."""
    # A short path: the name of a socket has at most 107 letters.
    place = Path(tempfile.mkdtemp(prefix="slurm-"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        cluster = _prepare(place)
        daemons.append(_start(cluster, "munge", *_munged(place)))
        _until((place / "munge.socket").exists, cluster)
        daemons.append(_start(cluster, "control", _path("slurmctld"), "-D", "-f", f"{place}/slurm.conf"))
        daemons += [
            _start(
                cluster, f"node{number}", _path("slurmd"), "-D", "-N", f"node{number}", "-f", f"{place}/slurm.conf"
            )
            for number in range(1, NODES + 1)
        ]
        _until(lambda: _idle_nodes(cluster) == NODES, cluster)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(5)
        _end_steps(place)
        shutil.rmtree(place, ignore_errors=True)


def _prepare(place: Path) -> Cluster:
    (place / "state").mkdir()
    key = place / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    hosts = Path("/etc/hosts").read_text()
    (place / "hosts").write_text(f"{hosts}\n127.0.0.1 node1 node2\n")
    control, first, second = _free_ports(3)
    host = socket.gethostname().split(".")[0]
    text = _CONFIGURATION.format(
        place=place, host=host, control=control, first=first, second=second, processors=PROCESSORS
    )
    (place / "slurm.conf").write_text(text)
    return Cluster(place)


def _munged(place: Path) -> list[str]:
    return [
        _path("munged"), "--foreground", "--force", f"--key-file={place}/munge.key",
        f"--socket={place}/munge.socket", f"--pid-file={place}/munge.pid", f"--log-file={place}/munge.log",
        f"--seed-file={place}/munge.seed",
    ]  # fmt: skip


def _start(cluster: Cluster, name: str, *words: str) -> subprocess.Popen[bytes]:
    with (cluster.place / f"{name}.out.log").open("wb") as log:
        return subprocess.Popen(
            cluster.inside(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=cluster.environment(),
            start_new_session=True,
        )  # fmt: skip


def _idle_nodes(cluster: Cluster) -> int:
    told = cluster.run("sinfo", "-h", "-N", "-o", "%T", directory=cluster.place, timeout=20).stdout.split()
    return told.count("idle")


def _until(ready: object, cluster: Cluster) -> None:
    assert callable(ready), "asked again and again"
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        assert time.monotonic() < deadline, f"Slurm did not start: {cluster.logs()}"
        time.sleep(0.1)


def _end_steps(place: Path) -> None:
    """End what daemons left: a slurmstepd outlives its slurmd on purpose."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            name = (entry / "comm").read_text().strip()
            if name == "slurmstepd" and str(place).encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _path(tool: str) -> str:
    found = _find(tool)
    assert found is not None, f"{tool} was found before"
    return found
