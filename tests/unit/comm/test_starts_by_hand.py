"""Processes that launchers did not start as ranks, though their variables say so."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch.distributed as dist

from farandole.comm.world import rendezvous, store_sync
from farandole.comm.world.connect import connect, handshake
from farandole.comm.world.forks import refuse_spawned_worker, tell_children
from farandole.core.rank_variables import how_to_start_all, read_rank_variables
from farandole.core.vocabulary.errors import ConfigError, Stalled
from tests.unit.comm.test_backend_meeting import world

SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}
OURS = {"FARANDOLE_RANK": "0", "FARANDOLE_SIZE": "3", "RANK": "0", "WORLD_SIZE": "3"}


@pytest.fixture
def rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


@pytest.mark.usefixtures("rank_1_of_2")
def test_a_worker_that_imports_the_script_is_told_to_guard_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)  # as spawn does
    with pytest.raises(ConfigError, match=r"spawned worker of rank 1.*under if __name__ == '__main__'"):
        connect(timeout_seconds=1)


@pytest.mark.usefixtures("rank_1_of_2")
def test_a_worker_with_the_place_of_its_rank_is_none_and_one_of_its_own_place_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place: Any = read_rank_variables()
    tell_children(place)
    try:
        child: Any = multiprocessing.get_context("spawn").Process(target=print)
        assert (os.getpid(), *astuple(place)) in child._config.values(), "what a child is given"
        refuse_spawned_worker(place)  # the rank itself, which makes further groups
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(ConfigError, match=r"spawned worker of rank 1, and no rank itself"):
            refuse_spawned_worker(place)
        refuse_spawned_worker(replace(place, rank=0))
    finally:
        tell_children(None)
    refuse_spawned_worker(place)


@pytest.mark.parametrize(
    ("environ", "said", "unset"),
    [
        (SLURM, "Slurm says SLURM_STEP_NUM_TASKS=3: start each rank with srun", "SLURM_PROCID"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torch says WORLD_SIZE=2: start each rank with torchrun", "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", **SLURM}, "torch says WORLD_SIZE=2", "RANK SLURM_PROCID"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "Open MPI says OMPI_COMM_WORLD_SIZE=2: start each rank with mpirun",
            "OMPI_COMM_WORLD_RANK",
        ),
    ],
)
def test_what_is_to_be_unset_makes_a_training_of_one_process(
    environ: Mapping[str, str], said: str, unset: str
) -> None:
    words = how_to_start_all(environ)
    assert words.startswith(said)
    assert words.endswith(f"alone: unset {unset}")
    assert read_rank_variables({name: environ[name] for name in environ.keys() - set(unset.split())}) is None


def test_ranks_of_our_launcher_are_started_already() -> None:
    assert how_to_start_all(OURS) == "each of them must call farandole.init() too"


def test_rank_0_names_who_is_late_and_goes_on_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store_sync, "LATE_SECONDS", 0.05)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Stalled, match=r"ranks 1 and 2 did not get here within 0\.6 s; Slurm says"):
        handshake(world(dist.HashStore(), 0, 3, 0.6), owns_gpu=False)
    said = capsys.readouterr().err
    words = (
        "farandole: rank 0 of 3: ranks 1 and 2 have not come .* waits up to 0.6 s; if they are not .*: Slurm says"
    )
    assert re.search(words, said)
    assert said.count("have not come") == 1


def test_the_link_to_another_host_is_looked_at_before_the_program() -> None:
    store = dist.HashStore()
    here = world(store, 0, 3, 0.1)
    here.groups.hosts = (here.host, here.host, "b")
    store.set("lunch/0/1", "1")
    with pytest.raises(Stalled, match=rf"rank 2 did not .* network between {here.host} and b cut.*every rank"):
        store_sync.all_gather_json(here, "lunch", 1)
    here.groups.hosts = ("b", here.host, here.host)
    with pytest.raises(Stalled, match=r"ranks 1 and 2 did not get here within 0.1 s; every rank"):
        store_sync.all_gather_json(here, "lunch", 1)


@pytest.mark.usefixtures("rank_1_of_2")
def test_a_rank_names_rank_0_that_is_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "LATE_SECONDS", 0.05)
    with pytest.raises(Stalled, match="no meeting point"):
        connect(timeout_seconds=1)
    assert (
        "farandole: rank 1 of 2: rank 0 has not come after 0.05 s, and it waits up to 1 s"
        in capsys.readouterr().err
    )
