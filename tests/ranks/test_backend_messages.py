"""Sends and receives of the backend "farandole": of every length, in order, and those that differ are named."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import farandole as fd
import farandole.backend  # registers the name
from farandole.core.vocabulary.errors import CommError, Mismatch
from tests.ranks.pool import ranks, takes
from tests.ranks.test_backend import make

LENGTHS = (0, 1, 8, 447, 448, 5000, 3_000_000)
"""In bytes."""
FROM_ANY = (8, 5000)
"""Those that are received from any rank, by a tag of their own."""


@ranks(2)
def test_messages_of_every_length_arrive_whole_and_in_order() -> None:
    here = fd.init()
    group = make()
    for dtype in (torch.uint8, torch.float64, torch.bfloat16):
        sent = [
            torch.randint(256, (length // dtype.itemsize * dtype.itemsize,), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(length)).view(dtype)
            for length in LENGTHS
        ]  # fmt: skip
        if here.rank == 0:
            works = [
                dist.isend(each, 1, group=group, tag=7 * (length in FROM_ANY))
                for each, length in zip(sent, LENGTHS, strict=True)
            ]
        else:
            found = [torch.empty_like(each) for each in sent]
            works = [
                dist.irecv(each, None, group=group, tag=7)
                if length in FROM_ANY
                else dist.irecv(each, 0, group=group)
                for each, length in zip(found, LENGTHS, strict=True)
            ]
        for work in works:
            assert work is not None, "asynchronous"
            work.wait()
        if here.rank == 1:
            for one, other in zip(found, sent, strict=True):
                assert one.view(torch.uint8).tolist() == other.view(torch.uint8).tolist(), (dtype, len(one))
    matrix = torch.arange(6.0).view(2, 3)
    if here.rank == 0:
        dist.send(matrix, 1, group=group)
    else:
        turned = torch.zeros(3, 2).t()
        dist.recv(turned, 0, group=group)
        assert torch.equal(turned, matrix), "into memory that is not contiguous"


@takes(60)
@pytest.mark.parametrize(
    ("sent", "expected"), [(0, 8), (8, 0), (8, 100_000), (100_000, 8), (8, 16), (0, 100_000), (200_000, 100_000)]
)
@ranks(2)
def test_a_message_of_another_length_is_named_at_once(sent: int, expected: int) -> None:
    here = fd.init()
    group = dist.new_group(backend="farandole", timeout=timedelta(seconds=40))
    if here.rank == 0:
        with suppress(CommError):  # the receiver may have left before a long one was through
            dist.send(torch.zeros(sent, dtype=torch.uint8), 1, group=group)
    else:
        with pytest.raises(Mismatch, match=f"rank 0.* sent {sent} .* where {expected} .*expected"):
            dist.recv(torch.zeros(expected, dtype=torch.uint8), 0, group=group)
    fd.barrier()


@ranks(3)
def test_a_message_meets_the_first_receive_that_would_take_it() -> None:
    here = fd.init()
    group = make()

    def send(value: float, tag: int) -> None:
        dist.send(torch.tensor([value]), 2, group=group, tag=tag)

    for is_early in (False, True):  # whether messages are there before they are asked for
        if here.rank < 2:
            if not is_early:
                fd.barrier()
            if here.rank == 1:
                send(1.0, 5)
                send(9.0, 8)
            fd.barrier()
            if here.rank == 0:
                for value in (2.0, 3.0, 4.0):
                    send(value, 5)
            fd.barrier()
            if is_early:
                fd.barrier()
            fd.barrier()  # what comes next is not for the receives of this turn
            continue
        if is_early:
            for _ in range(2):
                fd.barrier()
        found = [torch.zeros(1) for _ in range(5)]
        senders = (None, 0, None, None, 1)
        works = [
            dist.irecv(each, sender, group=group, tag=8 if sender == 1 else 5)
            for each, sender in zip(found, senders, strict=True)
        ]
        assert all(work is not None for work in works), "asynchronous"
        if not is_early:
            fd.barrier()
            works[4].wait()  # type: ignore[union-attr]
            works[0].wait()  # type: ignore[union-attr]
            assert works[0]._source_rank() == 1, "the only one who had sent"  # type: ignore[union-attr]
        for _ in range(1 if is_early else 2):
            fd.barrier()
        for work in works:
            work.wait()  # type: ignore[union-attr]
        values = [each.item() for each in found]
        # The first may be of either sender when both are there; those of one sender stay in order.
        expected = [[1.0, 2.0, 3.0, 4.0, 9.0], [2.0, 3.0, 1.0, 4.0, 9.0], [2.0, 3.0, 4.0, 1.0, 9.0]]
        assert values in (expected if is_early else expected[:1]), f"{values}, early: {is_early}"
        fd.barrier()


@ranks(2)
def test_a_named_receive_leaves_a_message_to_one_from_any_rank_before_it() -> None:
    here = fd.init()
    group = make()
    if here.rank == 0:
        fd.barrier()
        for value in (1.0, 2.0, 3.0):
            dist.send(torch.tensor([value]), 1, group=group, tag=4)
        return
    found = [torch.zeros(1) for _ in range(3)]
    works = [dist.irecv(each, who, group=group, tag=4) for each, who in zip(found, (None, 0, None), strict=True)]
    fd.barrier()
    for work in reversed(works):
        assert work is not None, "asynchronous"
        work.wait()
    assert [each.item() for each in found] == [1.0, 2.0, 3.0], "in the order of posting"
