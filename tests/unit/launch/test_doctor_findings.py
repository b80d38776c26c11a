"""Every finding of the doctor: facts that cause it, and the same facts without the fault, which cause none."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace
from typing import Any

import pytest

from farandole.launch.doctor.checks import judge, weakest_link
from farandole.launch.doctor.facts import (
    ClusterFacts,
    Gpu,
    HostFacts,
    HostNetwork,
    Interface,
    KernelRoute,
    LinkFacts,
    Resources,
    Unreachable,
    read_host_facts,
    to_answer,
)
from farandole.launch.doctor.page import to_mapping, to_text
from farandole.version import VERSION


def host(number: int, **changes: Any) -> HostFacts:
    """Return a host nothing is wrong with, one of three."""
    name, address = f"node{number}", f"10.0.0.{number}"
    peers = [other for other in (1, 2, 3) if other != number]
    values: dict[str, Any] = {
        "hostname": name,
        "address": address,
        "python": "3.11.7",
        "executable": "/opt/venv/bin/python",
        "torch": "2.13.0+cu130",
        "farandole": "0.2.0",
        "commit": "0123456789abcdef",
        "interfaces": (
            Interface("lo", ("127.0.0.1",), True, True, 65536),
            Interface("eth0", (address,), True, False, 1500, 1000, "full"),
            Interface("docker0", ("172.17.0.1",), True, True, 1500),
        ),
        "routes": {f"node{other}": KernelRoute(f"10.0.0.{other}", address, "eth0") for other in peers},
        "resolved": {f"node{other}": (f"10.0.0.{other}",) for other in (1, 2, 3)},
        "memory_bytes": 64 * 10**9,
        "memory_available_bytes": 50 * 10**9,
        "shared_memory_bytes": 32 * 10**9,
        "shared_memory_free_bytes": 32 * 10**9,
        "open_files": 1024,
        "locked_memory_bytes": 8 * 2**20,
        "cores": 16,
        "congestion_control": "cubic",
        "gpus": (Gpu("H100", 80 * 10**9, 10**9, "570.1"),),
        "gpu_source": "nvidia-smi",
        "clock_offset_seconds": 0.01,
        "clock_error_seconds": 0.001,
    }
    values |= changes
    for group, kind in {"network": HostNetwork, "resources": Resources}.items():
        values[group] = kind(**{each.name: values.pop(each.name) for each in fields(kind) if each.name in values})
    return HostFacts(name, **values)


def link(source: int, target: int, **changes: Any) -> LinkFacts:
    values: dict[str, Any] = {"address": f"10.0.0.{target}", "round_trip_seconds": 2e-4, "bits_per_second": 940e6}
    return LinkFacts(f"node{source}", f"node{target}", **{**values, **changes})


def healthy() -> ClusterFacts:
    links = tuple(link(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b)
    return ClusterFacts((host(1), host(2), host(3)), links)


def with_host(number: int = 2, **changes: Any) -> ClusterFacts:
    facts = healthy()
    hosts = [host(number, **changes) if each.name == f"node{number}" else each for each in facts.hosts]
    return replace(facts, hosts=tuple(hosts))


def with_link(source: int, target: int, **changes: Any) -> ClusterFacts:
    facts = healthy()
    pair = (f"node{source}", f"node{target}")
    links = [
        link(source, target, **changes) if (each.source, each.target) == pair else each for each in facts.links
    ]
    return replace(facts, links=tuple(links))


def interfaces(**changes: Any) -> tuple[Interface, ...]:
    return (Interface("lo", ("127.0.0.1",), True, True), replace(host(2).network.interfaces[1], **changes))


def routes(interface: str, own: str = "10.0.0.2") -> dict[str, KernelRoute]:
    return {f"node{other}": KernelRoute(f"10.0.0.{other}", own, interface) for other in (1, 3)}


RESOLVED = dict(host(2).network.resolved)
FAULTS: list[tuple[ClusterFacts, str, str, str]] = [
    # facts, what is said of them, a part of the fix, severity
    (replace(healthy(), unreachable=(Unreachable("node4", "no ssh server answers there", "start sshd"),)),
     "node4: no ssh server answers", "start sshd", "problem"),
    (replace(healthy(), unreachable=(Unreachable("node4", "it does not answer"),)),
     "node4: it does not answer", "ssh node4 true", "problem"),
    (with_host(torch=""), "node2 has no torch", "pip install torch", "problem"),
    (with_host(torch="2.12.0+cu130"), "node2 has torch 2.12.0+cu130", "torch==2.13.0", "problem"),
    (with_host(python="3.12.1"), "node2 has Python 3.12", "python3.11", "warning"),
    (with_host(commit="ffffffffffffffff"), "node2 has the working directory ffffffffff",
     "git checkout 0123456789", "warning"),
    (with_host(commit="0123456789abcdef+"), "node2 has the working directory 0123456789+", "git stash", "warning"),
    (with_host(routes={"node1": KernelRoute("10.0.0.1"), "node3": KernelRoute("10.0.0.3", "10.0.0.2", "eth0")}),
     "node2 has no route to node1", "ip route add 10.0.0.1 dev eth0", "problem"),
    (with_host(routes=routes("docker0", "172.17.0.1")), "by docker0, a bridge", "eth0", "problem"),
    (with_host(routes=routes("lo", "127.0.0.1")), "by lo, the loopback", "eth0", "problem"),
    (with_host(interfaces=interfaces(is_up=False)), "eth0 of node2", "ip link set eth0 up", "problem"),
    (with_host(environment={"GLOO_SOCKET_IFNAME": "eth9"}), "GLOO_SOCKET_IFNAME=eth9 on node2",
     "export GLOO_SOCKET_IFNAME=eth0", "problem"),
    (with_host(environment={"NCCL_SOCKET_IFNAME": "docker"}), "the route to the other hosts takes eth0",
     "unset NCCL_SOCKET_IFNAME", "warning"),
    (with_link(1, 2, problem="timed out", bits_per_second=None, round_trip_seconds=None),
     "node1 cannot call node2 on a port of 10.0.0.2: timed out (node2 can call node1)",
     "ufw allow from 10.0.0.1", "problem"),
    (with_link(1, 2, problem="No route to host", bits_per_second=None), "No route to host",
     "ip route get 10.0.0.2", "problem"),
    (with_link(1, 2, stalled=True), "small messages arrive, large ones do not", "mtu 1400", "problem"),
    (with_host(interfaces=interfaces(mtu_bytes=9000)), "node2 has an MTU of 9000 on eth0, others have 1500",
     "ip link set dev eth0 mtu 1500", "problem"),
    (replace(healthy(), hosts=tuple(host(n, interfaces=(replace(host(n).network.interfaces[1], mtu_bytes=576),))
                                    for n in (1, 2, 3))), "MTU of 576 on eth0, below 1280", "mtu 1500", "warning"),
    (with_host(interfaces=interfaces(duplex="half")), "half duplex", "ethtool -s eth0 autoneg on", "problem"),
    (with_host(interfaces=interfaces(speed_megabits=100)), "negotiated 100 Mbit/s", "ethtool eth0", "warning"),
    (replace(with_host(1, interfaces=(replace(host(1).network.interfaces[1], speed_megabits=10_000),)), links=()),
     "eth0 of node2 has 1000 Mbit/s, the fastest host 10000", "ethtool eth0", "warning"),
    (with_link(1, 2, bits_per_second=100e6), "node1 -> node2 carries 100 Mbit/s, others 940 Mbit/s", "ethtool",
     "warning"),
    (with_link(1, 2, bits_per_second=50e6), "the weakest link carries 50 Mbit/s", "codec=auto", "note"),
    (with_link(1, 2, bits_per_second=480e6), "its cards negotiated 1 Gbit/s", "TcpRetransSegs", "warning"),
    (with_link(1, 2, round_trip_seconds=0.02), "20 ms there and back", "ping -c 10 10.0.0.2", "warning"),
    (with_host(resolved={**RESOLVED, "node1": None}), "gets no answer in time", "10.0.0.1 node1", "warning"),
    (with_host(resolved={**RESOLVED, "node1": ()}), "node2 does not know the name node1", "10.0.0.1 node1",
     "warning"),
    (with_host(resolved={**RESOLVED, "node1": ("127.0.1.1",)}), "takes node1 for 127.0.1.1, which is itself",
     "10.0.0.1 node1", "problem"),
    (with_host(resolved={**RESOLVED, "node1": ("10.9.9.9",)}), "node2 takes node1 for 10.9.9.9, but",
     "10.0.0.1 node1", "problem"),
    (with_host(resolved={**RESOLVED, "node2": ("127.0.1.1",)}), "takes its own name node2 for 127.0.1.1",
     "echo '10.0.0.2 node2'", "warning"),
    (with_host(resolved={**RESOLVED, "node2": ()}), "node2 does not know its own name", "10.0.0.2 node2",
     "warning"),
    (with_host(hostname="node1", resolved=RESOLVED), "node1 and node2 both call themselves node1",
     "hostnamectl set-hostname node1-2", "warning"),
    (with_host(clock_offset_seconds=-2.0), "the clock of node2 is 2 s behind", "set-ntp true", "warning"),
    (with_host(clock_offset_seconds=3600.0), "is 1:00:00 ahead", "set-ntp true", "problem"),
    (with_host(memory_available_bytes=900_000_000), "900 MB of memory left", "--sort=-rss", "warning"),
    (with_host(memory_available_bytes=0), "0 B of memory left", "--sort=-rss", "problem"),
    (with_host(shared_memory_bytes=0), "node2 has no /dev/shm", "mount -t tmpfs", "problem"),
    (with_host(shared_memory_bytes=64 * 2**20), "/dev/shm of node2 has 67.1 MB", "--shm-size", "warning"),
    (with_host(shared_memory_free_bytes=1000), "/dev/shm of node2 has 1 kB left", "ls -laS /dev/shm", "problem"),
    (with_host(open_files=512), "allows 512 open files", "ulimit -n 65536", "warning"),
    (with_host(open_files=64), "allows 64 open files", "ulimit -n 65536", "problem"),
    (with_host(infiniband=("mlx5_0",)), "InfiniBand (mlx5_0)", "ulimit -l unlimited", "warning"),
    (with_host(core_quota=2.5), "shows 16 cores, its control group allows 2.5", "OMP_NUM_THREADS=2", "warning"),
    (with_host(cores=8), "different numbers of cores", "node1:2,node2:1,node3:2", "note"),
    (with_host(torch="2.13.0+cpu"), "built without them", "--force-reinstall torch==2.13.0", "problem"),
    (with_host(gpus=(Gpu("H100", 80 * 10**9, 70 * 10**9, "570.1"),)), "GPU 0 of node2", "nvidia-smi", "warning"),
    (with_host(gpus=()), "hosts have different GPUs", "--include", "warning"),
    (with_host(gpus=(Gpu("H100", 80 * 10**9, 0, "550.0"),)), "different GPU drivers", "newest", "warning"),
    (with_host(congestion_control="bbr"), "TCP of node2 uses bbr", "tcp_congestion_control=cubic", "note"),
]  # fmt: skip


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert judge(healthy()) == []
    assert to_text(healthy(), []).endswith("No findings.")


@pytest.mark.parametrize(("facts", "what", "fix", "severity"), FAULTS, ids=[fault[1][:40] for fault in FAULTS])
def test_each_fault_is_found_explained_and_mended(facts: ClusterFacts, what: str, fix: str, severity: str) -> None:
    """Each finding of the doctor has a case: one that no case makes has never been seen."""
    found = [finding for finding in judge(facts) if what in finding.what]
    assert found, [finding.what for finding in judge(facts)]
    assert fix in found[0].fix
    assert found[0].severity == severity
    assert found[0].why
    text = to_text(facts, judge(facts))
    assert found[0].what in text
    assert found[0].fix in text


def test_the_mapping_of_a_host_has_its_facts_by_name_alone() -> None:
    facts = healthy()
    mapping = to_mapping(facts, [], 1.0)["hosts"][0]
    keys = """
        name hostname address python executable torch farandole commit interfaces routes resolved environment
        memory_bytes memory_available_bytes shared_memory_bytes shared_memory_free_bytes open_files
        locked_memory_bytes cores core_quota gpus gpu_source infiniband congestion_control
        clock_offset_seconds clock_error_seconds interface
    """
    assert sorted(mapping) == sorted(keys.split())
    assert (mapping["interface"], mapping["cores"], mapping["clock_offset_seconds"]) == ("eth0", 16, 0.01)


def test_a_fault_of_one_host_names_that_host() -> None:
    for facts, what, _, _ in FAULTS:
        for finding in judge(facts):
            if what in finding.what and finding.host:
                known = {host.name for host in facts.hosts} | {lost.name for lost in facts.unreachable}
                assert finding.host in known


def test_the_worst_come_first() -> None:
    facts = with_host(gpus=(), shared_memory_bytes=0, cores=3)
    severities = [finding.severity for finding in judge(facts)]
    assert severities == sorted(severities, key=["problem", "warning", "note"].index)
    assert len(set(severities)) == 3


def test_one_host_alone_has_no_peers_to_be_compared_with() -> None:
    alone = ClusterFacts((host(1, routes={}, resolved={"node1": ("127.0.1.1",)}, clock_offset_seconds=None),))
    assert judge(alone) == []
    assert weakest_link(alone) is None


def test_a_pair_that_is_weak_both_ways_is_said_once() -> None:
    facts = with_link(1, 2, bits_per_second=100e6)
    links = [link(2, 1, bits_per_second=90e6) if each.source == "node2" and each.target == "node1" else each
             for each in facts.links]  # fmt: skip
    facts = replace(facts, links=tuple(links))
    said = [finding.what for finding in judge(facts) if "others" in finding.what]
    assert said == ["node1 <-> node2 carries 100 Mbit/s and 90 Mbit/s, others 940 Mbit/s"]
    weakest = weakest_link(facts)
    assert weakest is not None
    assert (weakest.source, weakest.target) == ("node2", "node1")
    assert "weakest link: node2 -> node1, 90 Mbit/s" in to_text(facts, [])


def test_nccl_variables_that_exclude_or_list_are_left_alone() -> None:
    for text in ("^docker,lo", "eth0,eth1", "=eth0", "eth"):
        assert judge(with_host(environment={"NCCL_SOCKET_IFNAME": text})) == []
    assert judge(with_host(environment={"NCCL_SOCKET_IFNAME": "=eth"}))


def test_a_clock_within_its_error_is_right() -> None:
    assert judge(with_host(clock_offset_seconds=2.0, clock_error_seconds=1.9)) == []


# -- what hosts say -------------------------------------------------------------------------------


def test_facts_arrive_as_they_were_sent() -> None:
    network = replace(host(2).network, routes={}, resolved={})
    sent = replace(host(2), farandole=VERSION, network=network)
    assert read_host_facts("node2", json.loads(json.dumps(to_answer(sent)))) == sent


def test_lines_to_paste_can_be_read_by_a_shell() -> None:
    for facts, _, _, _ in FAULTS:
        for finding in judge(facts):
            if finding.severity == "problem":
                shlex.split(finding.fix)
