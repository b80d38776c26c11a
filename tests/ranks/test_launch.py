"""`farandole run` with real processes: who fails first, who is stopped, and what is left (nothing)."""

from __future__ import annotations

import json
import os
import pty
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.ranks.pool import patient

FARANDOLE = [sys.executable, "-m", "farandole"]

# Every rank starts a child of its own, as a loader with workers does, and writes down both.
WAITS = """
import os, subprocess, sys, time
up = "import time; print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", up], stdout=subprocess.PIPE)
child.stdout.readline()  # an interrupt while Python starts prints what no report can hold back
open(f"pids.{os.environ['RANK']}", "w").write(f"{os.getpid()} {child.pid}")
print("up", flush=True)
time.sleep(600)
"""


def script(directory: Path, text: str, name: str = "script.py") -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def run(
    directory: Path, *words: str, timeout: float = 40, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FARANDOLE, *words], cwd=directory, capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip


def start_waiting(
    directory: Path, size: int = 2, before: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [*before, *FARANDOLE, "run", "-np", str(size), "--", sys.executable, script(directory, WAITS)],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        files = list(directory.glob("pids.*"))
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        if len(pids) == 2 * size:
            return process, pids
        time.sleep(0.02)
    process.kill()
    raise AssertionError("the ranks did not start")


def alive(pids: list[int]) -> list[int]:
    """Return those that run; one that waits to be reaped by its new parent does not."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_each_rank_is_told_its_place_and_gets_its_cores(tmp_path: Path) -> None:
    text = (
        "import os, json, sys;"
        "keys = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'HOROVOD_RANK', 'FARANDOLE_SIZE', 'OMP_NUM_THREADS'];"
        "print(json.dumps([*(os.environ[k] for k in keys), sorted(os.sched_getaffinity(0)), sys.argv[1:]]))"
    )
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, text), "--lr", "0.1")
    assert result.returncode == 0, result.stderr
    lines = dict(line.split("] ", 1) for line in result.stdout.splitlines())
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    for rank in (0, 1):
        *told, mine, words = json.loads(lines[f"[{rank}"])
        assert told == [str(rank), "2", str(rank), str(rank), "2", str(max(1, half))]
        assert words == ["--lr", "0.1"]
        assert mine == (cores[rank * half : (rank + 1) * half] if half else cores)
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 1
    assert (runs[0] / "logs" / "rank_1.log").read_text().startswith('["1"')


@pytest.mark.full("further")
def test_the_first_failure_is_printed_first_and_the_others_are_stopped(tmp_path: Path) -> None:
    text = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    print("about to fail", file=sys.stderr)
    raise KeyError("the culprit")
time.sleep(600)
"""
    begin = time.monotonic()
    result = run(tmp_path, "run", "-np", "3", "--no-bind", "--", sys.executable, script(tmp_path, text))
    assert time.monotonic() - begin < 10
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert lines[0] == "[1] about to fail"
    assert lines[1].startswith("farandole: rank 1 on ")
    assert lines[1].endswith("failed: KeyError: 'the culprit'")
    assert lines[2] == "  Traceback (most recent call last):"
    assert result.stderr.count("the culprit") == 3, "said in the headline, and in the traceback's two lines"
    stopped = next(line for line in lines if "stopped ranks 0 and 2 after" in line)
    assert float(stopped.split()[-2]) < 1.5
    failure = json.loads(next((tmp_path / "runs").glob("*/failure.json")).read_text())
    assert (failure["rank"], failure["stopped"], failure["exit_code"]) == (1, [0, 2], 1)


@pytest.mark.gate_cases("sys.exit('in words')-1-exit code 1")
@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by signal 9 (SIGKILL)"),
        ("os.abort()", 134, "killed by signal 6 (SIGABRT)"),
        ("sys.exit('in words')", 1, "exit code 1"),
    ],
)
def test_the_exit_code_is_the_culprits(tmp_path: Path, statement: str, code: int, words: str) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '0':\n    {statement}\ntime.sleep(600)\n"
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, text))
    assert result.returncode == code
    assert words in result.stderr
    assert "stopped rank 1 after" in result.stderr


@pytest.mark.full("further")
def test_a_rank_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    text = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "0":
    time.sleep(0.5)
    sys.exit(3)
