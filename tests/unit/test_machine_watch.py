"""The guard of the machine: tests that change it fail by name. The machine here is a directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine_watch import LEFT_BEHIND

REPOSITORY = Path(__file__).parents[2]

# The inner session has the hooks of tests/conftest.py, and watches a machine that is a directory.
CONFTEST = """
from pathlib import Path
from tests import machine_state, machine_watch
from tests.machine_state import Machine

place = Path(__file__).parent
machine_state.SETTLE_SECONDS = 0.02
machine_watch.this_machine = lambda: Machine(place / "root", place / "account")
from tests.conftest import *
from tests.conftest import _environment_is_left_as_it_was
"""

TESTS = """
import os, shutil, tempfile
from pathlib import Path
import pytest

place = Path(__file__).parent

def write(name, text):
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

@pytest.fixture(scope="module")
def noisy_module():
    yield
    write("root/proc/sys/net/core/somaxconn", "7")

def test_sysctl():
    write("root/proc/sys/net/ipv4/tcp_congestion_control", "cubic")

def test_innocent():
    # It finds what the one before left, and is not blamed for it.
    assert (place / "root/proc/sys/net/ipv4/tcp_congestion_control").read_text() == "cubic"

def test_puts_it_back():
    write("root/proc/sys/kernel/pid_max", "9")
    (place / "root/proc/sys/kernel/pid_max").unlink()

def test_etc_hosts():
    write("root/etc/hosts", "127.0.0.1 localhost node1")

def test_account():
    write("account/.ssh/known_hosts", "new")
    write("account/.cache/farandole/native/abc.so", "")

def test_home():
    write(os.path.expanduser("~/.torch/settings"), "")

def test_cache():
    write(os.environ["XDG_CACHE_HOME"] + "/other/file", "")

def test_interface():
    write("root/proc/net/dev", "Inter-\\n face\\n    lo: 1 2\\n farandole0: 0 0\\n")

def test_network_namespace():
    write("root/run/netns/left", "")

def test_shared_memory():
    write("root/dev/shm/farandole-piece", "")

def test_native_loops_go_into_the_cache_of_the_session():
    write(os.environ["XDG_CACHE_HOME"] + "/farandole/native/abc.so", "")

def test_leaves_a_directory():
    tempfile.mkdtemp(prefix="farandole-run-")

def test_with_a_module(noisy_module):
    pass
"""
GUILTY = {
    "test_sysctl": "root/proc/sys/net/ipv4/tcp_congestion_control: bbr -> cubic",
    "test_home": "home/.torch: absent -> drwx",
    "test_cache": "cache/other: absent -> drwx",
    "test_with_a_module": "root/proc/sys/net/core/somaxconn: absent -> 7",
}
TOLD = [
    "root/etc/hosts: -rw-",
    "account/.ssh/known_hosts: absent -> -rw",
    "account/.cache/farandole/native: absent -> drwx",
    "network interface farandole0: absent -> there",
    "root/run/netns/left: absent -> ",
    "root/dev/shm/farandole-piece: absent -> there",
]
"""What another program may have done: no test is blamed for it."""


def run_pytest(directory: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests below the guard; a machine is made for them first."""
    for name, text in {
        "root/proc/sys/net/ipv4/tcp_congestion_control": "bbr",
        "root/proc/net/dev": "Inter-\n face\n    lo: 1 2\n",
        "root/etc/hosts": "127.0.0.1 localhost",
        "account/.bashrc": "",
        "conftest.py": CONFTEST,
        "test_inner.py": tests,
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    not_a_worker = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(directory), "-v"]
    return subprocess.run(
        [sys.executable, *words, str(directory)], cwd=directory, capture_output=True, text=True, check=False,
        env={**not_a_worker, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def test_a_test_that_changes_the_machine_fails_by_name(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, TESTS)
    assert done.returncode == LEFT_BEHIND, (
        "a directory, which its red tests do not hide" + done.stdout + done.stderr
    )
    summary = done.stdout.partition("short test summary info")[2]
    blamed = {line.split("::")[1].split()[0] for line in summary.splitlines() if line.startswith("ERROR")}
    assert blamed == set(GUILTY), done.stdout
    for what in GUILTY.values():
        assert what in done.stdout, what
    told = [line for line in done.stdout.splitlines() if line.startswith("changed on this machine meanwhile")]
    for what in TOLD:
        assert any(what in line for line in told), what
    left = {line.rpartition("::")[2]: line for line in done.stdout.splitlines() if line.startswith("left behind")}
    assert set(left) == {"test_leaves_a_directory"}
    assert "farandole-run-" in left["test_leaves_a_directory"]
    assert not list(Path(os.environ["TMPDIR"]).glob("fd-tests-*")), "the inner session's places are gone"


def test_what_is_left_fails_a_session_whose_tests_pass(tmp_path: Path) -> None:
    leaves = TESTS[: TESTS.index("@pytest.fixture")] + TESTS[TESTS.index("def test_leaves_a_directory") :]
    done = run_pytest(tmp_path, leaves.partition("def test_with_a_module")[0])
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == LEFT_BEHIND, done.stdout


def test_what_other_programs_do_meanwhile_is_told_and_no_failure(tmp_path: Path) -> None:
    others = TESTS[: TESTS.index("@pytest.fixture")] + TESTS[TESTS.index("def test_etc_hosts") :]
    done = run_pytest(tmp_path, others.partition("def test_home")[0])
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "changed on this machine meanwhile" in done.stdout


def test_our_places_are_not_the_users() -> None:
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        assert "fd-tests-" in os.environ[name], name
