"""Blocks that ranks skip at zero = 3, each rank other ones: named on all ranks, before a parameter is wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal
from unittest import mock

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.zero import exchange_records
from tests.ranks.pool import ranks
from tests.ranks.sharded_cases import Block, Words, batches, loss_of


class Skipping(Words):
    """Runs those of its blocks that it is told to run."""

    run: Sequence[int] = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for index in self.run:
            x = self.blocks[index](x)
        found: torch.Tensor = self.head(x)
        return found


def step_with(model: Skipping, optimizer: torch.optim.Optimizer, run: Sequence[int]) -> None:
    x, y = batches(1)[0]
    model.run = run
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def skipping(plan: Plan) -> tuple[Skipping, torch.optim.Optimizer]:
    model = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, plan)
    step_with(model, optimizer, (0, 1, 2))
    step_with(model, optimizer, (1,))  # what all ranks skip is allowed
    return model, optimizer


@pytest.mark.parametrize("codec", ["none", "int8"])
@ranks(2)
def test_as_many_blocks_on_each_rank_but_other_ones(codec: Literal["none", "int8"]) -> None:
    world = fd.init()
    model, optimizer = skipping(Plan(zero=3, codec=codec, weight_codec=codec))
    with pytest.raises(fd.Mismatch, match=r"block 'blocks\.[12]', \w+ of step 3.*block 'blocks.*same seed"):
        step_with(model, optimizer, ((0, 1), (1, 2))[world.rank])


@ranks(2)
def test_more_blocks_on_one_rank_in_the_first_step() -> None:
    world = fd.init()
    model = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, Plan(zero=3))
    with pytest.raises(fd.Mismatch, match=r"(end of forward of step 1.*|block 'blocks.2', forward.*){2}"):
        step_with(model, optimizer, ((1, 2), (0,))[world.rank])


class OnlyBlocks(nn.Module):
    """Has no parameters outside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.begin = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[self.begin :]:
            x = block(x)
        return x


@ranks(2)
def test_a_block_that_one_rank_has_gathered_and_left_out() -> None:
    world = fd.init()
    model = OnlyBlocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, Plan(zero=3))
    x = torch.randn(4, 10)
    model(x).square().mean().backward()
    optimizer.step()
    model.begin = world.rank  # block 0 was asked for ahead of time on both
    with pytest.raises(fd.Mismatch, match=r"all_gather.*block 'blocks.0', backward of step 2"):
        model(x).square().mean().backward()


@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_hosts_that_skip_other_blocks() -> None:
    """Inside a host all is alike; shards of one block would be added to those of another across hosts."""
    rank = int(os.environ["FARANDOLE_RANK"])
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = str(rank % 2), str(rank // 2)
    fd.init()
    model, optimizer = skipping(Plan(zero=3, shard_within="host"))
    with pytest.raises(fd.Mismatch, match=r"all_reduce.*block 'blocks\.[12]', .*same seed"):
        step_with(model, optimizer, ((0, 1), (0, 2))[rank // 2])


@ranks(2)
def test_a_group_that_does_not_compare_calls_is_found_at_the_end_of_the_pass() -> None:
    """So it is on accelerators, whose groups are others'."""
    world = fd.init()
    with mock.patch.object(exchange_records, "calls_for", return_value=nullcontext()):
        model, optimizer = skipping(Plan(zero=3))
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        with pytest.raises(fd.Mismatch, match="other blocks than each other"):
            step_with(model, optimizer, ((0, 1), (1, 2))[world.rank])
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
