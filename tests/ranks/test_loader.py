"""`fd.shard`: no sample lost or doubled, and the mean is the true mean."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)
from typing_extensions import assert_type

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.train.data import rank_sampler
from farandole.train.data.loader import ShardedLoader
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def seen_by_all(loader: Any) -> list[list[list[int]]]:
    """Return what each rank saw: by rank, by step, the samples that count."""
    mine = []
    for batch in loader:
        counts = fd.world().session.batch_weight.factor != 0.0
        mine.append([int(i) for i in batch] if counts else [])
    assert len(mine) == len(loader), (len(mine), len(loader))
    return all_gather_json(fd.world(), "test/seen", mine)


@ranks(1)
def test_a_checker_of_types_knows_what_the_loader_is_made_of() -> None:
    """`assert_type` is looked at by mypy, and does nothing here."""
    fd.init()
    loader = fd.shard(DataLoader(Numbers(4)))
    assert_type(loader, ShardedLoader[int])
    assert isinstance(loader, ShardedLoader)


@pytest.mark.gate_cases("24-0")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [24, 25, 26, 29])
@ranks(3)
def test_every_sample_once_and_equal_steps(count: int, workers: int) -> None:
    fd.init()
    loader = fd.shard(DataLoader(Numbers(count), batch_size=4, shuffle=True, num_workers=workers))
    for _ in range(2):
        seen = seen_by_all(loader)
        assert len({len(steps) for steps in seen}) == 1, "equal steps"
        flat = sorted(i for steps in seen for batch in steps for i in batch)
        assert flat == list(range(count))


@pytest.mark.full("further")
@ranks(3)
def test_the_joined_batch_is_that_of_one_process() -> None:
    world = fd.init()
    source = DataLoader(Numbers(26), batch_size=6, shuffle=True)
    epochs = []
    loader = fd.shard(source, split=True, seed=5)
    for _ in range(2):
        seen = seen_by_all(loader)
        epochs.append([[i for steps in seen for i in steps[step]] for step in range(len(seen[0]))])
    assert epochs[0] != epochs[1], "another order every epoch"
    world.rank, world.size = 0, 1  # what a world of one draws with the same seed
    try:
        alone = fd.shard(source, split=True, seed=5)
        for joined in epochs:
            assert [[int(i) for i in batch] for batch in alone] == joined
    finally:
        world.rank, world.size = gather_place()


def gather_place() -> tuple[int, int]:
    import os

    return int(os.environ["FARANDOLE_RANK"]), int(os.environ["FARANDOLE_SIZE"])


@ranks(2)
def test_set_epoch_repeats_an_order() -> None:
    fd.init()
    loader = fd.shard(DataLoader(Numbers(10), batch_size=2, shuffle=True))
    first, second = seen_by_all(loader), seen_by_all(loader)
    places: tuple[Any, ...] = (loader, loader.sampler)
    for place in places:  # the sampler's is what scripts with a DistributedSampler call
        place.set_epoch(0)
        assert seen_by_all(loader) == first
        assert seen_by_all(loader) == second


class OwnOrder(Sampler[int]):
    """Draws something else on every rank, as a sampler without an agreed seed does."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        digits = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
        return iter(digits if fd.world().rank == 0 else [0] * 11)


@pytest.mark.full("further")
@ranks(2)
def test_a_sampler_of_the_users_own_is_drawn_once_for_all() -> None:
    fd.init()
    seen = seen_by_all(fd.shard(DataLoader(Numbers(10), batch_size=3, sampler=OwnOrder())))
    assert seen == [[[3, 1, 4], [2, 6, 5]], [[1, 5, 9], [3, 5]]]


