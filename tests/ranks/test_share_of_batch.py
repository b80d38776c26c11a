"""The weight of a batch goes with the batch, whenever it was drawn: uneven epochs train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp

Pair = tuple[torch.Tensor, torch.Tensor]
Loop = Callable[[Iterable[Pair]], Iterable[Pair]]


def one_ahead(batches: Iterable[Pair]) -> Iterator[Pair]:
    iterator = iter(batches)
    following = next(iterator, None)
    while following is not None:
        current, following = following, next(iterator, None)
        yield current


def groups(batches: Iterable[Pair]) -> Iterator[Pair]:
    iterator = iter(batches)
    while group := list(islice(iterator, 3)):
        yield from group


class DataPrefetcher:
    """Apex's: the next batch is moved and cast while the current one is in use."""

    def __init__(self, batches: Iterable[Pair]) -> None:
        self.iterator = iter(batches)
        self.preload()

    def preload(self) -> None:
        self.following = next(self.iterator, None)
        if self.following is not None:
            x, y = self.following
            self.following = x.double().float() + 0.0, y.clone()

    def __iter__(self) -> Iterator[Pair]:
        while self.following is not None:
            current = self.following
            self.preload()
            yield current


def cast_before_use(batches: Iterable[Pair]) -> Iterator[Pair]:
    for x, y in list(batches):
        yield x.clone(), y


def views(batches: Iterable[Pair]) -> Iterator[Pair]:
    for x, y in list(batches):
        yield x[:, :].view(-1, 2, 3).flatten(1), y


def plain(batches: Iterable[Pair]) -> Iterable[Pair]:
    return batches


def plain_clones(batches: Iterable[Pair]) -> Iterator[Pair]:
    for x, y in batches:
        yield x.clone(), y.clone()


LOOPS = (plain, plain_clones, one_ahead, list, groups, DataPrefetcher, cast_before_use, views)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, accumulate: int) -> None:
    pairs = list(batches) if isinstance(batches, list) else batches
    held = 0
    for x, y in pairs:
        (nn.functional.mse_loss(model(x), y) / accumulate).backward()
        held += 1
        if held == accumulate:
            optimizer.step()
            optimizer.zero_grad()
            held = 0
    if held:
        optimizer.step()
        optimizer.zero_grad()


def both(count: int, accumulate: int = 1, plan: fd.Plan | None = None) -> tuple[Any, ...]:
    rows = TensorDataset(*data(count))
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    fd.distribute(model, optimizer, plan or fd.Plan(accumulate=accumulate))
    loader = fd.shard(DataLoader(rows, batch_size=4), split=True)
    return model, optimizer, loader, reference, other, DataLoader(rows, batch_size=4)


@ranks(2)
def test_copies_of_a_batch_may_go_through_the_model_twice_in_a_step() -> None:
    """As sharpness-aware minimisation does, in a loop that has drawn the next batch already."""
    fd.init()
    model, optimizer, loader, reference, other, all_rows = both(11)
    for net, steps, batches in ((model, optimizer, one_ahead(loader)), (reference, other, all_rows)):
        for x, y in batches:
            for _ in range(2):
                steps.zero_grad()
                nn.functional.mse_loss(net(x.clone()), y).backward()
            steps.step()
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("count", [11, 9])
@ranks(2)
def test_a_loop_that_fetches_ahead_trains_as_one_process(count: int, accumulate: int) -> None:
    """The last batch is of 3, or of 1: then one rank has a placeholder."""
    fd.init()
    loop: Any
    for loop in LOOPS:
        model, optimizer, loader, reference, other, alone = both(count, accumulate)
        for _ in range(2):
            train(model, optimizer, loop(loader), accumulate)
            train(reference, other, loop(alone), accumulate)
        assert_close(model, reference)
        assert_same_bits(model)


def refused(batches: Iterable[Any], step: Callable[[Any], object], text: str) -> None:
    """One of the steps is refused, on this rank and so, when the test passes, on all."""

    def run() -> None:
        for batch in batches:
            step(batch)

    with pytest.raises(fd.ConfigError, match=text):
        run()


@pytest.mark.full("further")
@ranks(2)
def test_batches_that_are_kept_and_reordered() -> None:
    fd.init()
    model, optimizer, loader, reference, other, alone = both(11)
    mine, theirs = list(loader), list(alone)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 2, 0]):
        train(model, optimizer, (mine[i] for i in order), 1)
        train(reference, other, (theirs[i] for i in order), 1)
    assert_close(model, reference)


