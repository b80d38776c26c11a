"""The operations of Horovod's names for PyTorch, on real ranks: results, types, forms, errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.horovod.common.exceptions import HorovodMismatchError
from farandole.horovod.named_ops.operations import Request
from farandole.horovod.torch.ops.handles import handles, synchronize
from tests.ranks.pool import ranks

ADDED = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
MOVED = [*ADDED, torch.bool, torch.uint16, torch.float8_e4m3fn]


def numbers(rank: int, shape: tuple[int, ...] = (17, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers that every type holds, different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 10, shape, generator=generator).to(dtype)


def everybody(shape: tuple[int, ...] = (17, 3), dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [numbers(rank, shape, dtype) for rank in range(hvd.size())]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of any type are equal bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def failing(call: Callable[[], Any], kind: type[Exception], *texts: str) -> Exception:
    """Return the error of `call`, which must be a `kind` and say all `texts`."""
    with pytest.raises(kind) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in {str(caught.value)!r}"
    return caught.value


@ranks(2)
def test_what_one_rank_refuses_can_be_tried_again_without_a_name() -> None:
    hvd.init()
    mine = numbers(hvd.rank(), (3, 4))
    for refused in (lambda: hvd.allreduce(mine.T, op=hvd.Sum), lambda: hvd.allgather(mine.T)):
        if hvd.rank() == 0:
            failing(refused, ValueError, "contiguous")
        assert same(hvd.allreduce(mine, op=hvd.Sum, name="between"), torch.stack(everybody((3, 4))).sum(0))
        assert same(hvd.allreduce(mine, op=hvd.Sum), torch.stack(everybody((3, 4))).sum(0))
        assert same(hvd.allgather(mine), torch.cat(everybody((3, 4))))


@ranks(2)
def test_sums_of_every_type_and_shape() -> None:
    hvd.init()
    handles = []
    for dtype in ADDED:
        for shape in ((), (1,), (17,), (17, 17), (2, 3, 5), (0,), (3, 0)):
            mine = numbers(hvd.rank(), shape, dtype)
            before = mine.clone()
            expected = sum(everybody(shape, dtype)[1:], start=numbers(0, shape, dtype))
            for operation in (hvd.allreduce_async, hvd.allreduce_async_):
                given = mine.clone()
                handle = operation(given, op=hvd.Sum, name=f"{dtype}.{shape}.{operation.__name__}")
                handles.append((handle, given, before, expected, operation is hvd.allreduce_async_))
    for handle, given, before, expected, in_place in handles:
        result = hvd.synchronize(handle)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
        assert (result is given) is in_place
        assert in_place or torch.equal(given, before)


@pytest.mark.full("further")
@ranks(3)
def test_averages_are_those_of_horovod() -> None:
    hvd.init()
    for dtype in (torch.float32, torch.float64):
        mine = torch.randn(1000, dtype=dtype, generator=torch.Generator().manual_seed(hvd.rank()))
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert torch.equal(hvd.allreduce(mine), (total.double() / 3).to(dtype))
    integers = torch.tensor([1, -1, 2, -2, 100, -100]) * (1 if hvd.rank() else 2)
    assert hvd.allreduce(integers).tolist() == [1, -1, 2, -2, 133, -133]  # cut towards zero
    half = hvd.allreduce(torch.full((4,), 30000.0, dtype=torch.float16))
    assert half.tolist() == [30000.0] * 4  # added up in float32: the sum would be infinite


@ranks(2)
def test_the_other_reductions() -> None:
    hvd.init()
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        stack = torch.stack(everybody((5, 4), dtype))
        mine = stack[hvd.rank()]
        for op, expected in (
            (hvd.Min, stack.amin(0)),
            (hvd.Max, stack.amax(0)),
            (hvd.Product, stack[0] * stack[1]),
        ):
            assert torch.equal(hvd.allreduce(mine, op=op), expected), (dtype, op)
            assert torch.equal(hvd.grouped_allreduce([mine, mine], op=op)[1], expected)
    truth = torch.tensor([True, True, False, False]) if hvd.rank() else torch.tensor([True, False, True, False])
    assert hvd.allreduce(truth, op=hvd.Max).tolist() == [True, True, True, False]
    assert hvd.allreduce(truth, op=hvd.Min).tolist() == [True, False, False, False]
    # Orthogonal gradients add up, equal ones average.
    unit = torch.zeros(2).index_fill_(0, torch.tensor([hvd.rank()]), 1.0)
    assert torch.allclose(hvd.allreduce(unit, op=hvd.Adasum), torch.ones(2))
    assert torch.allclose(hvd.allreduce(torch.ones(3), op=hvd.Adasum), torch.ones(3))


@ranks(2)
def test_scales_before_and_after() -> None:
    hvd.init()
    mine = numbers(hvd.rank(), dtype=torch.float32)
    total = sum(everybody()[1:], start=everybody()[0])
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(scaled, total * 2)
    assert torch.equal(hvd.allreduce_(mine.clone(), prescale_factor=2.0), total)
    scaled = hvd.grouped_allreduce([mine], op=hvd.Sum, postscale_factor=0.25)[0]
    assert torch.equal(scaled, total / 4)
    integers = torch.tensor([7, 9]).int()
    assert hvd.allreduce(integers, op=hvd.Sum, prescale_factor=0.5).tolist() == [6, 8]
    part = hvd.reducescatter(torch.ones(2, 2), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5)
    assert part.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("count", [200, 300_000])  # a small operation, and one of the data plane
@ranks(2)
def test_factors_of_float32_are_float32_and_averages_exact(count: int) -> None:
    hvd.init()
    x, size = torch.linspace(-100, 100, count), hvd.size()
    factor = 0.1915194503788923
    rounded = torch.tensor(factor, dtype=torch.float32)
    assert not torch.equal(x * rounded, (x.double() * factor).float())
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=factor), x * rounded * size)
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum, postscale_factor=factor), (x * size) * rounded)
    part = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=factor)
    assert torch.equal(part, (x * rounded * size).chunk(2)[hvd.rank()])
    mine = x * (1 + hvd.rank())
    assert torch.equal(hvd.allreduce(mine), (x + 2 * x) / size)
    double = x.double()
    assert torch.equal(hvd.allreduce(double, op=hvd.Sum, prescale_factor=factor), double * factor * size)


@ranks(2)
def test_average_argument_of_old() -> None:
    hvd.init()
    one = torch.ones(2)
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        assert hvd.allreduce(one, average=False).tolist() == [2.0, 2.0]
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        assert hvd.allreduce_(one, True).tolist() == [1.0, 1.0]
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        assert hvd.synchronize(hvd.grouped_allreduce_async([one], average=False))[0].tolist() == [2.0, 2.0]
    failing(lambda: hvd.allreduce(one, average=True, op=hvd.Sum), ValueError, "op parameter supersedes average")


@ranks(2)
def test_groups_are_all_or_nothing_and_in_order() -> None:
    hvd.init()
    mine = [numbers(hvd.rank() + 10 * i, (i + 1, 2)) for i in range(5)]
    expected = [numbers(10 * i, (i + 1, 2)) + numbers(1 + 10 * i, (i + 1, 2)) for i in range(5)]
    results = hvd.grouped_allreduce(mine, op=hvd.Sum, name="group")
    assert isinstance(results, list)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    copies = [each.clone() for each in mine]
    in_place = hvd.grouped_allreduce_(copies, op=hvd.Sum)
    assert all(a is b and torch.equal(a, c) for a, b, c in zip(in_place, copies, expected, strict=True))
    handle = hvd.grouped_allreduce_async_([each.clone() for each in mine], op=hvd.Sum)
    assert isinstance(handle, int)
    assert torch.equal(hvd.synchronize(handle)[4], expected[4])
    gathered = hvd.grouped_allgather([mine[0], mine[2]])
    assert [tuple(each.shape) for each in gathered] == [(2, 2), (6, 2)]
    parts = hvd.grouped_reducescatter([mine[1], mine[3]], op=hvd.Sum)
    assert torch.equal(parts[1], expected[3][2 * hvd.rank() : 2 * hvd.rank() + 2])
    failing(lambda: hvd.grouped_allreduce([]), ValueError, "at least one tensor")
    # Large ones of several types.
    sizes = {torch.float32: 50_000, torch.int64: 60_000, torch.float16: 70_000}
    unlike = [torch.full((size,), i + hvd.rank(), dtype=dtype) for i, (dtype, size) in enumerate(sizes.items())]
    for i, (dtype, size) in enumerate(sizes.items()):
        result = hvd.grouped_allreduce(unlike, op=hvd.Sum)[i]
        assert torch.equal(result, torch.full((size,), 2 * i + 1, dtype=dtype))
    # One member of the group disagrees: none of it runs, and the job goes on.
    wrong = [torch.ones(2), torch.ones(3 + hvd.rank())]
    failing(lambda: hvd.grouped_allreduce(wrong, name="wrong"), hvd.HorovodInternalError)
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@pytest.mark.full("further")
@ranks(2)
def test_handles() -> None:
    hvd.init()
    handles = [hvd.allreduce_async(torch.ones(100_000), op=hvd.Sum) for _ in range(15)]
    assert all(isinstance(handle, int) for handle in handles)
    assert len(set(handles)) == 15
    deadline = time.monotonic() + 10
    while not all(hvd.poll(handle) for handle in handles):  # nobody synchronizes: they progress on their own
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [2.0] * 15
    assert hvd.synchronize(handles[0]) is None
    failing(lambda: hvd.poll(handles[0]), ValueError, f"Handle {handles[0]} was not created or has been cleared.")
    failing(lambda: hvd.poll(12345), ValueError, "Handle 12345 was not created or has been cleared.")
    # An operation that the other rank has not asked for yet is not done.
    if hvd.rank() == 0:
        early = hvd.allreduce_async(torch.ones(1), name="early")
        assert hvd.poll(early) is False
        hvd.barrier()
    else:
        hvd.barrier()
        early = hvd.allreduce_async(torch.ones(1), name="early")
    assert hvd.synchronize(early).item() == 1.0


@ranks(2)
def test_names_are_matched_in_any_order() -> None:
    hvd.init()
    order = range(20) if hvd.rank() else reversed(range(20))
    handles = {i: hvd.allreduce_async(torch.full((3,), float(i)), name=f"x{i}", op=hvd.Sum) for i in order}
    assert all(hvd.synchronize(handle)[0].item() == 2 * i for i, handle in handles.items())


@pytest.mark.full("further")
@ranks(2)
def test_a_name_in_flight_is_refused_and_the_first_completes() -> None:
    hvd.init()
    if hvd.rank() == 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        failing(
            lambda: hvd.allreduce_async(torch.ones(2), name="twice"),
            ValueError,
            "with the same name as another tensor that is currently being processed",
        )
        hvd.barrier()
    else:
        hvd.barrier()
        first = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    assert hvd.synchronize(first).tolist() == [2.0, 2.0]
    assert hvd.allreduce(torch.ones(1), name="twice").item() == 1.0


@pytest.mark.parametrize("count", [2, 300_000])
@ranks(2)
def test_a_name_is_taken_on_every_rank_until_it_is_waited_for(count: int) -> None:
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(count), name="twice", op=hvd.Sum)
    for _ in range(2):
        failing(lambda: hvd.allreduce_async(torch.ones(count), name="twice"), ValueError, "with the same name as")
    hvd.barrier()  # complete on all ranks
    failing(lambda: hvd.allreduce_async(torch.ones(count), name="twice"), ValueError, "has not been synchronized")
    assert hvd.synchronize(handle)[0].item() == 2.0
    second = hvd.allreduce_async(torch.ones(count), name="twice", op=hvd.Sum)
    while not hvd.poll(second):
        time.sleep(0.001)
    third = hvd.allreduce_async(torch.ones(count), name="twice", op=hvd.Sum)
    assert all(hvd.synchronize(each)[0].item() == 2.0 for each in (second, third))
    # An error frees the names of what was on its way beside it.
    names = [(f"w{i}", torch.ones(2 + (i == 0 and hvd.rank()))) for i in range(3)]
    failing(
        lambda: hvd.broadcast_parameters(names, 0), hvd.HorovodMismatchError, "Mismatched BROADCAST tensor shapes"
    )
    hvd.broadcast_parameters([(name, torch.ones(2)) for name, _ in names], 0)


@pytest.mark.full("further")
@ranks(2)
def test_tensors_that_cannot_travel() -> None:
    hvd.init()
    matrix = torch.ones(3, 4)
    for call in (
        lambda: hvd.allreduce(matrix.t()),
        lambda: hvd.allgather(matrix.t()),
        lambda: hvd.broadcast(matrix.t(), 0),
        lambda: hvd.alltoall(matrix.t()),
        lambda: hvd.reducescatter(matrix.t()),
    ):
        failing(call, ValueError, "Tensor is required to be contiguous.")
    failing(
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)), ValueError, "Tensor type torch.BoolTensor is not"
    )
    failing(lambda: hvd.allreduce(torch.ones(2, dtype=torch.cfloat), op=hvd.Max), ValueError, "is not supported")
    failing(
        lambda: hvd.allreduce(torch.ones(2).to_sparse()), ValueError, "torch.sparse.FloatTensor is not supported"
    )
    failing(lambda: hvd.allreduce([1.0]), ValueError, "expected a tensor, got list")  # type: ignore[arg-type]
    failing(lambda: hvd.allreduce(torch.ones(2), op=17), ValueError, "op=17: expected Average, Sum")
    failing(lambda: hvd.allreduce(torch.ones(2).int(), op=hvd.Adasum), ValueError, "is not supported")
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@ranks(2)
def test_ranks_that_disagree_are_told_and_the_job_goes_on() -> None:
    hvd.init()
    rank = hvd.rank()
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.float32 if rank else torch.int32)),
            "Mismatched data types: One rank had type int32, but another rank had type float32.",
        ),
        (
            lambda: hvd.allreduce(torch.ones(2 + rank)),
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], "
            "but another rank sent a tensor of shape [3].",
        ),
        (lambda: hvd.allreduce(torch.ones(1, *([1] * rank))), "Mismatched ALLREDUCE tensor shapes: One rank sent"),
        (
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if rank else hvd.Max),
            "Mismatched reduction operation: One rank specified",
        ),
        (
            lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank),
            "Mismatched prescale and/or postscale factors: ",
        ),
        (lambda: hvd.broadcast(torch.ones(2 + rank), 0), "Mismatched BROADCAST tensor shapes: One rank sent"),
        (
            lambda: hvd.broadcast(torch.ones(2), rank),
            "Mismatched BROADCAST root ranks: One rank specified root rank 0, "
            "but another rank specified root rank 1.",
        ),
        (lambda: hvd.allgather(torch.ones(2, 2 + rank)), "Mismatched ALLGATHER tensor shapes: One rank sent"),
        (lambda: hvd.allgather(torch.ones(2, dtype=[torch.int, torch.float][rank])), "Mismatched data types: "),
        (lambda: hvd.allgather(torch.tensor(1.0)), "Process-set rank zero tried to ALLGATHER a rank-zero tensor."),
        (lambda: hvd.alltoall(torch.ones(2, 2 + rank)), "Mismatched ALLTOALL tensor shapes: One rank sent"),
        (lambda: hvd.reducescatter(torch.ones(2, 2 + rank)), "Mismatched REDUCESCATTER tensor shapes: "),
    ]
    for call, text in cases:
        error = failing(call, RuntimeError, text)
        assert isinstance(error, hvd.HorovodInternalError)
        assert isinstance(error, HorovodMismatchError)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    # Two kinds of operation under one name: the front end's names differ, so ask the engine itself.
    mixed = Request("mixed", "allgather" if rank else "allreduce", torch.ones(2))
    failing(
        lambda: synchronize(handles.submit([mixed], list)),
        HorovodMismatchError,
        "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER.",
    )


@ranks(3)
def test_allgather_of_every_type() -> None:
    hvd.init()
    for dtype in MOVED:
        given = [numbers(rank, (rank + 1, 2), dtype) for rank in range(3)]
        expected = torch.cat([each.float() if dtype.itemsize < 4 else each for each in given]).to(dtype)
        assert same(hvd.allgather(given[hvd.rank()]), expected), dtype
    nothing_from_one = torch.ones(0 if hvd.rank() == 1 else 2, 3)
    assert hvd.allgather(nothing_from_one).shape == (4, 3)
    assert hvd.allgather(torch.ones(0, 3)).shape == (0, 3)


@ranks(3)
def test_broadcast_of_every_type_from_every_root() -> None:
    hvd.init()
    for root in range(3):
        for dtype in MOVED:
            mine, expected = numbers(hvd.rank(), (2, 3), dtype), numbers(root, (2, 3), dtype)
            before = mine.clone()
            received = hvd.broadcast(mine, root)
            assert same(received, expected)
            assert received is not mine
            assert same(mine, before)
            assert hvd.broadcast_(mine, root) is mine
            assert same(mine, expected)
    scalar = torch.tensor(float(hvd.rank()))
    assert hvd.broadcast(scalar, 2).item() == 2.0
    failing(
        lambda: hvd.broadcast(scalar, 3), ValueError, "broadcast received invalid root rank 3 for provided process"
    )


@pytest.mark.full("further")
@ranks(3)
def test_alltoall() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for dtype in MOVED:
        given = everybody((size, 2), dtype)
        even = hvd.alltoall(given[rank])
        assert isinstance(even, torch.Tensor)
        assert same(
            even,
            torch.stack([each[rank].float() for each in given]).to(dtype)
            if dtype.itemsize < 4
            else torch.stack([each[rank] for each in given]),
        )
    # Rank r sends i + 1 rows to rank i.
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    output, received = hvd.alltoall(torch.full((int(splits.sum()),), rank), splits)
    assert received.dtype == torch.int32
    assert received.tolist() == [rank + 1] * size
    assert output.tolist() == [r for r in range(size) for _ in range(rank + 1)]
    output, received = hvd.alltoall(torch.arange(4), [1, 0, 2])  # a list, and a row that goes nowhere
    assert received.tolist() == [[1] * 3, [0] * 3, [2] * 3][rank]
    both = hvd.synchronize(hvd.alltoall_async(torch.arange(3)))
    assert isinstance(both, tuple)
    assert both[1].tolist() == [1, 1, 1]
    empty, received = hvd.alltoall(torch.ones(0, 2), [0, 0, 0])
    assert empty.shape == (0, 2)
    assert received.tolist() == [0, 0, 0]
    for call, text in (
        (lambda: hvd.alltoall(torch.ones(4)), "splits not provided, but first dimension of tensor is not an even"),
        (
            lambda: hvd.alltoall(torch.ones(3), torch.tensor([1, 1, 1])),
            "alltoall expects splits to contain 32-bit",
        ),
        (
            lambda: hvd.alltoall(torch.ones(3), [2, 1, 1]),
            "Sum of splits entries is greater than the first dimension",
        ),
        (
            lambda: hvd.alltoall(torch.ones(3), [1, 1]),
            "Number of entries in splits does not equal number of workers.",
        ),
        (lambda: hvd.alltoall(torch.ones(3), [-1, 1, 1]), "splits"),
        (lambda: hvd.alltoall(torch.ones(3), torch.ones(1, 3).int()), "1D splits"),
    ):
        failing(call, ValueError, text)
    failing(lambda: hvd.alltoall(torch.tensor(1.0)), RuntimeError, "ALLTOALL a rank-zero tensor")


@pytest.mark.full("further")
@ranks(3)
def test_reducescatter() -> None:
    hvd.init()
    rank = hvd.rank()
    for dtype in ADDED:
        for rows, parts in ((6, (2, 2, 2)), (7, (3, 2, 2)), (8, (3, 3, 2)), (2, (1, 1, 0)), (0, (0, 0, 0))):
            given = everybody((rows, 2), dtype)
            total = given[0] + given[1] + given[2]
            expected = total.split(list(parts))[rank]
            assert torch.equal(hvd.reducescatter(given[rank], op=hvd.Sum), expected), (dtype, rows)
    ones = hvd.reducescatter(torch.full((3, 2), float(rank)))
    assert ones.tolist() == [[1.0, 1.0]]
    halves = hvd.reducescatter(torch.full((3, 2), float(rank)), compression=hvd.Compression.fp16)
    assert halves.dtype == torch.float32
    assert halves.tolist() == [[1.0, 1.0]]
    scalar = lambda: hvd.reducescatter(torch.tensor(1.0))  # noqa: E731
    failing(scalar, ValueError, "Reducescatter does not support scalar inputs")
    failing(scalar, RuntimeError, "Reducescatter does not support scalar inputs")
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        only = lambda op=op: hvd.reducescatter(torch.ones(3), op=op)  # noqa: E731
        failing(only, RuntimeError, "Reducescatter currently only supports AVERAGE and SUM.")
    failing(
        lambda: hvd.reducescatter(torch.ones(3), compression=hvd.Compression.int8),
        ValueError,
        "compression=CodecCompressor('int8') works with allreduce",
    )


@pytest.mark.full("further")
@ranks(2)
def test_compression_on_the_way() -> None:
    hvd.init()
    generator = torch.Generator().manual_seed(hvd.rank())
    mine = torch.randn(64, 64, generator=generator)
    mean = hvd.allreduce(mine)
    for compression, near in (
        (hvd.Compression.fp16, 1e-2),
        (hvd.Compression.bf16, 5e-2),
        (hvd.Compression.int8, 5e-2),
        (hvd.Compression.int4, 0.5),
    ):
        found = hvd.allreduce(mine, compression=compression, name=f"small.{compression}")
        assert found.dtype == torch.float32
        error = (found - mean).abs().max().item()
        assert 0 < error < near, (compression, error)
    spiky = torch.zeros(1000)
    spiky[hvd.rank()] = 100.0
    top = hvd.allreduce(spiky, compression=hvd.Compression.topk(0.01), op=hvd.Sum, name="top")
    assert top[:2].tolist() == [100.0, 100.0]
    low_rank = torch.outer(torch.arange(64.0), torch.arange(64.0)) / 100
    found = hvd.allreduce(low_rank, compression=hvd.Compression.powersgd(2), name="low")
    assert torch.allclose(found, low_rank, rtol=1e-3, atol=1e-2)
    integers = hvd.allreduce(torch.arange(5), compression=hvd.Compression.int8, op=hvd.Sum)
    assert integers.tolist() == [0, 2, 4, 6, 8]  # integers travel as they are
    grouped = hvd.grouped_allreduce([mine, torch.arange(3)], compression=hvd.Compression.fp16, op=hvd.Sum)
    assert grouped[0].dtype == torch.float32
    assert grouped[1].tolist() == [0, 2, 4]
    coded = hvd.grouped_allreduce([mine, torch.arange(3)], compression=hvd.Compression.int8, op=hvd.Sum)
    assert 0 < (coded[0] - 2 * mean).abs().max().item() < 0.05
    assert coded[1].tolist() == [0, 2, 4]
    several = hvd.grouped_allreduce([mine, -mine, 2 * mine], compression=hvd.Compression.int8, op=hvd.Sum)
    for factor, each in zip((2, -2, 4), several, strict=True):
        assert (each - factor * mean).abs().max().item() < 0.2
    failing(
        lambda: hvd.allreduce(mine, compression=hvd.Compression.int8, op=hvd.Max),
        ValueError,
        "codecs carry the sum or average",
    )
    failing(lambda: hvd.allreduce(mine, compression="fp16"), ValueError, "compression='fp16': expected one of")  # type: ignore[arg-type]


@pytest.mark.full("further")
@ranks(2)
def test_sparse_allreduce() -> None:
    hvd.init()
    rank = hvd.rank()
    indices = torch.tensor([[0, rank + 1], [1, 2]])
    mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (4, 3))
    dense = [torch.zeros(4, 3), torch.zeros(4, 3)]
    for each in range(2):
        dense[each][0, 1], dense[each][each + 1, 2] = 1.0, 2.0
    wait = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Sum)
    assert torch.equal(wait().to_dense(), dense[0] + dense[1])
    wait = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Average)
    assert torch.equal(wait().to_dense(), (dense[0] + dense[1]) / 2)
    failing(
        lambda: hvd.sparse_allreduce_async(torch.ones(2), "d", hvd.Sum), ValueError, "expected a sparse tensor"
    )
    failing(lambda: hvd.sparse_allreduce_async(mine, "d", hvd.Max), ValueError, "expected Average or Sum")


@pytest.mark.full("further")
@ranks(3)
def test_barriers() -> None:
    hvd.init()
    handles = [hvd.allreduce_async(torch.ones(1000), name=f"before.{i}") for i in range(10)]
    if hvd.rank() == 1:
        time.sleep(0.4)
    began = time.monotonic()
    hvd.barrier()
    waited = time.monotonic() - began
    assert waited > 0.2 or hvd.rank() == 1
    assert all(hvd.synchronize(handle)[0].item() == 1.0 for handle in handles)
