"""Gradients through the operations, with Horovod's factors."""

from __future__ import annotations

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.ranks.pool import ranks


def leaf(*shape: int) -> torch.Tensor:
    """Return ones that want a gradient."""
    return torch.ones(*shape, requires_grad=True)


@ranks(2)
def test_allreduce() -> None:
    hvd.init()
    upstream = torch.full((3, 2), float(hvd.rank() + 1))
    for op, expected in ((hvd.Sum, 3.0), (hvd.Average, 1.5)):
        x = leaf(3, 2)
        hvd.allreduce(x, op=op).backward(upstream)
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3, 2), expected))
    x = leaf(3, 2)
    hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 2), 1.5))
    x = leaf(3, 2)
    hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 2), 3.0))
    x = leaf(3, 2)
    hvd.allreduce(x, compression=hvd.Compression.int8, op=hvd.Sum).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 2), 3.0))
    hvd.allreduce(torch.ones(2)).sum().requires_grad_().backward()  # nothing to pass on


@ranks(2)
def test_grouped_allreduce() -> None:
    hvd.init()
    for compression in (hvd.Compression.none, hvd.Compression.bf16):
        xs = [leaf(3), leaf(2, 2)]
        a, b = hvd.grouped_allreduce(xs, op=hvd.Sum, compression=compression)
        (a.sum() * (hvd.rank() + 1) + 2 * b.sum()).backward()
        assert xs[0].grad is not None
        assert xs[1].grad is not None
        assert xs[0].grad.tolist() == [3.0] * 3
        assert xs[1].grad.tolist() == [[4.0] * 2] * 2


@ranks(3)
def test_allgather_averages() -> None:
    hvd.init()
    rank = hvd.rank()
    x = leaf(rank + 1, 2)
    gathered = hvd.allgather(x)
    weights = torch.arange(6.0)[:, None].expand(6, 2) * (rank + 1)
    gathered.backward(weights)
    begin = rank * (rank + 1) // 2
    expected = torch.arange(begin, begin + rank + 1.0)[:, None].expand(-1, 2) * 2  # the mean of 1, 2 and 3
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    xs = [leaf(rank + 1, 2), leaf(1)]
    first, second = hvd.grouped_allgather(xs)
    (first * weights).sum().backward(retain_graph=True)
    assert xs[0].grad is not None
    assert torch.equal(xs[0].grad, expected)
    second.sum().backward()
    assert xs[1].grad is not None
    assert xs[1].grad.tolist() == [1.0]


@pytest.mark.full("further")
@ranks(3)
def test_broadcast() -> None:
    hvd.init()
    x = leaf(4)
    hvd.broadcast(x, root_rank=1).backward(torch.full((4,), float(hvd.rank())))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0 if hvd.rank() == 1 else 0.0] * 4


@ranks(3)
def test_alltoall_goes_back() -> None:
    hvd.init()
    rank = hvd.rank()
    x = leaf(6, 1)
    output, _ = hvd.alltoall(x, [1, 2, 3])
    output.backward(torch.full_like(output, float(rank)))
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    x = leaf(3)
    hvd.alltoall(x).backward(torch.full((3,), float(rank)))
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 2.0]


@ranks(2)
def test_rows_that_alltoall_leaves_behind_have_no_gradient() -> None:
    hvd.init()
    x = leaf(4, 2)
    output, _ = hvd.alltoall(x, [1, 2])  # the last row goes nowhere
    output.backward(torch.full_like(output, 2.0 + hvd.rank()))
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [2.0, 3.0, 3.0, 0.0]


@ranks(2)
def test_reducescatter_gathers() -> None:
    hvd.init()
    for op, factor in ((hvd.Sum, 2.0), (hvd.Average, 1.0)):
        x = leaf(3, 2)
        part = hvd.reducescatter(x, op=op)
        part.backward(torch.full_like(part, hvd.rank() + 1.0))
        expected = torch.tensor([1.0, 1.0, 2.0])[:, None].expand(3, 2) * factor
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
        x = leaf(3, 2)
        hvd.grouped_reducescatter([x], op=op)[0].backward(torch.full_like(part, hvd.rank() + 1.0))
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


@ranks(3)
def test_in_a_process_set() -> None:
    odd = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[odd])
    if not odd.included():
        return
    x = leaf(2)
    hvd.allreduce(x, op=hvd.Sum, process_set=odd).backward(torch.full((2,), float(hvd.rank())))
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    x = leaf(1)
    hvd.allgather(x, process_set=odd).backward(torch.tensor([10.0, 20.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [20.0 if hvd.rank() else 10.0]
