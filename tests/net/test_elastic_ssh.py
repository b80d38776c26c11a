"""Elastic jobs over real ssh: hosts come, are cut off, come back and are never there; no commit is lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.net.cluster import FARANDOLE, Cluster, cluster, why_impossible
from tests.net.test_ssh_faults import FAULTS, kill_ssh, sessions, thaw, wait_for
from tests.ranks.test_elastic import COUNTS, says
from tests.ranks.test_launch import gone_within, script

pytestmark = [pytest.mark.net, pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")]

# The same exact counting as on one machine, and a file for each worker that says where it runs. It ends when
# the file "enough" is there and what is counted is a multiple of five: with a commit.
WHERE = """
import socket
with open(f"pid.{socket.gethostname()}.{os.environ['FARANDOLE_ELASTIC_WORKER']}", "w") as file:
    file.write(str(os.getpid()))
"""
TRAIN = COUNTS.replace(
    "while state.batch < last:",
    'while state.batch < last and not (state.batch % 5 == 0 and os.path.exists("enough")):',
).replace("hvd.init()\n", f"{WHERE}hvd.init()\n")

# A worker that says what it is told, and imports no torch: it is ready again whenever ranks change.
PAPER = f"""
import os, queue, sys
from farandole.core.env import read_elastic_settings
from farandole.train.elastic import ControlConnection
{WHERE}
me = read_elastic_settings()
heard = queue.Queue()
line = ControlConnection(me, heard.put)
enough = False
line.send({{"type": "ready", "progress": 0, "address": "127.0.0.1", "port": 1}})
while True:
    try:
        frame = heard.get(timeout=0.05)
    except queue.Empty:
        if os.path.exists("enough"):
            os._exit(0)
        continue
    if frame is None:
        os._exit(9)
    if frame["type"] == "assignment":
        told = frame["environment"]
        print("begin", frame["generation"], told["RANK"], told["WORLD_SIZE"], flush=True)
    if frame["type"] == "removed":
        with open(os.path.join(os.environ["FARANDOLE_RUN_DIR"], f"left-by-{{me.worker}}"), "w") as file:
            file.write("x" * 600_000)
        raise RuntimeError(frame["why"])
    if frame["type"] in ("leave", "hosts_updated"):
        line.send({{"type": "ready", "progress": 0, "address": "127.0.0.1", "port": 1}})
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("ssh"), 3) as made:
        yield made


