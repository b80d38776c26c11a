"""`farandole doctor` and `farandole test` on emulated hosts with faults made on purpose, and over ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farandole.core import env
from farandole.launch.job.hosts import HostNamespaces, entering
from farandole.launch.namespaces import Network
from tests.net.cluster import cluster, why_impossible
from tests.ranks.test_launch import FARANDOLE, run

pytestmark = pytest.mark.net


def on_host(host: HostNamespaces, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command), capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        preexec_fn=entering(host),
    )  # fmt: skip


def must(host: HostNamespaces, *command: str) -> None:
    done = on_host(host, *command)
    assert done.returncode == 0, done.stderr


@contextmanager
def hosts(count: int, rate: float | None = 1e9, **changes: Any) -> Iterator[Network]:
    if os.geteuid() != 0:
        pytest.skip("faults are made inside the hosts, by root")
    with Network(count, 2, rate, **changes) as network:
        yield network


def doctor(network: Network, *words: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and result, as a person on host0 gets them."""
    done = on_host(
        network.hosts[0], "env", f"{env.HOSTS_FILE}={network.hosts_file}", *FARANDOLE, "doctor", "--json", *words
    )
    assert done.stdout.count("\n") == 1, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def said(found: dict[str, Any], what: str) -> dict[str, str]:
    """Return the one finding that says `what`."""
    (finding,) = [each for each in found["findings"] if what in each["what"]]
    assert isinstance(finding, dict)
    return finding


@pytest.mark.full("slow")
def test_four_hosts_are_in_order_within_half_a_minute() -> None:
    with hosts(4) as network:
        code, found = doctor(network)
    assert code == 0, found["findings"]
    assert found["healthy"]
    assert found["seconds"] < 30
    assert [host["name"] for host in found["hosts"]] == ["host0", "host1", "host2", "host3"]
    assert {host["interface"] for host in found["hosts"]} == {"eth0"}
    assert len(found["links"]) == 12
    for link in found["links"]:
        # A busy machine may be slower than the link, and never faster.
        assert 0.2e9 < link["bits_per_second"] < 1.1e9, link
        assert 0 < link["round_trip_seconds"] < 0.1
    for host in found["hosts"]:
        assert abs(host["clock_offset_seconds"]) <= host["clock_error_seconds"] + 0.05


def test_a_slow_link_is_named_as_the_weakest() -> None:
    with hosts(3, between={(0, 2): 30e6}) as network:
        code, found = doctor(network)
    assert code == 0
    weakest = found["weakest_link"]
    assert {weakest["source"], weakest["target"]} == {"host0", "host2"}
    assert 15e6 < weakest["bits_per_second"] < 33e6
    assert said(found, "host0 <-> host2 carries")["severity"] == "warning"


@pytest.mark.full("slow")
def test_an_mtu_that_differs_is_a_problem_with_its_fix() -> None:
    with hosts(3) as network:
        must(network.hosts[1], "ip", "link", "set", "eth0", "mtu", "1300")
        code, found = doctor(network)
    assert code == 1
    finding = said(found, "MTU of 1300")
    assert finding["host"] == "host1"
    assert finding["fix"] == "ip link set dev eth0 mtu 1500"
    assert finding["severity"] == "problem"


def etc_hosts(network: Network, directory: Path, host: int, change: Callable[[str], str]) -> None:
    """Give one host an /etc/hosts of its own."""
    text = on_host(network.hosts[host], "cat", "/etc/hosts").stdout
    mine = directory / f"hosts.{host}"
    mine.write_text(change(text))
    must(network.hosts[host], "mount", "--bind", str(mine), "/etc/hosts")


@pytest.mark.full("slow")
def test_names_that_mean_something_else(tmp_path: Path) -> None:
    with hosts(3) as network:
        etc_hosts(network, tmp_path, 1, lambda text: text.replace("10.211.0.1 host0", "10.211.0.77 host0"))
        etc_hosts(
            network, tmp_path, 2,
            lambda text: "127.0.1.1 host2\n" + "".join(
                f"{line}\n" for line in text.splitlines() if not line.endswith((" host2", " host1"))
            ),
        )  # fmt: skip
        code, found = doctor(network)
        fixes = [said(found, "host1 takes host0")["fix"], said(found, "its own name host2")["fix"]]
        # The line to paste mends it: on a copy, as root, without sudo.
        for name, fix, lookup in (
            ("hosts.1", fixes[0], "10.211.0.1 host0"),
            ("hosts.2", fixes[1], "10.211.0.3 host2"),
        ):
            copy = tmp_path / f"copy.{name}"
            copy.write_text((tmp_path / name).read_text())
            line = fix.replace("sudo ", "").replace("/etc/hosts", str(copy))
            subprocess.run(["bash", "-c", line], check=True, stdout=subprocess.DEVNULL)
            assert lookup in copy.read_text().splitlines()
            assert not any(each.split()[0].startswith(("127.0.1", "10.211.0.77")) and len(each.split()) > 1
                           for each in copy.read_text().splitlines() if each.strip())  # fmt: skip
    assert code == 1
    assert said(found, "host1 takes host0 for 10.211.0.77")["severity"] == "problem"
    assert said(found, "host2 takes its own name host2 for 127.0.1.1")["severity"] == "warning"
    assert "10.211.0.2 host1" in said(found, "host2 does not know the name host1")["fix"]


