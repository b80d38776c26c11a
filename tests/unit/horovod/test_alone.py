"""A world of one: every operation, and what is said before `init`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.core.rank_variables import RANK_LAUNCHERS


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for launcher in RANK_LAUNCHERS:
        assert launcher.ranks is not None
        for name in (*launcher.ranks.rank, *launcher.ranks.size):
            monkeypatch.delenv(name, raising=False)
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    "question",
    [
        hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
        hvd.mpi_threads_supported,
        hvd.mpi_ops.is_homogeneous, hvd.stop_timeline, hvd.barrier, hvd.join, lambda: hvd.start_timeline("x"),
        lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.add_process_set([0]), hvd.global_process_set.size,
        lambda: hvd.remove_process_set(hvd.global_process_set), lambda: hvd.broadcast_object(1),
    ],
)  # fmt: skip
def test_before_init(question: Callable[[], Any]) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."):
        question()


def test_what_is_built() -> None:
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    for absent in (hvd.mpi_built, hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built):
        assert absent() is False
    assert type(hvd.nccl_built()) is int
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert hvd._check_has_gpu() == torch.cuda.is_available()
    hvd.init()
    with pytest.raises(ValueError, match="Horovod MPI is not enabled"):
        hvd.mpi_threads_supported()


def test_every_operation() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        result = hvd.allreduce(x, op=op)
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    assert torch.equal(hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0), 6 * x)
    assert torch.equal(hvd.allreduce(x, compression=hvd.Compression.int8), x), "nothing is sent by a codec"
    assert hvd.allreduce_(x) is x
    assert torch.equal(hvd.grouped_allreduce([x, x])[1], x)
    assert torch.equal(hvd.allgather(x), x)
    assert torch.equal(hvd.broadcast(x, 0), x)
    assert torch.equal(hvd.alltoall(x), x)
    assert hvd.alltoall(x, [1])[1].tolist() == [1]
    assert torch.equal(hvd.reducescatter(x), x)
    assert torch.equal(hvd.sparse_allreduce_async(x.to_sparse(), "s", hvd.Sum)().to_dense(), x)
    assert hvd.join() == 0
    hvd.barrier()
    assert hvd.broadcast_object({1: "a"}) == {1: "a"}
    assert hvd.allgather_object("a") == ["a"]
    with pytest.raises(ValueError, match="invalid root rank 1"):
        hvd.broadcast(x, 1)
    weights = torch.ones(2, requires_grad=True)
    hvd.allreduce(weights, op=hvd.Sum).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [1.0, 1.0]


@pytest.mark.full("further")
def test_a_thousand_times() -> None:
    def things() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    for turn in range(1000):
        hvd.init()
        hvd.allreduce(torch.ones(1))
        hvd.shutdown()
        if turn == 10:
            before = things()
    assert things() == before
