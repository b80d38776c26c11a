"""The interface of one node among several: never a loopback address at which the others would find nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.core.host import interfaces
from farandole.core.host.interfaces import Address, interface_of_node
from farandole.core.launcher_env import NodeInfo
from farandole.launch.job.contract import JobSpec, rank_environment
from farandole.launch.job.placement import node_interface, node_places
from farandole.launch.start.placing import read_node_info

OWN = [
    Address("lo", "127.0.0.1", "127.0.0.0/8"),
    Address("docker0", "172.17.0.1", "172.17.0.0/16"),
    Address("eth0", "10.1.0.5", "10.1.0.0/16"),
    Address("ib0", "10.2.0.5", "10.2.0.0/16"),
]
NAMES = {"first": ["127.0.1.1"], "other": ["10.2.0.6"], "first-seen": ["10.1.0.9"], "bridged": ["172.17.0.9"]}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"127.0.1.1": "127.0.0.1", "10.2.0.6": "10.2.0.5", "10.1.0.9": "10.1.0.5", "172.17.0.9": "172.17.0.1"}
    monkeypatch.setattr(interfaces, "own_addresses", lambda: OWN)
    monkeypatch.setattr(interfaces, "_local_address", routes.get)
    monkeypatch.setattr(interfaces, "_resolved", lambda name: NAMES.get(name, []))


@pytest.mark.parametrize(
    ("meeting_point", "others", "is_first", "expected"),
    [
        ("first-seen", (), False, "eth0"),
        ("first", ("other",), True, "ib0"),  # its own name is a loopback address: the way to the other one counts
        ("first", (), True, ""),
        ("first", (), False, "lo"),  # all are this machine
        ("bridged", (), False, "eth0"),  # never a bridge of containers
        ("nobody-knows", (), False, ""),
    ],
)
def test_which_interface_a_node_takes(
    meeting_point: str, others: tuple[str, ...], is_first: bool, expected: str
) -> None:
    assert interface_of_node(meeting_point, others, is_first=is_first) == expected


def test_ranks_of_a_node_are_told_its_interface() -> None:
    node = NodeInfo("Slurm", 1, 2, "first-seen", 29500, 1)
    (place,) = node_places(node, 1)
    job = JobSpec("first-seen", 29500, Path("/nowhere"))
    told = rank_environment(place, job, {})
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == "eth0"
    told = rank_environment(place, job, {"GLOO_SOCKET_IFNAME": "mine"})
    assert "GLOO_SOCKET_IFNAME" not in told, "what a person chose stays"
    assert told["NCCL_SOCKET_IFNAME"] == "eth0"
    assert node_interface(NodeInfo("Slurm", 0, 2, "127.0.0.1", 29500, 1)) == ""


def test_starters_that_list_the_nodes_say_who_is_second() -> None:
    sky = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    slurm = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
    }  # fmt: skip
    found = [read_node_info(each) for each in (sky, slurm)]
    assert [each.second for each in found if each is not None] == ["10.0.0.2", "gpu08"]