class Endless:
    """Yields the same for ever; one with a length says that this is an epoch."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.value)


class EndlessOfALength(Endless):
    def __len__(self) -> int:
        return 10


@ranks(2)
@pytest.mark.parametrize("kind", [Endless, EndlessOfALength])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_without_end_is_refused_on_all_ranks(kind: type[Endless], workers: int) -> None:
    fd.init()
    rank_sampler._MOST_SAMPLES, rank_sampler._MOST_BATCHES = 1000, 100
    much = "10, by its length" if kind is EndlessOfALength else "{} and has no length"
    for most, given in ((1000, {"sampler": kind(3), "batch_size": 2}), (100, {"batch_sampler": kind([3, 4])})):
        much = much.replace("10,", "20,") if "batch_sampler" in given else much  # of batches it is often estimated
        loader = fd.shard(DataLoader(Numbers(10), num_workers=workers, **given))
        says = (
            rf"by {kind.__name__} does not end: it yields more than {much.format(most)}; let it end after an epoch"
        )
        with pytest.raises(fd.ConfigError, match=says):
            next(iter(loader))


@pytest.mark.full("further")
@ranks(2)
def test_whole_batches_of_a_batch_sampler() -> None:
    fd.init()
    batches = BatchSampler(SequentialSampler(Numbers(13)), 3, drop_last=False)  # 5 batches, the last of 1
    seen = seen_by_all(fd.shard(DataLoader(Numbers(13), batch_sampler=batches)))
    assert seen == [[[0, 1, 2], [6, 7, 8], [12]], [[3, 4, 5], [9, 10, 11], []]]


@pytest.mark.gate_cases("12-0")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("count", [12, 13, 15])
@ranks(2)
def test_streams(count: int, workers: int) -> None:
    fd.init()
    seen = seen_by_all(fd.shard(DataLoader(Stream(count), batch_size=3, num_workers=workers)))
    assert len(seen[0]) == len(seen[1])
    assert sorted(i for steps in seen for batch in steps for i in batch) == list(range(count))


@pytest.mark.full("further")
@ranks(3)
def test_evaluation_has_no_placeholder_and_mean_is_weighted() -> None:
    world = fd.init()
    loader = fd.shard(DataLoader(Numbers(13), batch_size=2), evaluate=True)
    total, samples = 0.0, 0
    for batch in loader:
        total += float(batch.sum())
        samples += len(batch)
    assert fd.mean(total / max(samples, 1), samples) == pytest.approx(6.0)
    assert all_gather_json(world, "test/samples", samples) == [5, 4, 4]
    assert fd.mean(float("nan") if world.rank else 2.5, samples=0 if world.rank else 1) == 2.5


@ranks(2)
def test_drop_last() -> None:
    fd.init()
    seen = seen_by_all(fd.shard(DataLoader(Numbers(11), batch_size=2, drop_last=True)))
    assert [len(steps) for steps in seen] == [2, 2]
    assert sorted(i for steps in seen for batch in steps for i in batch) == list(range(8))


@pytest.mark.full("further")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("count", [25, 19, 17])
@ranks(3)
def test_uneven_last_batches_train_as_one_process(count: int, accumulate: int) -> None:
    """The short last batch, and the rank that has nothing in it, leave the mean the true mean."""
    fd.init()
    x, y = data(count)
    rows = TensorDataset(x, y)
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    fd.distribute(model, optimizer, fd.Plan(accumulate=accumulate))
    loader = fd.shard(DataLoader(rows, batch_size=6), split=True)
    plain = DataLoader(rows, batch_size=6)
    for network, stepper, batches in ((model, optimizer, loader), (reference, other, plain)):
        for _ in range(2):
            for i, (a, b) in enumerate(batches):
                (nn.functional.mse_loss(network(a), b) / accumulate).backward()
                if (i + 1) % accumulate == 0 or i + 1 == len(batches):
                    stepper.step()
                    stepper.zero_grad()
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_a_placeholder_first_of_several_accumulated_batches() -> None:
    """A rank whose first held gradient counts for nothing, then one that does, and the reverse."""
    world = fd.init()
    x, y = data(8)
    for factors in ([0.0, 1.0], [1.0, 0.0], [0.5, 1.5]):
        model, reference = mlp(), mlp()
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(accumulate=2))
        for half, factor in enumerate(factors):
            a, b = x[half * 4 : half * 4 + 4], y[half * 4 : half * 4 + 4]
            other = 2 - factor  # the two ranks' factors add up to their number
            mine = factor if world.rank == 0 else other
            world.session.batch_weight.set(mine)
            part = a[:2] if world.rank == 0 else a[2:]
            target = b[:2] if world.rank == 0 else b[2:]
            poison = float("nan") if mine == 0.0 else 1.0
            (nn.functional.mse_loss(model(part), target) * poison).backward()
            loss = factor * nn.functional.mse_loss(reference(a[:2]), b[:2])
            loss = loss + other * nn.functional.mse_loss(reference(a[2:]), b[2:])
            (loss / 2).backward()
        for mine_p, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine_p.grad, theirs.grad)
        world.session.batch_weight.set(1.0)


@ranks(2)
def test_loaders_that_cannot_be_divided() -> None:
    world = fd.init()
    rows = Numbers(8)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([1, 2], {}, "expected a torch.utils.data.DataLoader, got list"),
        (
            DataLoader(rows, sampler=DistributedSampler(rows, num_replicas=2, rank=world.rank)),
            {},
            "divided already",
        ),
        (fd.shard(DataLoader(rows)), {}, "divided already"),
        (DataLoader(rows, batch_size=1), {"split": True}, "a batch of 1 cannot be split over 2 ranks"),
        (DataLoader(rows, batch_size=None), {}, "without batches"),
        (DataLoader(Stream(3), batch_size=None), {}, "a stream without batch_size"),
    ]
    for loader, arguments, text in cases:
        with pytest.raises(fd.ConfigError, match=text):
            fd.shard(loader, **arguments)