time.sleep(600)
"""
    begin = time.monotonic()
    result = run(tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, text))
    assert result.returncode == 3
    assert time.monotonic() - begin < 8


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    process, pids = start_waiting(tmp_path)
    process.kill()
    process.communicate(timeout=10)
    assert gone_within(pids, 2.0), f"still there: {alive(pids)}"


@pytest.mark.gate_cases("1-129")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_to_the_launcher_end_everything(tmp_path: Path, number: int, code: int) -> None:
    process, pids = start_waiting(tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert gone_within(pids, 1.0), f"still there: {alive(pids)}"
    assert "Traceback" not in err
    assert f"stopped all ranks on {signal.Signals(number).name}" in err


@pytest.mark.full("further")
def test_one_started_with_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    process, pids = start_waiting(tmp_path, before=["nohup"])
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    assert alive(pids) == pids
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert gone_within(pids, 1.0)


@pytest.mark.full("further")
def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    deaf = "import signal\nfor n in (2, 15):\n    signal.signal(n, signal.SIG_IGN)\n" + WAITS
    script(tmp_path, deaf, "deaf.py")
    process = subprocess.Popen(
        [*FARANDOLE, "run", "-np", "2", "--", sys.executable, "deaf.py"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    while len(list(tmp_path.glob("pids.*"))) < 2:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline()
    assert said.startswith("farandole: SIGINT: waiting for the ranks to end, at most 3.5 s; once more"), said
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130
    assert time.monotonic() - begin < 2


@pytest.mark.full("busy")
@pytest.mark.alone  # it looks at the ports of the whole machine
def test_many_starts_leave_no_process_port_or_shared_memory(tmp_path: Path) -> None:
    def listening() -> list[int]:
        """Return the ports of processes that were started here: others of this machine open some of their own."""
        found = []
        for connection in psutil.net_connections("tcp"):
            with suppress(psutil.Error):
                started_here = connection.pid and psutil.Process(connection.pid).cwd() == str(tmp_path)
                found += [connection.laddr.port] * (connection.status == "LISTEN" and bool(started_here))
        return found

    shared = set(os.listdir("/dev/shm"))  # noqa: PTH208
    name = script(tmp_path, "print(1)", "unmistakable_name.py")
    for _ in range(5):
        assert run(tmp_path, "run", "-np", "2", "--quiet", "--", sys.executable, name).returncode == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if name in (p.info["cmdline"] or [])]
    assert not listening()
    left, deadline = set(os.listdir("/dev/shm")) - shared, time.monotonic() + 10  # noqa: PTH208
    while left:  # what others have there for a while goes with them
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))  # noqa: PTH208


@pytest.mark.full("further")
@patient
def test_scripts_of_torch_distributed_run_unchanged(tmp_path: Path) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print("sum", int(x), flush=True)
dist.destroy_process_group()
"""
    result = warm.run(tmp_path, "run", "-np", "2", "--", sys.executable, script(tmp_path, text))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] sum 3", "[1] sum 3"]


@pytest.mark.full("further")
def test_colours_and_the_progress_line_on_a_terminal(tmp_path: Path) -> None:
    text = """
import json, os, time
row = {"kind": "step", "step": 7, "seconds": 0.1, "loss": 1.5, "samples_per_second": 10.0}
with open(os.environ["FARANDOLE_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    file.write(json.dumps(row) + "\\n")
time.sleep(2.5)
print("after", flush=True)
"""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*FARANDOLE, "run", "-np", "1", "--", sys.executable, script(tmp_path, text)],
        cwd=tmp_path, stdout=follower, stderr=follower,
        env={name: value for name, value in os.environ.items() if name != "NO_COLOR"},
    )  # fmt: skip
    os.close(follower)
    seen = b""
    try:
        while piece := os.read(leader, 4096):
            seen += piece
    except OSError:
        pass  # the end of a terminal
    os.close(leader)
    assert process.wait(timeout=10) == 0
    assert b"step 7  loss 1.5  10 samples/s" in seen
    assert b"\r\x1b[K" in seen, "the line is taken away again"
    assert b"\x1b[36m[0] \x1b[0mafter" in seen


@pytest.mark.full("further")
def test_output_nobody_reads_does_not_break_the_job(tmp_path: Path) -> None:
    text = "import sys\nfor i in range(20000):\n    print('x' * 50)\nopen('done', 'w').write('yes')\n"
    name = script(tmp_path, text)
    command = shlex.join([*FARANDOLE, "run", "-np", "1", "--", sys.executable, name]) + " | head -n 1"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=30, capture_output=True)
    deadline = time.monotonic() + 10
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline, "the rank was stopped by a reader that left"
        time.sleep(0.05)


@pytest.mark.full("further")
def test_a_dry_run_prints_the_environment_that_really_runs(tmp_path: Path) -> None:
    text = "import json, os; print(json.dumps(dict(os.environ)))"
    words = ["-np", "2", "--run-dir", "run", "--set", "accumulate=2", "--", sys.executable, "-S"]
    words.append(script(tmp_path, text))
    planned = json.loads(run(tmp_path, "run", "--dry-run", "--json", *words).stdout)["ranks"]
    done = run(tmp_path, "run", "--quiet", *words)
    assert done.returncode == 0, done.stderr
    unknown = {"FARANDOLE_PORT", "MASTER_PORT"}
    for rank in planned:
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"[{rank['rank']}] "))
        real, told = json.loads(line.partition(" ")[2]), rank["environment"]
        assert {name: real[name] for name in told if name not in unknown} == {
            name: value for name, value in told.items() if name not in unknown
        }
        ours = {
            name for name in real if name.startswith(("FARANDOLE_", "HOROVOD_", "MASTER_"))
        } - os.environ.keys()
        assert ours - told.keys() - os.environ.keys() == {"FARANDOLE_SECRET"}


OPEN_FILES = """
import resource, farandole as fd
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print("started with", soft)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
fd.init()
print("joined with", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.full("slow")
def test_a_job_may_have_as_many_files_open_as_it_is_allowed(tmp_path: Path) -> None:
    """The usual 1,024 are few where strangers call the ranks' listeners."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    file = script(tmp_path, OPEN_FILES)
    words = " ".join([*FARANDOLE, "run", "-np", "1", "--", sys.executable, file])
    done = subprocess.run(
        ["sh", "-c", f"ulimit -Sn 256; exec {words}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"started with {most}\n" in done.stdout
    assert f"joined with {most}\n" in done.stdout
