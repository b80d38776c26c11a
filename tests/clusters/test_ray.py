"""The same script as actors of a real cluster of Ray on this machine."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from .scripts import TOLD, printed, write

START_SECONDS = 120.0
"""Ray starts half a dozen processes of its own; on a busy machine a driver alone has taken a minute."""

pytestmark = [pytest.mark.timeout(3 * START_SECONDS), pytest.mark.full("slow")]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    pytest.importorskip("ray", reason="needs pip install ray")
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        variables = {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_USAGE_STATS_ENABLED": "0",
                     "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # fmt: skip
        probe.close()
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
             "--include-dashboard=false", "--num-cpus=4", f"--temp-dir={place}",
             "--object-store-memory=100000000"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**variables, "RAY_ADDRESS": ""},
        )  # fmt: skip
        try:
            wait_for_port(port, head)
            yield variables
        finally:
            for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
                with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    process.kill()
            head.wait(10)


def wait_for_port(port: int, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and head.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    head.kill()
    raise AssertionError("Ray did not start")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "farandole", "run", "--on", "ray", *words]


def run(directory: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )


def test_actors_start_the_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, environment, "-np", "2", "--run-dir", "kept", "--", "python", write(tmp_path, TOLD))
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]
    assert (tmp_path / "kept" / "logs" / "rank_1.log").read_text().startswith("[1, 2")


def test_a_failure_names_the_rank_and_stops_the_others(environment: dict[str, str], tmp_path: Path) -> None:
    text = """
import os, sys, time
print("up", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    sys.exit(7)
time.sleep(600)
"""
    done = run(tmp_path, environment, "-np", "3", "--", "python", write(tmp_path, text))
    assert done.returncode == 7, done.stderr
    assert re.search(r"farandole: rank 1 on [0-9.]+ failed: exit code 7", done.stderr), done.stderr
    assert "stopped ranks 0 and 2 after" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] up", "[1] up", "[2] up"]


def test_the_search_with_ray_tune(environment: dict[str, str], tmp_path: Path) -> None:
    """Trials are jobs that workers of Ray start, two side by side."""
    pytest.importorskip("ray.tune", reason="needs pip install 'ray[tune]'")
    script = Path(__file__).resolve().parents[2] / "examples" / "ray_tune_search.py"
    line = [sys.executable, str(script), "--trials", "2", "--seconds", "0.4", "--storage", str(tmp_path)]
    done = subprocess.run(
        line, cwd=tmp_path, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=START_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 trials, \d stopped early, 0 failed", done.stdout), done.stdout
    assert re.search(r"best: batch \d+ a rank, lr \S+, loss \d+\.\d+", done.stdout), done.stdout
    runs = list(tmp_path.glob("batch-size/*/run/metrics.jsonl"))
    assert len(runs) == 2, f"each trial is a run: {runs}"


def test_too_many_ranks_are_refused(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, environment, "-np", "64", "--", "python", write(tmp_path, "print(1)"))
    assert done.returncode == 2
    assert "64 ranks need 64 CPU, and this cluster of Ray has 4" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_end_of_the_driver_ends_all(
    environment: dict[str, str], tmp_path: Path, number: int, code: int
) -> None:
    text = "import os, time\nopen('pid.' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    driver = subprocess.Popen(
        command("-np", "2", "--", "python", write(tmp_path, text)), cwd=tmp_path, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: len([file for file in tmp_path.glob("pid.*") if file.read_text()]) == 2, START_SECONDS)
        pids = [int(file.read_text()) for file in tmp_path.glob("pid.*")]
        driver.send_signal(number)
        _, err = driver.communicate(timeout=60)
        assert driver.returncode == code, err
        assert "Traceback" not in err
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 60)
    finally:
        driver.kill()
        driver.wait()


def until(ready: object, seconds: float) -> None:
    assert callable(ready), "asked again and again"
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
