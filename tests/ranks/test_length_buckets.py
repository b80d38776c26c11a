"""`fd.shard(lengths=...)`: equal work on all ranks, the gradient of one process, epochs that go on elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp

COUNT = 61
LENGTHS = [1 + i * i % 31 for i in range(COUNT)]
BUDGET = 70
ROWS: Any = range(COUNT)


def by_length(kind: str, batch: int = 4, **options: Any) -> Any:
    """Return a divided loader whose batches are numbers of samples."""
    if kind == "budget":
        return fd.shard(DataLoader(ROWS, shuffle=True), seed=5, lengths=LENGTHS, max_tokens=BUDGET, **options)
    return fd.shard(DataLoader(ROWS, batch, shuffle=True), seed=5, lengths=LENGTHS, **options)


def seen_by_all(loader: Any, limit: int = 999) -> list[list[list[int]]]:
    """Return what each rank saw: by rank, by step, the samples that count."""
    mine = []
    for batch in loader:
        mine.append([int(i) for i in batch] if fd.world().session.batch_weight.factor != 0.0 else [])
        if len(mine) == limit:
            break
    return all_gather_json(fd.world(), "test/seen", mine)


def flat(seen: list[list[list[int]]]) -> list[int]:
    return [i for steps in seen for batch in steps for i in batch]


@contextmanager
def alone() -> Iterator[None]:
    """Make each rank a world of one, for its loaders."""
    world = fd.world()
    store = world.groups.store
    world.rank, world.size, world.groups.store = 0, 1, None  # not to meet the others' keys
    try:
        yield
    finally:
        world.groups.store = store
        world.rank, world.size = int(os.environ["FARANDOLE_RANK"]), int(os.environ["FARANDOLE_SIZE"])


@pytest.mark.gate_cases("3-batches")
@pytest.mark.parametrize("kind", ["batches", "budget"])
@ranks(2, 3)
def test_all_ranks_draw_from_the_same_bucket(kind: str) -> None:
    world = fd.init()
    loader = by_length(kind, batch=2)
    orders = []
    for epoch in range(3):
        steps_expected = len(loader)
        seen = seen_by_all(loader)
        assert {len(steps) for steps in seen} == {steps_expected}, epoch
        assert sorted(flat(seen)) == list(range(COUNT))
        orders.append(flat(seen))
        padded = [[len(batch) * max((LENGTHS[i] for i in batch), default=0) for batch in steps] for steps in seen]
        full = [step for step in zip(*padded, strict=True) if 0 not in step][:-1]
        assert sum(map(max, full)) * world.size < 1.25 * sum(map(sum, full)), (
            "slowest rank over mean rank; shuffled 1.2 to 1.35"
        )
        if kind == "budget":
            assert max(map(max, padded)) <= BUDGET
            sizes = [{len(steps[i]) for steps in seen} for i in range(steps_expected - 1)]
            assert all(len(each) == 1 for each in sizes), "as many samples on each rank"
    assert orders[0] != orders[1] != orders[2]
    loader.set_epoch(1)
    assert flat(seen_by_all(loader)) == orders[1]
    assert seen_by_all(loader, 1), "the next epoch begins"
    assert len(loader) > 1, "in the loop, too"


@pytest.mark.full("further")
@ranks(2)
def test_evaluation_begins_with_the_longest() -> None:
    fd.init()
    for kind in ("batches", "budget"):
        seen = seen_by_all(by_length(kind, evaluate=True))
        assert sorted(flat(seen)) == list(range(COUNT))
        first = [LENGTHS[i] for steps in seen for i in steps[0]]
        assert sorted(first) == sorted(LENGTHS)[-len(first) :]


@pytest.mark.gate_cases("batches")
@pytest.mark.parametrize("kind", ["batches", "budget"])
@ranks(3)
def test_the_gradient_is_that_of_the_joined_batch(kind: str) -> None:
    world = fd.init()
    x, y = data(COUNT)
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    fd.distribute(model, optimizer)
    rows = TensorDataset(x, y, torch.arange(COUNT))
    options: dict[str, Any] = {"max_tokens": BUDGET} if kind == "budget" else {}
    loader: Any = fd.shard(
        DataLoader(rows, 1 if options else 4, shuffle=True), lengths=LENGTHS.__getitem__, **options
    )
    for _ in range(2):
        for a, b, numbers in loader:
            counts = world.session.batch_weight.factor != 0.0
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            joined = flat([all_gather_json(world, "test/joined", numbers.tolist() if counts else [])])
            nn.functional.mse_loss(reference(x[joined]), y[joined]).backward()
            other.step()
            other.zero_grad()
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2, 3)
def test_an_epoch_goes_on_with_another_number_of_ranks() -> None:
    """Some of it by one rank, some by all, some by one with other batches: each sample once."""
    fd.init()
    weights = [1.0] * COUNT

    def drawn(batch: int) -> Any:
        return fd.shard(DataLoader(ROWS, batch, sampler=WeightedRandomSampler(weights, COUNT)), seed=5)

    def shuffled(batch: int) -> Any:
        return fd.shard(DataLoader(ROWS, batch, shuffle=True), seed=5)

    def in_buckets(batch: int) -> Any:
        return fd.shard(DataLoader(ROWS, batch, sampler=RandomSampler(ROWS)), seed=5, lengths=LENGTHS)

    def budgeted(batch: int) -> Any:
        return by_length("budget")

    for make in (shuffled, in_buckets, budgeted, drawn):
        whole = []
        with alone():
            for batch in make(4):
                whole += [int(i) for i in batch]
            first = make(4)
            begun = flat(seen_by_all(first, 3)[:1])
        state = first.state_dict()
        second = make(4)
        second.load_state_dict(state)
        begun += flat(seen_by_all(second, 2))
        state = second.state_dict()
        with alone():
            third = make(3)
            third.load_state_dict(state)
            begun += flat(seen_by_all(third, 2)[:1])
            fourth = make(3)
            fourth.load_state_dict(third.state_dict())
            steps = len(fourth) - fourth.state_dict()["batches"]
            left = seen_by_all(fourth)[:1]
            assert make is not budgeted or len(left[0]) == steps
        assert sorted(begun + flat(left)) == sorted(whole), make.__name__
        assert make is drawn or sorted(whole) == list(range(COUNT))


@pytest.mark.full("further")
@ranks(2)
def test_lengths_that_changed_since_the_state_was_saved_are_refused() -> None:
    fd.init()
    loader = by_length("batches")
    next(iter(loader))
    state = loader.state_dict()
    other: Any = fd.shard(DataLoader(ROWS, 4, shuffle=True), lengths=[40 - each for each in LENGTHS])
    other.load_state_dict(state)
    with pytest.raises(fd.ConfigError, match="its order is not the one in which the state was saved"):
        next(iter(other))


@ranks(2)
def test_lengths_that_differ_or_are_bad_on_one_rank_are_refused_on_all() -> None:
    odd = fd.init().rank == 1
    for lengths in ([1] * COUNT, [-1] * COUNT):
        with pytest.raises(fd.Mismatch, match="lengths is"):
            fd.shard(DataLoader(ROWS, 4, shuffle=True), lengths=lengths if odd else LENGTHS)
    with pytest.raises(fd.Mismatch, match="max_tokens is 50 on rank 0, 51 on rank 1"):
        fd.shard(DataLoader(ROWS, shuffle=True), lengths=LENGTHS, max_tokens=50 + odd)
    with pytest.raises(fd.ConfigError, match="more than a batch of max_tokens=25 on one rank"):
        fd.shard(DataLoader(ROWS, shuffle=True), lengths=LENGTHS, max_tokens=50, split=True)


@ranks(2)
def test_two_loops_over_one_loader_do_not_disturb_each_other() -> None:
    """Weights, samples and states of each are those that it has alone."""
    world = fd.init()
    count = 11  # the last batch has 3 samples: 2 and 1

    def make(kind: str) -> Any:
        if kind == "batches":
            sizes = [[0], [1, 2], [3, 4, 5], [6], [7, 8, 9], [10]]
            return fd.shard(DataLoader(range(count), batch_sampler=sizes))  # type: ignore[arg-type]
        return fd.shard(DataLoader(range(count), 2, shuffle=True), seed=3)  # type: ignore[arg-type]

    for kind in ("shuffled", "batches"):
        loader, plain = make(kind), make(kind)
        wanted = [[(b.tolist(), world.session.batch_weight.factor) for b in plain] for _ in range(3)]
        outer, inner, states = [], [], []
        for batch in loader:
            outer.append((batch.tolist(), world.session.batch_weight.factor))
            if len(outer) == 1:
                kept = iter(loader)
                inner = [(b.tolist(), world.session.batch_weight.factor) for b in kept]
            states.append(loader.state_dict())
        assert outer == wanted[0], kind
        assert inner == wanted[1], kind
        assert [(each["epoch"], each["batches"]) for each in states] == [(0, 1), (0, 2), (0, 3)]
        resumed = make(kind)
        resumed.load_state_dict(states[0])
        assert [b.tolist() for b in resumed] == [batch for batch, _ in wanted[0][1:]]
        assert [b.tolist() for b in resumed] == [batch for batch, _ in wanted[2]], "the inner loop was epoch 1"
