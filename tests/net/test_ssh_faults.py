"""What goes wrong on a job over real ssh: named correctly, everything gone on every host, within 3 seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.net.cluster import FARANDOLE, Cluster, cluster, why_impossible
from tests.ranks.test_launch import alive, gone_within, script

pytestmark = [pytest.mark.net, pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")]

STOP_SECONDS = 3.0
SILENT_SECONDS = 2.0
"""More, where the only sign of a fault is that there is no sign of life."""
CULPRIT = 1
"""On host1, with rank 2; ranks 0 and 3 are on host0 and host2."""

# Every rank has a child, as one with a loader has. Ranks talk in a star about rank 0: who loses a peer says so.
JOB = """
import os, pathlib, socket, subprocess, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
phase, fault = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])

def here(now):
    if now != phase:
        return
    aside = pathlib.Path(f".pids.{rank}")
    aside.write_text(f"{os.getpid()} {child.pid}")
    aside.rename(f"pids.{rank}")
    if rank != 1 or fault == "from outside":
        return time.sleep(600) if now != "training" else None
    while len(list(pathlib.Path().glob("pids.*"))) < size:
        time.sleep(0.01)
    pathlib.Path("fault").write_text(repr(time.monotonic()))
    exec(fault)

here("start-up")
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(address) as server:
        peers = [server.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(address, 5)]
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
for peer in peers:
    peer.settimeout(None)
if phase == "training":
    here("training")
    while True:
        for peer in peers:
            peer.sendall(b"x")
            if not peer.recv(1):
                raise ConnectionError("Connection closed by peer")
        time.sleep(0.01)
here("shut-down")
child.kill()
"""


@dataclass(frozen=True)
class Fault:
    """What is done, and what the launcher says of it."""

    says: str
    """Pattern of the first line of the report; empty: the launcher is in no state to say anything."""
    code: int
    inside: str = "from outside"
    """What the culprit does itself."""
    outside: Callable[[Cluster, subprocess.Popen[str]], None] | None = None


def agents(cluster: Cluster, host: int) -> list[psutil.Process]:
    """Return the supervisor of a host: what its sshd started, not the reaper."""
    below = psutil.Process(cluster.servers[host].pid).children(recursive=True)
    return [process for process in below if process.cmdline()[1:3] == ["-I", "-S"] and is_first(process)]


def is_first(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is None or parent.cmdline() != process.cmdline()


def signal_agent(number: int) -> Callable[[Cluster, subprocess.Popen[str]], None]:
    def act(cluster: Cluster, _: subprocess.Popen[str]) -> None:
        (agent,) = agents(cluster, 1)
        agent.send_signal(number)

    return act


def words_of(process: psutil.Process) -> list[str]:
    """Return its command line; nothing of one that has just ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def kill_ssh(_: Cluster, launcher: subprocess.Popen[str]) -> None:
    found = [each for each in psutil.Process(launcher.pid).children() if "host1" in words_of(each)]
    assert [each.name() for each in found] == ["ssh"]
    found[0].kill()


def kill_sshd_session(cluster: Cluster, _: subprocess.Popen[str]) -> None:
    (agent,) = agents(cluster, 1)
    session = agent.parent()
    assert session is not None
    assert session.name().startswith("sshd")
    session.kill()


def freeze_host(cluster: Cluster, _: subprocess.Popen[str]) -> None:
    """All of the host's side of the connection stands still, but for the reaper."""
    (agent,) = agents(cluster, 1)
    session = agent.parent()
    assert session is not None
    agent.suspend()
    session.suspend()


def cut(cluster: Cluster, _: subprocess.Popen[str]) -> None:
    cluster.network.cut(1)


def signal_launcher(number: int) -> Callable[[Cluster, subprocess.Popen[str]], None]:
    return lambda _, launcher: launcher.send_signal(number)


