"""`fd.shard` and loaders of other classes, and loaders that are not the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from tests.ranks.pool import ranks


def rows(count: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def own_values(loader: Any) -> list[list[list[int]]]:
    return all_gather_json(fd.world(), "test/values", [batch[0].tolist() for batch in loader])


class Shifting(DataLoader[Any]):
    """Changes what it hands out, and says that an epoch is something else."""

    def __init__(self, dataset: Any, *, by: int, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.by = by
        self.epoch, self.world, self.evaluate = "mine", "mine", "mine"
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for (x,) in super().__iter__():
            yield [x + self.by]

    def __len__(self) -> int:
        return super().__len__() * 10

    def shifted(self) -> int:
        return self.by


class Endless(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while True:
            yield from super().__iter__()


class Remembering(DataLoader[Any]):
    """Reads its dataset once."""

    kept: Any = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.kept is None:
            self.kept = list(super().__iter__())
        yield from self.kept


class Renaming(DataLoader[Any]):
    """Changes the constructor and what a batch is made of, as PyG's loader does."""

    def __init__(self, dataset: Any, batch_size: int = 1, follow: str = "") -> None:
        self.follow = follow
        super().__init__(
            dataset, batch_size, collate_fn=lambda items: [torch.cat([i[0].view(1) for i in items]) * 2]
        )


class KeepsIterator(DataLoader[Any]):
    """The iterator of the constructor, as ultralytics' InfiniteDataLoader has it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.iterator)


class Elsewhere(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from ([self.dataset[i][0].view(1)] for i in range(4))


class Stateful(DataLoader[Any]):
    """As torchdata's StatefulDataLoader, by where it says that it is from."""

    __module__ = "torchdata.stateful_dataloader.stateful_dataloader"


class ReplacesBatches(DataLoader[Any]):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)

        class Repeat(BatchSampler):
            pass

        object.__setattr__(self, "batch_sampler", Repeat(self.sampler, 2, False))


@pytest.mark.full("further")
@pytest.mark.parametrize("workers", [0, 1])
@ranks(2)
def test_a_subclass_keeps_its_iteration_and_its_length(workers: int) -> None:
    fd.init()
    loader: Any = fd.shard(
        Shifting(rows(), by=100, batch_size=3, num_workers=workers, persistent_workers=bool(workers))
    )
    assert isinstance(loader, Shifting)
    assert loader.shifted() == 100
    assert len(loader) == 20
    loader.set_epoch(3)
    assert (loader.told, loader.epoch, loader.world, loader.evaluate) == ([3], "mine", "mine", "mine")
    for _ in range(2):
        assert own_values(loader) == [[[100, 101, 102], [106, 107, 108]], [[103, 104, 105], [109, 110, 111]]]


@pytest.mark.full("further")
@ranks(2)
def test_an_endless_subclass_draws_another_order_each_epoch() -> None:
    fd.init()
    loader = fd.shard(Endless(rows(), batch_size=3, shuffle=True))
    seen = [batch[0].tolist() for _, batch in zip(range(6), loader, strict=False)]
    both = all_gather_json(fd.world(), "test/values", seen)
    epochs = [sorted(value for part in both for batch in part[i : i + 2] for value in batch) for i in (0, 2, 4)]
    assert epochs == [list(range(12))] * 3
    assert seen[:2] != seen[2:4]


@ranks(2)
def test_subclasses_that_change_the_constructor_or_keep_batches_work() -> None:
    fd.init()
    assert own_values(fd.shard(Renaming(rows(4), 2, follow="x"))) == [[[0, 2]], [[4, 6]]]
    loader = fd.shard(Remembering(rows(8), batch_size=2, shuffle=True))
    first = own_values(loader)
    assert own_values(loader) == first
    assert sorted(value for part in first for batch in part for value in batch) == list(range(8))


@ranks(2)
def test_subclasses_that_cannot_be_divided_are_refused_by_name() -> None:
    fd.init()
    with pytest.raises(
        fd.ConfigError, match="KeepsIterator keeps an iterator from its constructor, in its attribute"
    ):
        fd.shard(KeepsIterator(rows(), batch_size=2))
    with pytest.raises(fd.ConfigError, match="a Stateful of torchdata keeps a place of its own"):
        fd.shard(Stateful(rows(), batch_size=2))
    with pytest.raises(fd.ConfigError, match="batch_sampler of this ReplacesBatches was replaced by a Repeat"):
        fd.shard(ReplacesBatches(rows(), batch_size=2))
    with pytest.raises(fd.ConfigError, match="class Elsewhere yields batches that it does not get from super"):
        next(iter(fd.shard(Elsewhere(rows(), batch_size=2))))

    class DividedElsewhere(BatchSampler):
        num_processes = 2

    with pytest.raises(fd.ConfigError, match="divided already"):
        fd.shard(DataLoader(rows(), batch_sampler=DividedElsewhere(SequentialSampler(rows()), 2, False)))


@ranks(2)
def test_loaders_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    odd = fd.init().rank == 1
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (DataLoader(rows(), batch_size=8 if odd else 16), {}, "batch_size is 16 on rank 0, 8 on rank 1"),
        (DataLoader(rows(11 if odd else 12), 2), {}, "length of the dataset is 12 on rank 0, 11 on rank 1"),
        (DataLoader(rows(), 2, drop_last=odd), {}, "drop_last is false on rank 0, true on rank 1"),
        (
            DataLoader(rows(), 2, shuffle=odd),
            {},
            'class of the sampler is "SequentialSampler" on rank 0, "RandomSampler"',
        ),
        (DataLoader(rows(), 2, sampler=range(6 + odd)), {}, "samples is 6 on rank 0, 7 on rank 1"),
        (
            DataLoader(rows(), batch_sampler=BatchSampler(range(12), 2 + odd, False)),
            {},
            "batches is 6 on rank 0, 4 on rank 1",
        ),
        (DataLoader(rows(), 4), {"split": odd}, "split is false on rank 0, true on rank 1"),
        (DataLoader(rows(), 4), {"evaluate": odd}, "evaluate is false on rank 0, true on rank 1"),
    ]
    for loader, arguments, text in cases:
        with pytest.raises(fd.Mismatch, match=text):
            fd.shard(loader, **arguments)