@pytest.mark.full("slow")
def test_a_host_whose_cable_is_out() -> None:
    with hosts(2) as network:
        network.cut(1)
        code, found = doctor(network)
    assert code == 1
    failed = {(link["source"], link["target"]) for link in found["links"] if link["problem"]}
    assert failed == {("host0", "host1"), ("host1", "host0")}
    assert said(found, "host0 cannot call host1")["severity"] == "problem"
    assert found["weakest_link"] is None


@pytest.mark.full("slow")
def test_a_firewall_in_one_direction() -> None:
    """host1 drops what is sent to it first, as a firewall does; answers come back."""
    with hosts(2) as network:
        done = on_host(network.hosts[1], "ip", "rule", "add", "from", "10.211.0.2", "ipproto", "tcp", "prohibit")
        if done.returncode:
            pytest.skip(f"this kernel makes no such rule: {done.stderr.strip()}")
        code, found = doctor(network)
    assert code == 1
    assert any("cannot call" in finding["what"] for finding in found["findings"])


@pytest.mark.full("further")
def test_limits_and_variables_of_one_host() -> None:
    with hosts(2) as network:
        words = ["prlimit", "--nofile=200", "env", "GLOO_SOCKET_IFNAME=eth7",
                 f"{env.HOSTS_FILE}={network.hosts_file}", *FARANDOLE, "doctor"]  # fmt: skip
        done = on_host(network.hosts[0], *words)
    assert done.returncode == 1, done.stderr
    assert "host0 allows 200 open files" in done.stdout
    assert "fix (on host0): ulimit -n 65536" in done.stdout
    assert "fix (on host1): export GLOO_SOCKET_IFNAME=eth0" in done.stdout
    assert "weakest link: " in done.stdout


def test_one_host_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["healthy"] else 1)
    assert found["hosts"][0]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["links"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full("further")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-H", "node1,-x"], "Invalid host input"),
        (["-H", "localhost", "-x", "A=1"], "-x is for commands that start ranks"),
        (["--include", "a"], "choose from a list of hosts"),
        (["--hostfile", "missing"], "cannot read host file"),
        (["--what"], "--what"),
    ],
)
def test_bad_usage_is_one_line(tmp_path: Path, words: list[str], problem: str) -> None:
    done = run(tmp_path, "doctor", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full("further")
def test_the_probe_imports_no_torch() -> None:
    code = (
        "import sys, farandole.launch.doctor.probe, farandole.cli.commands.doctor, "
        "farandole.cli.commands.cluster_test"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.full("slow")
@pytest.mark.timeout(120)
def test_over_ssh_each_host_is_asked_and_a_refusal_explained(tmp_path: Path) -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    with cluster(tmp_path, 3) as made:
        made.network.set_rate(200e6)  # what is not shaped is as fast as the cores of this machine happen to be
        done = made.run("doctor", "-H", "host0,host1,host2", "--json", *made.options, cwd=tmp_path)
        found = json.loads(done.stdout)
        assert [host["address"] for host in found["hosts"]] == ["10.211.0.1", "10.211.0.2", "10.211.0.3"]
        assert {host["interface"] for host in found["hosts"]} == {"eth0"}
        assert all(host["torch"] for host in found["hosts"]), "found as a rank would find it"
        assert len([link for link in found["links"] if link["bits_per_second"]]) == 6
        assert done.returncode == 0, found["findings"]
        refused = made.run("doctor", "-H", "host0,host1", "--json", "-p", "2222", cwd=tmp_path)
        lost = json.loads(refused.stdout)["unreachable"]
        assert refused.returncode == 1
        assert lost[0]["name"] == "host1"
        assert lost[0]["cause"]
        proved = made.run(
            "test", "-H", "host0,host1", "--seconds", "1", "-x", "OMP_NUM_THREADS=1", *made.options,
            cwd=tmp_path, seconds=50,
        )  # fmt: skip
        assert proved.returncode == 0, proved.stdout + proved.stderr
        assert proved.stdout.splitlines()[-1] == "PASSED"
        assert "2 ranks on 2 host(s)" in proved.stdout


# -- farandole test ------------------------------------------------------------------------------


@pytest.mark.full("slow")
def test_a_cluster_passes(tmp_path: Path) -> None:
    done = run(
        tmp_path, "emulate", "--hosts", "2", "--rate", "200mbit", "--",
        "farandole", "test", "--seconds", "1", "--json", timeout=55,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert (found["ranks"], found["hosts"]) == (2, 2)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["rate between hosts"]["passed"]
    assert 100e6 < found["bits_per_second"] < 210e6
    assert {"collectives", "training", "parameters", "optimizer state", "gradients", "loss"} <= set(checks)
    assert "training: step 10" in done.stderr
    assert list(tmp_path.iterdir()) == [], "no run directory is left"


@pytest.mark.full("further")
def test_a_rank_that_cannot_start_fails_with_its_account(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch on this host')\n")
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = run(tmp_path, "test", "-np", "2", "--seconds", "2", environment={"PYTHONPATH": paths})
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "FAILED"
    assert "no torch on this host" in done.stdout


@pytest.mark.full("further")
@pytest.mark.parametrize("words", [["--seconds", "0"], ["--seconds", "nan"], ["-np", "0"], ["-H", "a b"]])
def test_bad_usage_of_test(tmp_path: Path, words: list[str]) -> None:
    done = run(tmp_path, "test", *words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
