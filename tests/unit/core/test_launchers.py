"""Who this is according to schedulers: the rank, or the node; and where ranks meet when nobody says so."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from farandole.core.env import read_run_settings
from farandole.core.launcher_env import NodeInfo
from farandole.core.rank_variables import read_rank_variables
from farandole.core.slurm import slurm_port
from farandole.core.vocabulary.errors import ConfigError
from farandole.launch.start.placing import read_node_info

STEP = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[01-08]",
}  # fmt: skip
NODE_STEP = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
PET = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
DSTACK = {
    "DSTACK_NODE_RANK": "0",
    "DSTACK_NODES_NUM": "3",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_GPUS_PER_NODE": "2",
}
POD = {
    "JOB_COMPLETION_INDEX": "1", "FARANDOLE_NODE_COUNT": "2", "FARANDOLE_ADDRESS": "train-0.train",
    "FARANDOLE_PORT": "29500", "FARANDOLE_LOCAL_SIZE": "4",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-head.lan-77@1",
}  # fmt: skip


def test_a_task_of_slurm_is_a_rank_that_knows_where_to_meet() -> None:
    place = read_rank_variables(STEP)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 0, 1)
    assert (place.node_rank, place.node_count) == (1, 2)
    assert (place.address, place.port) == ("gpu07", 15000 + (1234 * 31 + 2) % 15000)
    first = read_rank_variables({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert first is not None
    assert first.local_size == 3


def test_what_a_person_sets_goes_before_what_is_derived() -> None:
    place = read_rank_variables({**STEP, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711"})
    assert place is not None
    assert (place.address, place.port) == ("10.0.0.9", 4711)


def test_tasks_of_one_node_meet_on_loopback() -> None:
    place = read_rank_variables({**STEP, "SLURM_STEP_NODELIST": "gpu07"})
    assert place is not None
    assert place.address == "127.0.0.1"


def test_jobs_and_steps_side_by_side_get_ports_of_their_own() -> None:
    ports = {
        slurm_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(7000, 7200)
        for step in range(31)
    }
    assert len(ports) == 200 * 31
    assert all(port is not None and 15000 <= port < 30000 for port in ports)
    assert slurm_port({}) is None


@pytest.mark.parametrize("step", ["4294967290", "4294967291", ""])
def test_a_shell_of_salloc_is_no_rank_and_no_node(step: str) -> None:
    variables = {**STEP, "SLURM_STEP_ID": step}
    assert read_rank_variables(variables) is None
    assert read_node_info(variables) is None


def test_ranks_dealt_out_in_turn_are_refused() -> None:
    turns = {
        **STEP,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
    }
    with pytest.raises(
        ConfigError, match="rank 1 is number 0 of 2 on its host; start with srun --distribution=block"
    ):
        read_rank_variables(turns)
    with pytest.raises(ConfigError, match="mpirun --map-by slot"):
        read_rank_variables(
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2",
             "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        )  # fmt: skip


def test_the_ranks_of_one_host_may_be_numbered_in_any_order_there() -> None:
    """Open MPI does so on a full host. A launcher that gives each rank a device of its own says 0 to all: kept."""
    place = read_rank_variables({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"})
    assert place is not None
    assert (place.rank, place.local_rank, place.local_size) == (1, 1, 4)
    own = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place = read_rank_variables({**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert place is not None
    assert (place.rank, place.local_rank, place.local_size) == (1, 0, 2)


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, "127.0.0.1"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "head.lan"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "99",
          "OMPI_MCA_orte_hnp_uri": "99.0;tcp://10.1.2.3,192.168.1.1:4711"}, "10.1.2.3"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "99"}, None),
    ],
)  # fmt: skip
def test_open_mpi_meets_at_its_mpirun(changes: Mapping[str, str], address: str | None) -> None:
    place = read_rank_variables({**OPEN_MPI, **changes})
    assert place is not None
    assert place.address == address
    assert place.port is not None
    assert 15000 <= place.port < 30000
    other = read_rank_variables({**OPEN_MPI, **changes, "PMIX_NAMESPACE": "prterun-head.lan-78@1"})
    assert other is not None
    assert other.port != place.port


def test_pmi_under_srun_meets_like_slurm_and_elsewhere_nowhere() -> None:
    variables = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    place = read_rank_variables({**variables, **STEP})
    assert place is not None
    assert (place.source, place.address) == ("PMI", "gpu07")
    alone = read_rank_variables(variables)
    assert alone is not None
    assert (alone.local_size, alone.address, alone.port) == (1, None, None)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (PET, ("torchrun's variables (PET_*)", 1, 2, "job-node-0-0.job", 29400, 4)),
        ({**PET, "PET_NPROC_PER_NODE": "auto"},
         ("torchrun's variables (PET_*)", 1, 2, "job-node-0-0.job", 29400, None)),
        (SKYPILOT, ("SkyPilot", 1, 2, "10.0.0.1", 29500, 8)),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "0", "MASTER_PORT": "7"},
         ("SkyPilot", 1, 2, "10.0.0.1", 7, None)),
        (DSTACK, ("dstack", 0, 3, "10.0.0.1", 29500, 2)),
        (POD, ("Kubernetes", 1, 2, "train-0.train", 29500, 4)),
        (NODE_STEP, ("Slurm", 1, 2, "gpu07", 15000 + (1234 * 31 + 2) % 15000, None)),
        ({**NODE_STEP, "SLURM_GPUS_ON_NODE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "9"},
         ("Slurm", 1, 2, "x", 9, 4)),
    ],
)  # fmt: skip
def test_nodes_of_each_starter(variables: Mapping[str, str], expected: tuple[object, ...]) -> None:
    place = read_node_info(variables)
    assert place is not None
    assert (place.source, place.node_rank, place.node_count, place.address, place.port, place.slots) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {}, {"JOB_COMPLETION_INDEX": "1"}, {**DSTACK, "DSTACK_NODES_NUM": "1"}, {**PET, "FARANDOLE_RANK": "0"},
        {**NODE_STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},
    ],
)  # fmt: skip
def test_the_only_node_and_a_rank_of_ours_are_no_nodes(variables: Mapping[str, str]) -> None:
    assert read_node_info(variables) is None


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({**DSTACK, "DSTACK_NODE_RANK": "3"}, "DSTACK_NODE_RANK=3, DSTACK_NODES_NUM=3: expected a node below 3"),
        ({**DSTACK, "DSTACK_NODE_RANK": "x"}, "DSTACK_NODE_RANK='x': expected a whole number"),
        (
            {**DSTACK, "DSTACK_MASTER_NODE_IP": " "},
            "no variable says where node 0 is; set MASTER_ADDR or DSTACK_MASTER",
        ),
        ({**DSTACK, "DSTACK_GPUS_PER_NODE": "two"}, "DSTACK_GPUS_PER_NODE='two': expected a whole number"),
        ({**PET, "PET_NNODES": "1:4"}, "PET_NNODES=1:4: a number of nodes that may change is torchrun's own"),
        (STEP, "srun started 4 tasks on 2 node(s)"),
        ({**NODE_STEP, "SLURM_STEP_NODELIST": "a["}, "SLURM_STEP_NODELIST: 'a[' is no list of nodes"),
        ({**NODE_STEP, "SLURM_JOB_ID": ""}, "set MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_what_makes_no_sense(variables: Mapping[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_node_info(variables)
    assert text in str(caught.value)


def test_one_process_a_node_of_kubeflow_is_a_rank() -> None:
    place = read_rank_variables({**PET, "PET_NPROC_PER_NODE": "1"})
    assert place is not None
    assert (place.rank, place.size, place.local_size, place.node_rank, place.node_count) == (1, 2, 1, 1, 2)
    assert (place.address, place.port) == ("job-node-0-0.job", 29400)
    assert read_rank_variables(PET) is None


def test_a_restart_of_torchrun_is_a_generation() -> None:
    assert read_run_settings({"TORCHELASTIC_RESTART_COUNT": "2"}).generation == 2
    assert read_run_settings({"TORCHELASTIC_RESTART_COUNT": "2", "FARANDOLE_GENERATION": "5"}).generation == 5


def test_ranks_of_a_node() -> None:
    from farandole.launch.job.placement import bind_ranks, node_places, ranks_per_node

    node = NodeInfo("dstack", 1, 2, "10.0.0.1", 29500, slots=2)
    assert (ranks_per_node(node, None), ranks_per_node(node, 8)) == (2, 4)
    with pytest.raises(ConfigError, match=r"-np 3 on 2 nodes .dstack.: every node takes the same number"):
        ranks_per_node(node, 3)
    with pytest.raises(ConfigError, match="not how many ranks a node has; give -np"):
        ranks_per_node(NodeInfo("dstack", 1, 2, "10.0.0.1", 29500), None)
    places = bind_ranks(node_places(node, 2), [4, 5], bind=True)
    assert [(p.rank, p.size, p.local_rank, p.local_size, p.node_rank, p.node_count, p.cores) for p in places] == [
        (2, 4, 0, 2, 1, 2, (4,)), (3, 4, 1, 2, 1, 2, (5,)),
    ]  # fmt: skip
