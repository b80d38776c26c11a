"""Who listens where while a job runs, what its files may be read by, and nodes whose own names mislead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.launch.job.hosts import HostNamespaces, entering
from farandole.launch.namespaces import Network
from tests.net.cluster import Cluster, cluster, why_impossible
from tests.ranks.test_launch import script

pytestmark = [
    pytest.mark.full("slow"),
    pytest.mark.net,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

TELL = """
import json, os
from pathlib import Path
import farandole as fd

world = fd.init(timeout_seconds=40)
mean = fd.mean(float(world.rank))
listening = []
for name in ("tcp", "tcp6"):
    for line in Path("/proc/net", name).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            listening.append(words[1].partition(":")[0])
print(json.dumps([world.rank, mean, os.environ.get("GLOO_SOCKET_IFNAME"), sorted(set(listening))]), flush=True)
fd.mean(0.0)
"""


def address(text: str) -> str:
    """Return an address as /proc/net/tcp has it."""
    return "".join(f"{int(part):02X}" for part in reversed(text.split(".")))


def told(text: str) -> list[list[object]]:
    return sorted(json.loads(line[line.index("[", 1) :] if line.startswith("[") and "] [" in line else line)
                  for line in text.splitlines() if line.endswith("]]"))  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), 2) as made:
        yield made


@pytest.mark.timeout(120)
def test_ranks_of_two_hosts_listen_on_the_chosen_interface_alone(hosts: Cluster, tmp_path: Path) -> None:
    done = hosts.run(
        "run", "-H", "host0:1,host1:1", *hosts.options, "--", sys.executable, script(tmp_path, TELL), cwd=tmp_path,
        seconds=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = told(done.stdout)
    assert [each[:3] for each in found] == [[0, 0.5, "eth0"], [1, 0.5, "eth0"]]
    for (_, _, _, listening), host in zip(found, hosts.network.hosts, strict=True):
        assert listening == [address(host.address)], "sshd of the test, and the ranks"
    (run,) = (tmp_path / "runs").iterdir()
    modes = {path.relative_to(run): path.stat().st_mode & 0o777 for path in [run, *run.rglob("*")]}
    assert {mode for path, mode in modes.items() if (run / path).is_dir()} == {0o700}, modes
    assert {mode for path, mode in modes.items() if (run / path).is_file()} == {0o600}, modes
    assert len(modes) > 6


@pytest.mark.timeout(120)
def test_ranks_of_one_host_listen_on_its_loopback_interface_alone(hosts: Cluster, tmp_path: Path) -> None:
    done = hosts.run("run", "-np", "2", "--", sys.executable, script(tmp_path, TELL), cwd=tmp_path, seconds=60)
    assert done.returncode == 0, done.stderr
    for _, mean, interface, listening in told(done.stdout):
        assert (mean, interface) == (0.5, "lo")
        assert isinstance(listening, list)
        assert set(listening) <= {address("127.0.0.1"), address(hosts.network.hosts[0].address)}, (
            "and the test's sshd"
        )


def on(host: HostNamespaces, words: list[str], cwd: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=entering(host),  # noqa: PLW1509 - one thread
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", **variables},
    )  # fmt: skip


@pytest.mark.timeout(120)
def test_nodes_of_a_scheduler_whose_own_names_are_loopback_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian has it, and with a bridge of containers on each: gloo alone would take 127.0.1.1."""
    monkeypatch.chdir(tmp_path)
    script(tmp_path, TELL)
    with Network(2, 1, None) as network:
        addresses = "\n".join(host.address for host in network.hosts)
        for number, host in enumerate(network.hosts):
            mine = tmp_path / f"hosts.{number}"
            mine.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
            make = (
                f"mount --bind {mine} /etc/hosts && ip link add docker0 type veth peer name veth9 && "
                "ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up && ip link set veth9 up"
            )
            _, err = (door := on(host, ["sh", "-c", make], tmp_path)).communicate(timeout=20)
            assert door.returncode == 0, err
        words = [
            sys.executable,
            "-m",
            "farandole",
            "run",
            "--no-bind",
            "--quiet",
            "--",
            sys.executable,
            "script.py",
        ]
        nodes = [
            on(host, words, tmp_path, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NODE_IPS=addresses,
               SKYPILOT_NUM_GPUS_PER_NODE="1")
            for rank, host in enumerate(network.hosts)
        ]  # fmt: skip
        try:
            results = [node.communicate(timeout=60) for node in nodes]
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    assert [node.returncode for node in nodes] == [0, 0], results
    for (out, _), host, rank in zip(results, network.hosts, (0, 1), strict=True):
        assert told(out) == [[rank, 0.5, "eth0", [address(host.address)]]]
