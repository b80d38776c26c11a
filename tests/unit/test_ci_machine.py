"""What `.ci/machine` says, here and where almost no command is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FACTS = {
    "date", "kernel", "distribution", "user", "processor", "cores", "load", "memory", "memory-limit",
    "shared-memory", "disk", "congestion-control", "congestion-control-allowed", "congestion-control-available",
    "ipv6", "user-namespaces", "network-namespace", "ptrace-scope", "core-pattern", "python", "git", "make",
    "compiler", "ip", "tc", "nsenter", "ssh", "sshd", "slurm", "munge", "mpirun", "chromium",
    "dataset-fashion-mnist",
}  # fmt: skip
NEEDED = [
    "awk", "bash", "cat", "cut", "date", "df", "head", "id", "nproc", "sed", "sort", "tail", "tr", "uname",
    "unshare",
]  # fmt: skip


def facts(**environment: str) -> dict[str, str]:
    """Return what the script says in an environment of these variables alone."""
    done = subprocess.run(
        ["bash", str(REPOSITORY / ".ci/machine")], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stderr == ""
    lines = [line.removeprefix("machine: ").split(maxsplit=1) for line in done.stdout.splitlines()]
    return {name: value for name, value in lines}  # noqa: C416 - two words each, or it fails


def test_it_says_what_tcp_may_use_and_which_tools_are_there() -> None:
    said = facts(PATH="/usr/local/bin:/usr/bin:/bin")
    assert set(said) == FACTS
    tcp = Path("/proc/sys/net/ipv4")
    for fact, file in (
        ("congestion-control", "tcp_congestion_control"),
        ("congestion-control-allowed", "tcp_allowed_congestion_control"),
        ("congestion-control-available", "tcp_available_congestion_control"),
    ):
        assert said[fact] == ((tcp / file).read_text().strip() if (tcp / file).exists() else "none")
    assert said["git"] == "missing" or said["git"].startswith("git version ")


def test_it_needs_no_tool(tmp_path: Path) -> None:
    for name in NEEDED:
        if found := shutil.which(name):
            (tmp_path / name).symlink_to(found)
    said = facts(PATH=str(tmp_path), HOME="/nonexistent", PYTHON="/nonexistent/python")
    assert set(said) == FACTS
    assert said["python"] == "missing"


def test_ci_says_it_first() -> None:
    lines = [line for line in (REPOSITORY / ".ci/run").read_text().splitlines() if not line.startswith("#")]
    assert lines.index(".ci/machine") <= lines.index("need=()")
