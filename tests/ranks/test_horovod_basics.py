"""The world by Horovod's names: init and shutdown many times, places, timelines, errors."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import farandole as fd
import farandole.horovod.torch as hvd
from farandole.comm.world import rendezvous
from farandole.comm.world.world import has_world
from tests.ranks.pool import ranks


@ranks(3)
def test_places() -> None:
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()  # nothing
    assert hvd.is_initialized()
    rank = int(os.environ["FARANDOLE_RANK"])
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, 3, rank, 3)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert not has_world()


@ranks(3)
def test_unequal_hosts() -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    # Ranks 0 and 1 on the first host, rank 2 on the second.
    os.environ.update(
        FARANDOLE_LOCAL_RANK=str(rank % 2),
        FARANDOLE_LOCAL_SIZE="2" if rank < 2 else "1",
        FARANDOLE_NODE_RANK=str(rank // 2),
        FARANDOLE_NODE_COUNT="2",
    )
    hvd.init()
    assert hvd.is_homogeneous() is False
    assert (hvd.cross_rank(), hvd.cross_size()) == [(0, 2), (0, 1), (1, 2)][rank]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0


@pytest.mark.full("further")
@ranks(2)
def test_again_and_again_leaves_nothing_behind() -> None:
    def things() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    alone = hvd.ProcessSet([0])
    for turn in range(40):
        hvd.init(process_sets=[alone] if turn % 2 else None)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
        hvd.allreduce_async(torch.ones(1), name=f"left.{turn}")  # nobody waits for it
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.mpi_ops._handle_map
        if turn == 9:
            before = things()
    assert things() == before


@pytest.mark.full("further")
@ranks(2)
def test_a_new_beginning_leaves_no_hooks_and_no_keys_of_the_old() -> None:
    hook = sys.excepthook
    kept = []
    for _ in range(4):
        hvd.init()
        assert sys.excepthook is not hook
        hvd.barrier()
        store = list(rendezvous._met.stores.values())[-1]
        if hvd.rank() == 0:
            kept.append(len([key for key in store.list_keys() if key.startswith("farandole/")]))
        hvd.barrier()
        hvd.shutdown()
        assert sys.excepthook is hook
    assert len(set(kept[1:])) <= 1, f"keys of all worlds, after each init: {kept}"


@pytest.mark.full("further")
@ranks(2)
def test_an_uncaught_error_is_printed_once_whatever_wrapped_the_hook() -> None:
    printed: list[str] = []
    sys.__excepthook__, original = lambda kind, error, trace: printed.append(str(error)), sys.__excepthook__
    sys.excepthook = sys.__excepthook__
    try:
        for _ in range(3):
            hvd.init()
            inner = sys.excepthook
            sys.excepthook = lambda *found, inner=inner: inner(*found)  # as a reporter of errors does
            hvd.shutdown()
        hvd.init()
        problem = KeyError("the culprit")
        sys.excepthook(KeyError, problem, None)
        assert printed == ["'the culprit'"]
    finally:
        sys.__excepthook__ = original


@pytest.mark.full("further")
@ranks(2)
def test_names_and_handles_begin_anew() -> None:
    for _ in range(2):
        hvd.init()
        assert hvd.allreduce_async(torch.ones(1)) == 0
        if hvd.rank() == 0:
            hvd.allreduce_async(torch.ones(1), name="only rank 0")
        hvd.shutdown()


@pytest.mark.full("further")
@ranks(2)
def test_a_world_that_was_there_stays() -> None:
    world = fd.init(progress=False)
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    hvd.shutdown()
    assert fd.world() is world
    hvd.init()
    fd.shutdown()  # takes Horovod's names along
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.size() == 2


@ranks(2)
def test_what_shutdown_does_to_operations_in_flight() -> None:
    hvd.init()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="never answered")
        hvd.barrier()
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
    else:
        hvd.barrier()
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


@ranks(2)
def test_communicators() -> None:
    with pytest.warns(UserWarning, match=r"init\(comm=\[0\]\) is ignored: the job has all 2 ranks"):
        hvd.init(comm=[0])
    assert hvd.size() == 2
    hvd.shutdown()
    hvd.init([0, 1])
    rank = hvd.rank()
    hvd.shutdown()

    class Comm:
        def __init__(self, rank: int, size: int) -> None:
            self.place = rank, size

        def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
            return self.place[0]

        def Get_size(self) -> int:  # noqa: N802
            return self.place[1]

    hvd.init(comm=Comm(rank, 2))
    hvd.shutdown()
    with pytest.raises(ValueError, match="a communicator of some ranks is not supported"):
        hvd.init(comm=Comm(0, 1))
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="sets made of an mpi4py Comm are not supported"):
        hvd.init(process_sets=[hvd.ProcessSet(Comm(0, 1))])


@ranks(2, HOROVOD_TIMELINE="DYNAMIC")
def test_a_timeline_that_the_program_starts(tmp_path: Path) -> None:
    hvd.init()
    for name in ("first", "second"):
        path = tmp_path / f"{name}.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(1), name=f"{name}_allreduce")
        hvd.stop_timeline()
        if hvd.rank() == 0:
            text = path.read_text()
            json.loads(text)
            for word in (f"allreduce.{name}_allreduce", "NEGOTIATE_ALLREDUCE", '"ALLREDUCE"', "CYCLE_START"):
                assert word in text
            assert name == "first" or "first_allreduce" not in text
    with pytest.raises(ValueError, match="names no file"):
        hvd.start_timeline("")


@ranks(2)
def test_a_timeline_from_the_start(tmp_path: Path) -> None:
    hvd.init()
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage"):
        hvd.start_timeline("x.json")
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage"):
        hvd.stop_timeline()
    hvd.shutdown()
    path = tmp_path / "timeline.json"
    os.environ["HOROVOD_TIMELINE"] = str(path)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="test_allreduce")
    hvd.shutdown()
    mine = path if not int(os.environ["FARANDOLE_RANK"]) else path.with_name("timeline.rank1.json")
    assert "allreduce.test_allreduce" in mine.read_text()


@pytest.mark.full("further")
@ranks(2, HOROVOD_STALL_CHECK_TIME_SECONDS="0.3", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.8")
def test_a_rank_that_does_not_come() -> None:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="waits")
        assert "allreduce.waits" in str(caught.value)
    else:
        threading.Event().wait(2.0)


@ranks(2, HOROVOD_FUSION_THRESHOLD="64 MB")
def test_a_variable_that_makes_no_sense() -> None:
    with pytest.raises(fd.ConfigError, match="HOROVOD_FUSION_THRESHOLD='64 MB': expected a whole number"):
        hvd.init()
    assert not hvd.is_initialized()


@pytest.mark.full("further")
@ranks(2, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="30")
def test_a_shutdown_time_below_the_warning_time_is_a_warning() -> None:
    if os.environ["FARANDOLE_RANK"] == "0":
        with pytest.warns(RuntimeWarning, match="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=30 has no effect"):
            hvd.init()
    else:
        hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