class Job:
    """An elastic job whose hosts are the lines of a file."""

    def __init__(self, hosts: Cluster, directory: Path, lines: str, *options: str, text: str = PAPER) -> None:
        self.hosts, self.directory = hosts, directory
        self.find(lines)
        finder = directory / "find"
        finder.write_text(f"#!/bin/sh\ncat {directory / 'hosts'}\n")
        finder.chmod(0o755)
        words = [
            *FARANDOLE, "run", "--quiet", "--min-np", "1", "--host-discovery-script", str(finder), *options,
            *hosts.options, "--", sys.executable, "-u", script(directory, text), "100000",
        ]  # fmt: skip
        self.process = hosts.popen(words, cwd=directory)
        self.out: list[str] = []
        self.err: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=lines.extend, args=(pipe,))
            for pipe, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def find(self, lines: str) -> None:
        """Have other hosts found."""
        aside = self.directory / "hosts.new"
        aside.write_text("".join(f"{line}\n" for line in lines.split()))
        aside.rename(self.directory / "hosts")

    def until(self, pattern: str, seconds: float = 50) -> str:
        """Wait until a line of what was printed matches; return it."""
        deadline = time.monotonic() + seconds
        while True:
            found = next((line for line in (*self.out, *self.err) if re.search(pattern, line)), None)
            if found is not None:
                return found
            assert self.process.poll() is None, f"it ended before {pattern!r}: {''.join(self.err)}"
            assert time.monotonic() < deadline, f"no {pattern!r}: {''.join(self.out[-10:])}{''.join(self.err)}"
            time.sleep(0.02)

    def until_commits(self, count: int) -> None:
        """Wait for so many more commits."""
        wanted = self.commits + count
        wait_for(lambda: self.commits >= wanted, 30, f"commits: {''.join(self.out[-5:])}{''.join(self.err)}")

    @property
    def commits(self) -> int:
        return sum("] commit " in line for line in list(self.out))

    def pids(self, host: str = "*") -> list[int]:
        """Return the processes that worked on a host."""
        texts = [path.read_text() for path in self.directory.glob(f"pid.{host}.*")]
        return [int(text) for text in texts if text]

    def end(self, number: int | None = None) -> int:
        """Let it end, or signal it; return its exit code."""
        if number is None:
            (self.directory / "enough").touch()
        else:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.finish_reading()
        return code

    def finish_reading(self) -> None:
        """The job has ended: read the rest of what it said."""
        for reader in self._readers:
            reader.join(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.finish_reading()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def check_state(self) -> None:
        """Every generation began with a commit, bit for bit, and each commit is what one process would have."""
        out = "".join(self.out)
        commits: dict[str, set[str]] = {}
        for batch, digest in says(out, "commit"):
            commits.setdefault(batch, set()).add(digest)
        assert all(len(digests) == 1 for digests in commits.values()), "ranks and generations agree"
        begun = [(words[3], words[4]) for words in says(out, "begin") if words[0] != "1"]
        assert begun
        for batch, digest in begun:
            assert digest in commits.get(batch, {digest} if batch == "0" else set()), f"begun at {batch}"


@pytest.fixture
def start(hosts: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs by this; they are ended however the test ends, and have left nothing."""
    made: list[Job] = []

    def make(lines: str, *options: str, text: str = PAPER) -> Job:
        made.append(Job(hosts, tmp_path, lines, *options, text=text))
        return made[-1]

    yield make
    for job in made:
        job.close()
    for host in range(3):
        hosts.network.restore(host)
    thaw(hosts)
    wait_for(lambda: not sessions(hosts), 5, f"left: {sessions(hosts)}")
    assert gone_within([pid for job in made for pid in job.pids()], 3)


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
def test_a_host_is_found_one_is_cut_off_and_nothing_committed_is_lost(
    start: Callable[..., Job], hosts: Cluster
) -> None:
    job = start("host0:1 host1:1", text=TRAIN)
    job.until(r"begin 1 1 2 ", 100)
    job.until_commits(2)
    job.find("host0:1 host1:1 host2:1")
    job.until(r"begin 2 2 3 ", 100)
    job.until_commits(3)
    hosts.network.cut(1)
    job.until(r"farandole: host host1 is lost: no sign of life for 4 s.*no new workers there$")
    assert gone_within(job.pids("host1"), 3), "a host that is cut off stops by itself"
    job.until(r"begin 3 1 2 ", 30)
    job.until_commits(3)
    assert job.end() == 0, "".join(job.err)
    assert "generation 3: 2 ranks: workers 0 on host0, 2 on host2" in "".join(job.err)
    (run,) = (job.directory / "runs").iterdir()
    assert "begin 2 2 3" in (run / "logs" / "rank_2.log").read_text()
    job.check_state()


@pytest.mark.full("further")
@pytest.mark.parametrize("fault", ["link cut", "supervisor killed"])
def test_a_host_that_is_lost_is_left_out(start: Callable[..., Job], hosts: Cluster, fault: str) -> None:
    job = start("host0:1 host1:2 host2:1")
    job.until(r"begin 1 3 4$")
    begin = time.monotonic()
    act = FAULTS[fault].outside
    assert act is not None
    act(hosts, job.process)
    job.until(r"begin 2 1 2$")
    assert time.monotonic() - begin < 10
    said = job.until(r"farandole: host host1 is lost: ")
    assert re.search(FAULTS[fault].says.split(": ", 2)[2].partition(".*")[0], said), said
    assert "generation 2: 2 ranks: workers 0 on host0, 3 on host2" in "".join(job.err)
    assert gone_within(job.pids("host1"), 3)
    assert job.end() == 0, "".join(job.err)


@pytest.mark.full("slow")
def test_a_host_comes_back_after_its_cooldown(start: Callable[..., Job], hosts: Cluster) -> None:
    job = start("host1:1 host2:2", "--blacklist-cooldown-range", "1", "3")
    job.until(r"begin 1 2 3$")
    for session in sessions_of(hosts, 2):
        session.kill()
    said = job.until(r"farandole: host host2 is lost: ")
    assert re.search(r"no new workers there for [23]\.\d s", said), "one failure, though two workers were there"
    job.until(r"begin 2 0 1$")
    job.until(r"begin [2-9] 2 3$")
    assert job.end() == 0, "".join(job.err)
    assert len(job.pids("host2")) == 4


def sessions_of(hosts: Cluster, host: int) -> list[psutil.Process]:
    """Return what keeps the connections to a host."""
    below = psutil.Process(hosts.servers[host].pid).children(recursive=True)
    return [each for each in below if each.name().startswith("sshd")]


@pytest.mark.full("further")
def test_a_host_that_cannot_be_reached_does_not_end_the_job(start: Callable[..., Job]) -> None:
    job = start("host0:1 no-such-host:2 host1:1")
    said = job.until(r"farandole: host no-such-host is lost: its name is not known here")
    assert said.rstrip().endswith("no new workers there")
    job.until(r"begin 1 1 2$")
    assert job.end() == 0, "".join(job.err)
    assert "".join(job.err).count("no-such-host is lost") == 1


def test_when_no_host_can_be_reached_the_job_says_so(hosts: Cluster, tmp_path: Path) -> None:
    result = hosts.run(
        "run", "--min-np", "1", "-H", "no-such-host:1,nor-this:1", *hosts.options, "--",
        sys.executable, script(tmp_path, PAPER), cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "farandole: workers failed on every host: no-such-host (1 failed), nor-this (1 failed)" in result.stderr
    # Both names are looked up at once; the first answer is the cause.
    assert re.search(r"farandole: host (no-such-host|nor-this) failed: its name is not known here", result.stderr)
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("runs/*/.token"))


@pytest.mark.full("further")
def test_the_reset_limit_ends_the_job_on_all_hosts(start: Callable[..., Job], hosts: Cluster) -> None:
    job = start("host0:1 host1:1", "--reset-limit", "0")
    job.until(r"begin 1 1 2$")
    kill_ssh(hosts, job.process)
    assert job.process.wait(20) == 1
    job.finish_reading()
    assert "number of resets during elastic job exceeded limit: 0" in "".join(job.err)
    assert "farandole: host host1 failed: its ssh was killed by signal 9" in "".join(job.err)
    assert gone_within(job.pids(), 3)


@pytest.mark.gate_cases("9--9")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_to_the_launcher_leaves_nothing_anywhere(
    start: Callable[..., Job], hosts: Cluster, number: int, code: int
) -> None:
    job = start("host0:1 host1:2")
    job.until(r"begin 1 2 3$")
    pids = job.pids()
    assert len(pids) == 3
    assert job.end(number) == code
    assert gone_within(pids, 3)
    wait_for(lambda: not sessions(hosts), 3, f"left: {sessions(hosts)}")


@pytest.mark.full("further")
def test_files_of_a_host_that_leaves_are_brought_here(
    start: Callable[..., Job], hosts: Cluster, tmp_path: Path
) -> None:
    """host1 has a disk of its own in the place of the run directory, and is taken from the list."""
    shared = tmp_path / "runs"
    shared.mkdir()
    door = f"--mount=/proc/{hosts.network.hosts[1].keeper}/ns/mnt"
    subprocess.run(["nsenter", door, "mount", "-t", "tmpfs", "none", str(shared)], check=True)
    before = set(Path("/tmp").glob("farandole-run-*"))
    try:
        job = start("host0:1 host1:1")
        job.until(r"begin 1 1 2$")
        job.find("host0:1")
        job.until(r"begin 2 0 1$")
        job.until(r"worker 1 has left host1")
        wait_for(lambda: not sessions_of(hosts, 1), 10, "the connection to a host that left is closed")
        assert job.end() == 0, "".join(job.err)
    finally:
        subprocess.run(["nsenter", door, "umount", "-l", str(shared)], check=True)
    (run,) = shared.iterdir()
    assert "host1[1] has been removed from elastic job" in (run / "logs" / "rank_1.log").read_text()
    assert (run / "left-by-1").stat().st_size == 600_000
    assert not set(Path("/tmp").glob("farandole-run-*")) - before
