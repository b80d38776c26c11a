"""Schedulers that start one command a node, played on this machine: two real launchers, real ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .scripts import PLACE, printed, write

pytestmark = pytest.mark.full("slow")


def sky_pilot(node: int) -> dict[str, str]:
    return {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1"}  # fmt: skip


def kubernetes(node: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(node), "FARANDOLE_NODE_COUNT": "2", "FARANDOLE_ADDRESS": "127.0.0.1",
            "FARANDOLE_LOCAL_SIZE": "1"}  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(("starter", "port_name"), [(sky_pilot, "MASTER_PORT"), (kubernetes, "FARANDOLE_PORT")])
def test_two_nodes_make_one_world(
    tmp_path: Path, starter: Callable[[int], dict[str, str]], port_name: str
) -> None:
    write(tmp_path, PLACE)
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "farandole", "run", "--no-bind", "--quiet", "--", "python", "train.py"],
            cwd=tmp_path, env={**os.environ, **starter(node), port_name: port}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        results = [node.communicate(timeout=50) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], results
    assert printed(results[0][0]) == [[0, 2, 0, 1, 0, 2, "farandole", 0.5]]
    assert printed(results[1][0]) == [[1, 2, 0, 1, 1, 2, "farandole", 0.5]]