LOST = r"farandole: host host1 failed: .*\(ranks 1, 2 ran there\)"
FAULTS = {
    "killed": Fault(r"farandole: rank 1 on host1 failed: killed by signal 9", 137, "os.kill(os.getpid(), 9)"),
    "segmentation fault": Fault(
        r"farandole: rank 1 on host1 failed: killed by signal 11", 139, "os.kill(os.getpid(), 11)"
    ),
    "exit 1": Fault(r"farandole: rank 1 on host1 failed: exit code 1$", 1, "os._exit(1)"),
    "exception": Fault(
        r"farandole: rank 1 on host1 failed: KeyError: 'culprit'$", 1, "raise KeyError('culprit')"
    ),
    "import error": Fault(
        r"farandole: rank 1 on host1 failed: ModuleNotFoundError: No module named 'no_such_module'$", 1,
        "import no_such_module",
    ),
    "rank frozen": Fault(
        r"farandole: rank 1 on host1 failed: stopped by a signal", 1, "os.kill(os.getpid(), 19)"
    ),
    "supervisor killed": Fault(LOST.replace(".*", "its supervisor was killed.*"), 1, outside=signal_agent(9)),
    "supervisor frozen": Fault(LOST.replace(".*", r"no sign of life for \d+ s.*"), 1, outside=signal_agent(19)),
    "host frozen": Fault(LOST.replace(".*", r"no sign of life for \d+ s.*"), 1, outside=freeze_host),
    "ssh killed": Fault(LOST.replace(".*", "its ssh was killed by signal 9.*"), 1, outside=kill_ssh),
    "sshd killed": Fault(LOST.replace(".*", "the connection was lost.*"), 1, outside=kill_sshd_session),
    "link cut": Fault(LOST.replace(".*", r"no sign of life for \d+ s.*"), 1, outside=cut),
    "launcher killed": Fault("", -9, outside=signal_launcher(9)),
    "launcher terminated": Fault("farandole: stopped all ranks on SIGTERM", 143, outside=signal_launcher(15)),
    "launcher interrupted": Fault("farandole: stopped all ranks on SIGINT", 130, outside=signal_launcher(2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("ssh"), 3) as made:
        yield made


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def pids_of(directory: Path) -> list[int]:
    return [int(pid) for file in directory.glob("pids.*") for pid in file.read_text().split()]


PHASES = ("start-up", "training", "shut-down")
ALL_CASES = [(name, phase) for name in FAULTS for phase in PHASES]
# All 45 take two minutes: ALL_FAULTS=1 runs them. Otherwise each fault once, the phases in turns.
CASES = (
    ALL_CASES if os.environ.get("ALL_FAULTS") == "1" else [(name, PHASES[i % 3]) for i, name in enumerate(FAULTS)]
)


@pytest.mark.gate_cases("sshd killed-training")
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_fault(hosts: Cluster, tmp_path: Path, name: str, phase: str) -> None:
    fault = FAULTS[name]
    command = [
        *FARANDOLE, "run", "-np", "4", "-H", "host0:1,host1:2,host2:1", "--no-bind", *hosts.options, "--",
        sys.executable, "-S", script(tmp_path, JOB), phase, fault.inside,
    ]  # fmt: skip
    limit = STOP_SECONDS + (SILENT_SECONDS if "no sign of life" in fault.says else 0.0)
    launcher = hosts.popen(command, cwd=tmp_path)
    try:
        wait_for(lambda: len(pids_of(tmp_path)) == 8, 20, "the ranks did not start")
        pids = pids_of(tmp_path)
        if fault.outside is not None:
            begin = time.monotonic()
            fault.outside(hosts, launcher)
        else:
            wait_for((tmp_path / "fault").exists, 5, "the fault did not happen")
            begin = time.monotonic()
        _, err = launcher.communicate(timeout=10)
        assert gone_within(pids, max(0.0, begin + limit - time.monotonic())), alive(pids)
        seconds = time.monotonic() - begin
    finally:
        if name == "link cut":
            hosts.network.restore(1)
        launcher.kill()
        launcher.communicate()
        thaw(hosts)
    assert seconds < (1.0 if name == "launcher killed" else limit)
    assert launcher.returncode == fault.code, err
    if fault.says:
        first = next(
            line
            for line in err.splitlines()
            if line.startswith("farandole: ") and not re.search("warning|waiting for", line)
        )
        assert re.match(fault.says, first), err
        assert "Traceback" not in err or "culprit" in err or "no_such_module" in err, err
    if fault.code == 1:
        (found,) = (tmp_path / "runs").glob("*/failure.json")
        failure = json.loads(found.read_text())
        assert (failure["host"], failure["rank"]) == ("host1", None if fault.outside else CULPRIT)
    wait_for(lambda: not sessions(hosts), 3, f"left: {sessions(hosts)}")


def thaw(hosts: Cluster) -> None:
    for session in sessions(hosts):
        with suppress(ProcessLookupError):
            os.kill(session.pid, signal.SIGCONT)


def sessions(hosts: Cluster) -> list[psutil.Process]:
    return [each for server in hosts.servers for each in psutil.Process(server.pid).children(recursive=True)]


# In its first generation a rank waits for the fault, in the next it is done.
AGAIN = """
import os, pathlib, time
rank, generation = os.environ["RANK"], os.environ["FARANDOLE_GENERATION"]
print("generation", generation, "of", os.environ["WORLD_SIZE"], os.environ["FARANDOLE_SECRET"], flush=True)
aside = pathlib.Path(f".pids.{rank}")
aside.write_text(str(os.getpid()))
aside.rename(f"pids.{rank}")
time.sleep(600 if generation == "0" else 0)
"""


@pytest.mark.gate_cases("ssh killed-2-2")
@pytest.mark.parametrize(
    ("name", "least", "then"),
    [("ssh killed", 2, 2), ("sshd killed", 4, 4), ("host frozen", 2, 2), ("link cut", 1, 2), ("link cut", 3, 0)],
)
def test_a_job_begins_again_without_a_host_that_is_lost_where_it_may(
    hosts: Cluster, tmp_path: Path, name: str, least: int, then: int
) -> None:
    """`then`: ranks of the second generation; 0: what is left is too little."""
    options = ["--restarts", "3", "--min-np", str(least), "--no-bind", "--quiet", "--run-dir", "r"]
    launcher = hosts.popen(
        [*FARANDOLE, "run", "-H", "host0:1,host1:2,host2:1", *options, *hosts.options, "--",
         sys.executable, "-S", script(tmp_path, AGAIN)],
        cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for(lambda: len(pids_of(tmp_path)) == 4, 20, "the ranks did not start")
        first = pids_of(tmp_path)
        act = FAULTS[name].outside
        assert act is not None
        act(hosts, launcher)
        out, err = launcher.communicate(timeout=40)
        assert gone_within(first, STOP_SECONDS), "a rank of the first generation is left"
    finally:
        if name == "link cut":
            hosts.network.restore(1)
        launcher.kill()
        launcher.communicate()
        thaw(hosts)
    secrets = dict(re.findall(r"generation (\d) of \d (\w+)", out))
    assert len(re.findall("generation 1 of", out)) == then, (out, err)
    if not then:
        assert launcher.returncode == 1
        assert "not started again: 2 slots are left, and the plan has no division for 3 (--min-np) to 2" in err
        return
    assert launcher.returncode == 0, err
    assert f"restart 1 of 3, {then} ranks" in err
    assert secrets["0"] != secrets["1"]
    facts = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (facts["size"], facts["restarts"][0]["host"]) == (then, "host1")
    wait_for(lambda: not sessions(hosts), 5, f"left: {sessions(hosts)}")


@pytest.mark.full("slow")
def test_a_network_that_is_away_for_two_seconds(hosts: Cluster, tmp_path: Path) -> None:
    text = 'import os, time\nopen(f"pids.{os.environ[\'RANK\']}", "w").write(str(os.getpid()))\n'
    text += 'for _ in range(70):\n    print("works", flush=True)\n    time.sleep(0.1)\n'
    launcher = hosts.popen(
        [*FARANDOLE, "run", "-np", "2", "-H", "host0:1,host1:1", *hosts.options, "--",
         sys.executable, "-S", script(tmp_path, text)],
        cwd=tmp_path,
    )  # fmt: skip
    try:
        wait_for(lambda: len(pids_of(tmp_path)) == 2, 20, "the ranks did not start")
        hosts.network.cut(1)
        time.sleep(2.0)
        hosts.network.restore(1)
        out, err = launcher.communicate(timeout=30)
    finally:
        hosts.network.restore(1)
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, err
    assert out.count("works") == 140


@pytest.mark.full("further")
def test_a_full_disk(hosts: Cluster, tmp_path: Path) -> None:
    """The run directory fills up under the launcher, which says so once; the job goes on to its end."""
    full = tmp_path / "full"
    full.mkdir()
    door = f"--mount=/proc/{hosts.network.hosts[0].keeper}/ns/mnt"
    subprocess.run(["nsenter", door, "mount", "-t", "tmpfs", "-o", "size=128k", "none", str(full)], check=True)
    text = 'import os, time\nopen(f"pids.{os.environ[\'RANK\']}", "w").write(str(os.getpid()))\n'
    text += 'for _ in range(100):\n    print("x" * 8000, flush=True)\ntime.sleep(0.5)\nprint("trained")\n'
    command = [
        "run", "-np", "2", "-H", "host0:1,host1:1", "--run-dir", str(full / "run"), *hosts.options, "--",
        sys.executable, "-S", script(tmp_path, text),
    ]  # fmt: skip
    try:
        result = hosts.run(*command, cwd=tmp_path)
    finally:
        subprocess.run(["nsenter", door, "umount", "-l", str(full)], check=True)
    assert result.returncode == 0, result.stderr
    assert sorted(line for line in result.stdout.splitlines() if "trained" in line) == [
        "[0] trained",
        "[1] trained",
    ]
    assert len(re.findall(r"/full/run/logs/rank_\d.log is written no more: No space left", result.stderr)) == 1
    assert "Traceback" not in result.stderr
    assert gone_within(pids_of(tmp_path), STOP_SECONDS)
