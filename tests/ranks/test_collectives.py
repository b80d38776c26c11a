"""Collectives over segments: right sums, and the same bits on all ranks."""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farandole as fd
from farandole.bench.collectives import segmented
from farandole.bench.collectives.segmented import all_gather, all_reduce, reduce_scatter
from farandole.comm.world.comm_errors import translate_error
from tests.ranks.pool import ranks

SIZES = (0, 1, 7, 5000, 1_000_000)
DTYPES = (
    torch.float8_e4m3fn,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.complex64,
)


def made(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what `rank` brings: known to all ranks."""
    generator = torch.Generator().manual_seed(17 * rank + count)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, (count,), generator=generator).to(dtype)


def total(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order, in float32 for halves."""
    narrow = rows[0].dtype.is_floating_point and rows[0].element_size() < 4
    wide = torch.float32 if narrow else rows[0].dtype
    out = rows[0].to(wide).clone()
    for row in rows[1:]:
        out += row.to(wide)
    return out.to(rows[0].dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@ranks(2, 3, 4)
def test_all_reduce() -> None:
    world = fd.init()
    assert world.group is not None
    for dtype in DTYPES:
        for count in SIZES:
            if count > 5000 and dtype != torch.float32:
                continue
            everyone = [made(rank, count, dtype) for rank in range(world.size)]
            mine = everyone[world.rank].clone()
            all_reduce(mine, world.group)
            assert same(mine, total(everyone)), (dtype, count)


@ranks(2, 3, 4)
def test_reduce_scatter_and_all_gather() -> None:
    """Reduce-scatter and all-gather: apart, in place, and both together."""
    world = fd.init()
    assert world.group is not None
    for dtype in DTYPES:
        for count in (0, 1, 7, 100_000):
            everyone = [made(rank, world.size * count, dtype) for rank in range(world.size)]
            whole = total(everyone)
            mine = everyone[world.rank].clone()
            part = torch.empty(count, dtype=dtype)
            reduce_scatter(part, mine, world.group)
            assert same(mine, everyone[world.rank]), "the input is left alone"
            assert same(part, whole.view(world.size, -1)[world.rank]), (dtype, count)
            gathered = torch.empty(world.size, count, dtype=dtype)
            all_gather(gathered, part, world.group)
            assert same(gathered.view(-1), whole), (dtype, count)
            row = mine.view(world.size, -1)[world.rank]
            reduce_scatter(row, mine, world.group)
            all_gather(mine, row, world.group)
            assert same(mine, whole), (dtype, count)


@ranks(3)
def test_timing_changes_no_bit() -> None:
    world = fd.init()
    assert world.group is not None
    digests = set()
    jitter = random.Random(world.rank)
    for _ in range(5):
        mine = made(world.rank, 300_001, torch.float32)
        time.sleep(jitter.random() / 50)
        all_reduce(mine, world.group)
        digests.add(hashlib.sha256(mine.numpy().tobytes()).hexdigest())
    said: list[Any] = [None] * world.size
    dist.all_gather_object(said, sorted(digests))
    assert len(digests) == 1
    assert said == [said[0]] * world.size


@ranks(3)
def test_calls_one_after_the_other_do_not_mix() -> None:
    world = fd.init()
    assert world.group is not None
    draw = random.Random(5)  # the same on all ranks
    own = random.Random(world.rank)
    for turn in range(80):
        count = draw.choice([1, 33, 20_000, 120_000])
        everyone = [made(rank, count, torch.float32) + turn for rank in range(world.size)]
        mine = everyone[world.rank].clone()
        if own.random() < 0.1:
            time.sleep(0.01)
        all_reduce(mine, world.group)
        assert torch.equal(mine, total(everyone)), turn


@ranks(3)
def test_a_rank_that_is_gone_is_an_error_and_no_hang() -> None:
    world = fd.init()
    assert world.group is not None
    if world.rank == 2:
        fd.shutdown()
        return
    with pytest.raises(RuntimeError) as raised:
        all_reduce(torch.ones(1_000_000), world.group)
    assert isinstance(translate_error(raised.value, world, "all_reduce"), fd.PeerLost), raised.value
    # The other rank may wait for this one, which gave up: it must see it go, and the traceback holds the group.
    del raised
    gc.collect()


@ranks(2)
def test_any_shape_and_layout() -> None:
    world = fd.init()
    assert world.group is not None
    for make in (
        lambda: torch.full((3, 5), 1.0).t(),
        lambda: torch.tensor(1.0),
        lambda: torch.ones(4, 6)[:, ::2],
        lambda: torch.ones(5, requires_grad=True),
    ):
        tensor = make()
        all_reduce(tensor, world.group)
        assert torch.equal(tensor, torch.full_like(tensor, 2.0))


@ranks(2)
def test_what_does_not_fit_is_refused_with_its_values() -> None:
    world = fd.init()
    assert world.group is not None
    x = torch.zeros
    for whole, part, text in (
        (x(7), x(3), r"shape \(7,\) has 7 elements, expected 2 x 3"),
        (x(6), x(3, dtype=torch.float64), "float32, .* torch.float64"),
        (x(6, 2)[:, 0], x(3), r"strides \(2,\), expected a contiguous"),
        (x(6, device="meta"), x(3), "on meta"),
    ):
        with pytest.raises(ValueError, match=text):
            reduce_scatter(part, whole, world.group)
        with pytest.raises(ValueError, match=text):
            all_gather(whole, part, world.group)
    with pytest.raises(ValueError, match=r"sum of torch.uint32"):
        all_reduce(x(2, dtype=torch.uint32), world.group)


def test_segments_cover_everything_once() -> None:
    for count in (0, 1, 7, 40_000, 1_000_000):
        for size in (1, 2, 4, 8):
            found = list(segmented._segments(count, size))
            assert sum(stop - start for start, stop in found) == count
            assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
            assert all((stop - start) * size <= segmented.SEGMENT_BYTES for start, stop in found)
