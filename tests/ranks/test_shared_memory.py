"""All-reduce in shared memory: right sums, the same bits on all, and nothing left when a rank dies."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

import farandole as fd
from farandole.comm.transport import host_memory
from farandole.comm.transport.shared_tensor import SharedMemory, SharedTensor, Unavailable
from farandole.comm.world.store_sync import all_gather_json
from tests.leftovers import left_in_memory, memory_names
from tests.native import needs_compiler
from tests.ranks.pool import _place, free_port, fresh, patient, ranks
from tests.ranks.started import started

SIZES = (0, 1, 7, 1000, 1_000_000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def connect(timeout_seconds: float = 10.0) -> SharedMemory:
    return SharedMemory.connect(fd.init(), timeout_seconds=timeout_seconds)


def values(rank: int, elements: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    """Whole numbers so small that every order of summing them is exact."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-9, 10, (elements,), generator=generator).to(dtype)


def total(size: int, elements: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    return torch.stack([values(rank, elements, dtype, turn) for rank in range(size)]).sum(0, dtype=dtype)


@pytest.mark.full("further")
@ranks(2, 3, 4)
def test_sums() -> None:
    memory = connect()
    for dtype in DTYPES:
        for elements in SIZES:
            shared = memory.allocate(elements, dtype)
            assert shared.mine.shape == (elements,)
            assert shared.mine.dtype == dtype
            assert not shared.mine.any()
            assert shared.mine.data_ptr() % 64 == 0
            assert len(shared.parts) == memory.local_size
            for turn in range(3):
                shared.mine.copy_(values(memory.local_rank, elements, dtype, turn))
                shared.all_reduce()
                assert shared.mine.equal(total(memory.local_size, elements, dtype, turn)), (dtype, elements)


@needs_compiler
@ranks(3)
def test_native_loops_give_the_same_bits() -> None:
    """With loops on all ranks, on one, on none: sums whose order shows."""
    memory = connect()
    for elements in (5000, 300_001):
        found = []
        for those_with in ([0, 1, 2], [1], []):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FARANDOLE_NATIVE", "1" if memory.local_rank in those_with else "0")
                shared = memory.allocate(elements, torch.float32)
            assert (shared._sum_slices is not None) == (memory.local_rank in those_with)
            generator = torch.Generator().manual_seed(memory.local_rank)
            mine = torch.randn(elements, generator=generator) * 10.0 ** (3 * memory.local_rank)
            shared.mine.copy_(mine)
            shared.all_reduce()
            reduced = shared.mine.clone()
            shared.mine.copy_(mine)
            shared.reduce_scatter()
            shared.all_gather()
            assert shared.mine.equal(reduced)
            found.append(reduced)
        assert found[0].equal(found[1])
        assert found[0].equal(found[2])


@ranks(3)
def test_all_have_the_same_bits() -> None:
    memory = connect()
    for dtype in (torch.float32, torch.bfloat16):
        for elements in (1000, 300_001):
            shared = memory.allocate(elements, dtype)
            torch.manual_seed(memory.local_rank)
            mine = torch.randn(elements).to(dtype)
            shared.mine.copy_(mine)
            shared.all_reduce()
            result = shared.mine.clone()
            shared.mine.copy_(result)
            shared.all_gather()  # a barrier: all have their result in place
            assert all(part.view(torch.uint8).equal(result.view(torch.uint8)) for part in shared.parts)
            shared.all_gather()
            shared.mine.copy_(mine)
            shared.reduce_scatter()
            shared.all_gather()
            if elements > 1000:  # a small tensor is summed in another order
                assert shared.mine.equal(result)


@ranks(3)
def test_slices_cover_the_tensor_and_hold_the_sum() -> None:
    memory = connect()
    for elements in SIZES:
        shared = memory.allocate(elements, torch.float32)
        bounds = [shared.slice_bounds(i) for i in range(3)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == elements
        assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
        assert all(begin % 16 == 0 or begin == elements for begin, _ in bounds)
        begin, end = bounds[memory.local_rank]
        shared.mine.copy_(values(memory.local_rank, elements, torch.float32))
        slice_ = shared.reduce_scatter()
        sum_ = total(3, elements, torch.float32)
        assert slice_.equal(sum_[begin:end])
        slice_.mul_(2)
        shared.all_gather()
        assert shared.mine.equal(2 * sum_)


@pytest.mark.gate_cases("True")
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
@pytest.mark.parametrize("by_node", [True, False])
def test_ranks_of_two_hosts(by_node: bool) -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    node, local = (rank // 2, rank % 2) if by_node else (rank % 2, rank // 2)
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = str(local), str(node)
    memory = connect()
    assert (memory.local_rank, memory.local_size) == (local, 2)
    shared = memory.allocate(50_000, torch.int64)
    shared.mine.fill_(1 + rank)
    shared.all_reduce()
    assert set(shared.mine.tolist()) == {2 + sum(r for r in range(4) if (r // 2 if by_node else r % 2) == node)}


@pytest.mark.full("further")
@ranks(3)
def test_a_thousand_times() -> None:
    memory = connect()
    large, small = memory.allocate(30_000, torch.float32), memory.allocate(11, torch.float32)
    for turn in range(1000):
        for shared in (large, small) if turn % 3 else (small, small, large):
            shared.mine.fill_(turn + memory.local_rank)
            shared.all_reduce()
            assert shared.mine.eq(3 * turn + 3).all()


@pytest.mark.full("slow")
@ranks(2)
@fresh
def test_connecting_and_allocating_leaves_nothing_open() -> None:
    world = fd.init()
    gc.collect()  # what earlier tests of this process left to the collector
    before = mappings()
    me = psutil.Process()
    files = me.num_fds()
    for _ in range(3):
        memory = SharedMemory.connect(world, timeout_seconds=5)
        kept = [memory.allocate(5000, torch.float32) for _ in range(20)]
        assert me.num_fds() <= files + 2 * 21 + 1  # my own memory, the last turn's too, and the other's process
        memory.close()
        memory.close()
        kept[0].mine.fill_(1)  # still there
    del kept, memory
    gc.collect()
    assert me.num_fds() <= files
    assert mappings() <= before


def mappings() -> set[str]:
    """Return the places at which this process has shared memory of ours."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "memfd:farandole" in line}


@pytest.mark.full("further")
@ranks(2)
def test_waiting_takes_no_processor() -> None:
    memory = connect()
    shared = memory.allocate(7, torch.float32)
    shared.all_reduce()
    if memory.local_rank == 1:
        time.sleep(1)
    begin, busy = time.monotonic(), time.thread_time()
    shared.all_reduce()
    if memory.local_rank == 0:
        assert time.monotonic() - begin > 0.5
        assert time.thread_time() - busy < 0.2


@pytest.mark.full("slow")
@ranks(3)
def test_a_rank_that_never_comes() -> None:
    world = fd.init()
    memory = connect(0.4)
    shared = memory.allocate(100_000, torch.float32)
    if world.rank == 2:
        all_gather_json(world, "late", 0)
        with pytest.raises(fd.PeerLost, match=r"rank 0 on .* is gone: it left"):
            shared.all_reduce()
        return
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(fd.Stalled, match=r"all_reduce of .*: rank 2 on .* did not get here within 0.4 s"):
            shared.all_reduce()
    assert 0.4 <= time.monotonic() - begin < 2
    all_gather_json(world, "late", 0)


@ranks(2)
def test_a_rank_that_left() -> None:
    memory = connect()
    shared = memory.allocate(5, torch.float32)
    if memory.local_rank == 1:
        memory.close()
        with pytest.raises(fd.CommError, match="closed"):
            shared.all_reduce()
        return
    with pytest.raises(fd.PeerLost, match=r"rank 1 on .* is gone: it left"):
        shared.all_reduce()


@ranks(2)
def test_another_size_or_type_is_refused() -> None:
    memory = connect()
    with pytest.raises(fd.Mismatch, match="elements is 5 on rank 0, 6 on rank 1"):
        memory.allocate(5 + memory.local_rank, torch.float32)
    with pytest.raises(fd.Mismatch, match="dtype is"):
        memory.allocate(5, (torch.float32, torch.int32)[memory.local_rank])
    with pytest.raises(fd.ConfigError, match="-1 elements"):
        memory.allocate(-1, torch.float32)
    shared = memory.allocate(5, torch.float32)
    shared.mine.fill_(1)
    shared.all_reduce()
    assert shared.mine.tolist() == [2] * 5


@ranks(2)
@pytest.mark.parametrize("what", ["tensor", "operation"])
def test_another_order_is_refused(what: str) -> None:
    memory = connect()
    a, b = memory.allocate(5, torch.float32), memory.allocate(5, torch.float32)
    calls: list[Callable[[SharedTensor], object]] = [SharedTensor.all_reduce, SharedTensor.all_gather]
    call = calls[memory.local_rank if what == "operation" else 0]
    with pytest.raises(fd.Mismatch, match=r"is at \w+ of shared tensor [12].* at \w+ of shared tensor [12]"):
        call(b if memory.local_rank and what == "tensor" else a)


@ranks(2, FARANDOLE_LOCAL_SIZE="1", FARANDOLE_NODE_COUNT="2", FARANDOLE_LOCAL_RANK="0")
def test_one_rank_a_host_has_nobody_to_share_with() -> None:
    os.environ["FARANDOLE_NODE_RANK"] = os.environ["FARANDOLE_RANK"]
    with pytest.raises(Unavailable, match="rank 0 is alone on"):
        connect()


@ranks(1)
def test_one_rank_alone() -> None:
    with pytest.raises(Unavailable, match="rank 0 is alone on"):
        connect()


@pytest.mark.gate_cases("machine")
@ranks(3)
@pytest.mark.parametrize("obstacle", ["machine", "descriptor", "process", "container"])
def test_an_obstacle_on_one_rank_is_told_on_all(obstacle: str) -> None:
    world = fd.init()

    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1 and obstacle == "machine":
            patch.setattr("platform.machine", lambda: "aarch64")
        elif world.rank == 1 and obstacle == "descriptor":
            patch.setattr(host_memory, "_map", forbidden)
        elif world.rank == 1 and obstacle == "process":
            patch.setattr("os.pidfd_open", forbidden)
        elif world.rank == 1:
            patch.setattr("pathlib.Path.readlink", lambda _: "pid:[1]")
        said = {
            "machine": "is aarch64, not x86-64",
            "descriptor": "rank 1 on .* cannot share memory: .*Permission denied",
            "process": "rank 1 on .* cannot watch its peers: .*Permission denied",
            "container": "do not run in one system",
        }
        files = psutil.Process().num_fds()
        with pytest.raises(Unavailable, match=said[obstacle]):
            SharedMemory.connect(world, timeout_seconds=5)
        assert psutil.Process().num_fds() <= files
    assert SharedMemory.connect(world, timeout_seconds=5).local_size == 3


_WORKER = """
import sys, time, torch
from farandole.comm.transport.shared_tensor import SharedMemory
from farandole.comm.world.connect import connect
from farandole.core.vocabulary.errors import PeerLost
torch.set_num_threads(1)
memory = SharedMemory.connect(connect(), timeout_seconds=30)
shared = memory.allocate(int(sys.argv[1]), torch.float32)
shared.all_reduce()
print("ready", flush=True)
try:
    while True:
        shared.all_reduce()
except PeerLost as problem:
    print(time.time(), problem, flush=True)
"""


@pytest.mark.full("further")
@patient
@pytest.mark.parametrize("elements", [100, 5_000_000])
def test_a_killed_rank_is_noticed_and_leaves_nothing(elements: int, tmp_path: Path) -> None:
    port = free_port()
    before = memory_names()
    places = [_place(rank, 3, port) for rank in range(3)]
    with started(tmp_path, ["-c", _WORKER, str(elements)], places) as workers:
        for worker in workers:
            worker.wait_for("ready")
        time.sleep(0.3)
        killed = time.time()
        workers[1].process.kill()
        for rank in (0, 2):
            workers[rank].process.wait(20)
            at, _, said = workers[rank].out.splitlines()[-1].partition(" ")
            assert float(at) - killed < 1
            assert f"rank {rank}, all_reduce of shared tensor 1" in said
            assert "rank 1 on " in said
            assert "is gone: its process has ended" in said
    assert not list((tmp_path / "work").iterdir())
    assert not left_in_memory(before)