@pytest.mark.full("further")
@ranks(2)
def test_batches_that_are_views_of_one_tensor() -> None:
    fd.init()
    x, y = data(11)
    model, optimizer, _, reference, other, alone = both(11)

    class Rows(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 11

        def __getitem__(self, index: int) -> int:
            return index

    def cut(items: list[int]) -> Pair:
        return x[items[0] : items[-1] + 1], y[items[0] : items[-1] + 1]

    loader = fd.shard(DataLoader(Rows(), batch_size=4, collate_fn=cut), split=True)
    for _ in range(2):
        train(model, optimizer, one_ahead(loader), 1)
        train(reference, other, alone, 1)
    assert_close(model, reference)


@ranks(2)
def test_skipped_batches_and_evaluation_between() -> None:
    fd.init()
    model, optimizer, loader, reference, other, alone = both(11)
    rows = TensorDataset(*data(7, seed=9))
    evaluation = fd.shard(DataLoader(rows, batch_size=3), evaluate=True)
    for clones in (False, True):
        for network, stepper, batches in ((model, optimizer, loader), (reference, other, alone)):
            for i, (x, y) in enumerate(batches):
                if i == 0:
                    continue  # as a resumed run does
                with torch.no_grad():
                    for a, _ in evaluation if network is model else []:
                        network(a)
                        break
                stepper.zero_grad()
                nn.functional.mse_loss(network(x.clone() if clones else x), y).backward()
                stepper.step()
    assert_close(model, reference)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.net(x).mean() + self.net(a).mean()
        return total


@pytest.mark.full("further")
@ranks(2)
def test_two_loaders_in_one_step() -> None:
    """Each pass has the weight of its own batch; one backward pass of both is refused when they differ."""
    fd.init()
    model, optimizer, loader, reference, other, alone = both(11)
    more = TensorDataset(*data(10, seed=3))
    second, plain_second = fd.shard(DataLoader(more, batch_size=4), split=True), DataLoader(more, batch_size=4)
    for network, stepper, batches in (
        (model, optimizer, zip(loader, second, strict=True)),
        (reference, other, zip(alone, plain_second, strict=True)),
    ):
        for (x, y), (a, b) in batches:
            stepper.zero_grad()
            nn.functional.mse_loss(network(x), y).backward()
            nn.functional.mse_loss(network(a), b).backward()
            stepper.step()
    assert_close(model, reference)
    even = fd.shard(DataLoader(TensorDataset(*data(12)), batch_size=4), split=True)
    refused(
        zip(even, loader, strict=True),
        lambda two: (model(two[0][0]).sum() + model(two[1][0]).sum()).backward(),
        "one backward pass holds the losses of two batches that weigh",
    )
    pair = Two()
    fd.distribute(pair, torch.optim.SGD(pair.parameters(), 0.1))
    refused(
        zip(even, loader, strict=True),
        lambda two: pair(two[0][0], two[1][0]).backward(),
        "one forward pass is given tensors of two batches",
    )


@ranks(2)
def test_a_loop_left_in_an_uneven_batch_leaves_no_weight_behind() -> None:
    world = fd.init()
    model, optimizer, loader, *_ = both(11)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if i == 2:
            assert world.session.batch_weight.factor != 1.0
            break
    optimizer.zero_grad()
    x, y = data(4)
    mine = slice(0, 2) if world.rank == 0 else slice(2, 4)
    nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    assert world.session.batch_weight.factor == 1.0


@pytest.mark.full("further")
@ranks(2)
def test_parts_of_the_model_called_by_themselves() -> None:
    """Nobody sees which batch they are given: right while it is certain, an error on all ranks where it is not."""
    fd.init()
    model, optimizer, loader, reference, other, alone = both(11)

    def step(network: Any, stepper: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        stepper.zero_grad()
        nn.functional.mse_loss(network[1:](network[0](x)), y).backward()
        stepper.step()

    for _ in range(2):
        for x, y in loader:
            step(model, optimizer, x, y)
        for x, y in alone:
            step(reference, other, x, y)
    assert_close(model, reference)
    refused(
        list(loader),
        lambda batch: step(model, optimizer, *batch),
        r"not certain which of 3 batches.*the distributed model itself was not",
    )


@ranks(2)
def test_what_sizes_cannot_tell_is_refused_on_all_ranks() -> None:
    fd.init()
    model, _, loader, *_ = both(11)
    refused(
        list(loader),
        lambda batch: model(torch.cat([batch[0]] * 5)).sum().backward(),
        r"not certain which of \d batches .* tensors that no loader handed",
    )


@ranks(2)
def test_equal_batches_are_not_looked_at() -> None:
    world = fd.init()
    model, optimizer, loader, *_ = both(12)
    train(model, optimizer, one_ahead(loader), 1)
    assert not world.session.batch_weight.watches
    assert not world.session.batch_weight._drawn._waiting


@pytest.mark.full("further")
@ranks(2)
def test_noted_batches_are_forgotten() -> None:
    world = fd.init()
    _, _, loader, *_ = both(403)
    model, optimizer, *_ = both(4)
    counts = []
    for _ in range(6):
        train(model, optimizer, one_ahead(loader), 1)
        counts.append(len(world.session.batch_weight._drawn._by_storage))
        assert not world.session.batch_weight._drawn._waiting
    assert max(counts) < 200, counts
    assert all(b - a < 150 for a, b in pairwise(counts))
