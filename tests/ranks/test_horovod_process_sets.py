"""Process sets: registered at the start, added and removed, operations inside them."""

from __future__ import annotations

import time

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.ranks.pool import ranks


@pytest.mark.full("further")
@ranks(3)
def test_sets_of_init() -> None:
    even, pair = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1, 2])
    assert even.ranks == [0, 2]
    assert (even.process_set_id, even.size(), even.rank()) == (None, None, None)
    hvd.init(process_sets=[even, pair])
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1, 2]}
    assert (even.process_set_id, pair.process_set_id) == (1, 2)
    assert str(even) == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
    assert even.size() == 2
    assert even.included() == (hvd.rank() != 1)
    assert hvd.global_process_set.ranks == [0, 1, 2]
    assert hvd.global_process_set.size() == 3
    assert hvd.global_process_set.rank() == hvd.rank()
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="Process is not part of provided process set"):
            even.rank()
    else:
        assert even.rank() == hvd.rank() // 2
    with pytest.raises(ValueError, match="Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding"):
        hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match="Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow removing"):
        hvd.remove_process_set(even)
    hvd.shutdown()
    assert even.process_set_id == 1
    for question in (even.size, even.rank, even.included):
        with pytest.raises(ValueError, match="has not been initialized"):
            question()
    hvd.init(process_sets=[pair])  # another numbering
    assert pair.process_set_id == 1
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [1, 2]}


@ranks(2)
def test_sets_twice_and_the_next_init() -> None:
    for sets in (
        [hvd.ProcessSet([0]), hvd.ProcessSet([1]), hvd.ProcessSet([0])],
        [hvd.ProcessSet([0, 1])],
    ):
        with pytest.raises(
            ValueError, match=rf"process_sets entry number {len(sets) - 1} is a duplicate: ProcessSet"
        ):
            hvd.init(process_sets=sets)
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="expected ranks from 0 to 1"):
        hvd.init(process_sets=[hvd.ProcessSet([0, 5])])
    with pytest.raises(ValueError, match="a rank is there twice"):
        hvd.init(process_sets=[hvd.ProcessSet([1, 1])])
    with pytest.raises(ValueError, match="expected a list of ProcessSet objects or 'dynamic'"):
        hvd.init(process_sets="static")
    hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([1])])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


@ranks(3)
def test_sets_that_come_and_go() -> None:
    hvd.init(process_sets="dynamic")
    pair = hvd.add_process_set([0, 1])
    assert pair.process_set_id == 1
    alone = hvd.add_process_set(hvd.ProcessSet([2]))
    assert alone.process_set_id == 2
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        hvd.add_process_set([1, 0])
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        hvd.add_process_set(range(3))
    if pair.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2.0
    assert hvd.remove_process_set(pair) is True
    assert str(pair).startswith("ProcessSet(process_set_id=None")
    assert hvd.remove_process_set(pair) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    with pytest.raises(
        ValueError, match="Allreduce: Process set provided does not exist, or has not been registered"
    ):
        hvd.allreduce(torch.ones(1), process_set=pair)
    again = hvd.add_process_set([1, 2])
    assert again.process_set_id == 1  # the lowest free number
    if again.included():
        assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=again).tolist() == [1, 2]
    for _ in range(20):
        each = hvd.add_process_set([0, 2])
        if each.included():
            assert hvd.broadcast(torch.tensor(hvd.rank()), 2, process_set=each).item() == 2
        assert hvd.remove_process_set(each)


@ranks(2, HOROVOD_DYNAMIC_PROCESS_SETS="1")
def test_dynamic_by_variable() -> None:
    hvd.init()
    assert hvd.add_process_set([1]).process_set_id == 1


@pytest.mark.full("slow")
@ranks(4)
def test_every_operation_inside_a_set() -> None:
    left, right = hvd.ProcessSet([0, 3]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[left, right])
    mine, other = (left, right) if left.included() else (right, left)
    place, rank = mine.rank(), hvd.rank()
    assert place is not None
    assert mine.ranks is not None
    total = sum(mine.ranks)
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine).item() == total
    assert hvd.allreduce_(torch.tensor([float(rank)]), process_set=mine).item() == total / 2
    grouped = hvd.grouped_allreduce([torch.tensor([rank])] * 2, op=hvd.Sum, process_set=mine)
    assert [each.item() for each in grouped] == [total, total]
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
    assert hvd.grouped_allgather([torch.tensor([rank])], process_set=mine)[0].tolist() == mine.ranks
    root = mine.ranks[1]  # a rank of the job, not of the set
    assert hvd.broadcast(torch.tensor(rank), root, process_set=mine).item() == root
    output, splits = hvd.alltoall(torch.tensor([rank, rank, rank]), [1, 2], process_set=mine)
    assert output.tolist() == [r for r in mine.ranks for _ in range(place + 1)]
    assert splits.tolist() == [place + 1] * 2
    part = hvd.reducescatter(torch.tensor([[1], [2], [3]]), op=hvd.Sum, process_set=mine)
    assert part.tolist() == [[[2], [4]], [[6]]][place]
    hvd.barrier(mine)
    assert hvd.broadcast_object({"root": rank}, root, process_set=mine) == {"root": root}
    operations = {
        "Allreduce": lambda: hvd.allreduce(torch.ones(2), process_set=other),
        "Allgather": lambda: hvd.allgather(torch.ones(2), process_set=other),
        "Broadcast": lambda: hvd.broadcast(torch.ones(2), 0, process_set=other),
        "Alltoall": lambda: hvd.alltoall(torch.ones(2), process_set=other),
        "Reducescatter": lambda: hvd.reducescatter(torch.ones(2), process_set=other),
        "Barrier": lambda: hvd.barrier(other),
    }
    for name, call in operations.items():
        with pytest.raises(ValueError, match=f"{name}: Rank {rank} is not a member of the provided process set"):
            call()
    unregistered = hvd.ProcessSet([0, 1, 2])
    with pytest.raises(
        ValueError, match="Allgather: Process set provided does not exist, or has not been registered"
    ):
        hvd.allgather(torch.ones(1), process_set=unregistered)
    with pytest.raises(ValueError, match=f"invalid root rank {other.ranks[0]} for provided process set"):
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    # Everybody again, after the sets ran different numbers of operations.
    if left.included():
        hvd.allreduce(torch.ones(1), process_set=left)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4.0


@ranks(3)
def test_a_barrier_blocks_its_set_alone() -> None:
    slow, fast = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])
    hvd.init(process_sets=[slow, fast])
    hvd.barrier()
    began = time.monotonic()
    if hvd.rank() == 0:
        time.sleep(1.0)
    hvd.barrier(fast if hvd.rank() == 2 else slow)
    waited = time.monotonic() - began
    assert waited < 0.8 if hvd.rank() == 2 else waited > 0.8
