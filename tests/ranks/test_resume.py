"""Epochs and resuming: each iteration is the next epoch, and a resumed run sees what would have come."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    get_worker_info,
)

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp

COUNT = 43


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + COUNT))


class Restless(Sampler[int]):
    """Draws from a generator that nothing else knows."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(COUNT), COUNT))


class Shuffled(Sampler[int]):
    """A sampler of the user's own, with an epoch of its own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def numbers(kind: str, workers: int = 0) -> Any:
    """Return a divided loader whose batches are numbers of samples."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if kind == "stream":
        return fd.shard(DataLoader(Stream(), batch_size=4, **options))
    return fd.shard(DataLoader(range(COUNT), batch_size=4, shuffle=kind == "shuffled", **options), seed=5)  # type: ignore[arg-type]


def seen(loader: Any, limit: int = 999) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append([int(i) for i in batch])
        if len(found) == limit:
            break
    return found


def of_all(mine: Any) -> list[Any]:
    return all_gather_json(fd.world(), "test/seen", mine)


@ranks(1, 2)
def test_each_iteration_is_another_epoch_and_the_usual_idioms_choose_it() -> None:
    fd.init()
    loader = numbers("shuffled")
    epochs = [seen(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0], "shuffled alike"
    idioms = (loader, loader.sampler, loader.batch_sampler.sampler)
    for idiom in idioms:
        assert hasattr(idiom, "set_epoch")
        idiom.set_epoch(1)
        assert seen(loader) == epochs[1]
        assert seen(loader) == epochs[2]


@ranks(1, 2)
def test_a_sampler_of_the_user_hears_of_its_epoch_by_every_idiom() -> None:
    fd.init()
    samples: Any = range(COUNT)
    plain: Any = fd.shard(DataLoader(samples, batch_size=4, sampler=Shuffled()))
    batches: Any = fd.shard(DataLoader(samples, batch_sampler=BatchSampler(Shuffled(), 4, False)))
    for loader, idioms in (
        (plain, (plain, plain.sampler)),
        (batches, (batches.batch_sampler.sampler,)),
    ):
        first = seen(loader)
        for idiom in idioms:
            idiom.set_epoch(1)
            second = seen(loader)
            assert second != first
            idiom.set_epoch(0)
            assert seen(loader) == first


@pytest.mark.gate_cases("1-shuffled-0")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "in order", "stream"])
@ranks(1, 2, 3)
def test_a_resumed_loader_continues_where_it_was(kind: str, workers: int) -> None:
    fd.init()
    first = numbers(kind, workers)
    whole = [seen(first) for _ in range(2)]
    for stop in (0, 1, 3, len(first)):
        loader = numbers(kind, workers)
        begun = [*seen(loader)]
        state = loader.state_dict()
        assert (state["epoch"], state["batches"]) == (1, 0)
        if stop:
            iterator = iter(loader)
            begun += [[int(i) for i in next(iterator)] for _ in range(stop)]
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            assert (state["epoch"], state["batches"]) == (1, stop)
            assert len({str(each) for each in of_all(state)}) == 1
            del iterator
        resumed = numbers(kind, workers)
        if workers and kind == "stream":
            seen(resumed, 1)  # its workers live already
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for epoch in range(state["epoch"], 2):
            resumed.set_epoch(epoch)  # as many loops do
            begun += seen(resumed)
        assert begun == whole[0] + whole[1], stop
        assert len(resumed) == len(first)
        assert resumed.state_dict()["epoch"] == 2


@ranks(2)
def test_an_epoch_that_was_left_by_break_is_continued() -> None:
    fd.init()
    loader = numbers("shuffled")
    whole = seen(loader)
    loader.set_epoch(0)
    part = seen(loader, 2)
    resumed = numbers("shuffled")
    resumed.load_state_dict(loader.state_dict())
    assert part + seen(resumed) == whole
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(1)  # another epoch begins at its beginning
    assert len(seen(resumed)) == len(whole)


@ranks(3)
def test_a_state_of_another_number_of_ranks_loses_and_doubles_nothing() -> None:
    world = fd.init()
    loader = numbers("shuffled")
    next(iter(loader))
    of_two_ranks = {**loader.state_dict(), "epoch": 2, "next_epoch": 3, "batches": 3, "used": 3 * 2 * 4}
    loader.load_state_dict(of_two_ranks)
    rest = [i for each in of_all(seen(loader)) for batch in each for i in batch]
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(5 + 2)).tolist()
    assert sorted(rest) == sorted(order[24:])
    assert world.size == 3


@ranks(2)
def test_a_training_that_resumes_in_the_middle_of_an_epoch_is_the_same_training() -> None:
    fd.init()

    def ready() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        fd.distribute(model, optimizer)
        return (
            model,
            optimizer,
            fd.shard(DataLoader(TensorDataset(*data(COUNT)), batch_size=4, shuffle=True), seed=1),
        )

    def train(parts: Any, first: int, stop: int | None = None) -> Any:
        model, optimizer, loader = parts
        for epoch in range(first, 4):
            for i, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if epoch == 2 and i == stop:
                    return pickle.dumps([model.state_dict(), optimizer.state_dict(), loader.state_dict()])
        return None

    whole, begun, resumed = ready(), ready(), ready()
    train(whole, 0)
    saved = pickle.loads(train(begun, 0, 2))
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    train(resumed, saved[2]["epoch"])
    for name, value in resumed[0].state_dict().items():
        assert torch.equal(value, whole[0].state_dict()[name]), name


@ranks(2)
def test_states_that_cannot_be_loaded_are_refused_on_all_ranks() -> None:
    world = fd.init()
    loader = numbers("shuffled")
    right = loader.state_dict()
    with pytest.raises(fd.Mismatch, match="the state is"):
        loader.load_state_dict({**right, "epoch": world.rank})
    with pytest.raises(fd.Mismatch, match="the state is"):
        loader.load_state_dict({} if world.rank else right)
    for wrong in ({}, {**right, "epoch": -1}, {**right, "version": 1}, {**right, "more": 1}, [1]):
        with pytest.raises(fd.ConfigError, match="expected what state_dict"):
            loader.load_state_dict(wrong)
    samples: Any = range(COUNT)
    own: Any = fd.shard(DataLoader(samples, batch_size=4, sampler=Restless()))
    next(iter(own))
    own.load_state_dict(own.state_dict())
    with pytest.raises(fd.ConfigError, match=r"after 1 batches: its order is not .* a Restless that draws"):
        next(iter(own))
    next(iter(loader))
    middle = loader.state_dict()
    shorter: Any = fd.shard(DataLoader(range(COUNT - 1), batch_size=4, shuffle=True))  # type: ignore[arg-type]
    by_length: Any = fd.shard(DataLoader(samples, batch_size=4, shuffle=True), lengths=[1] * COUNT)
    stream = numbers("stream")
    for other, text in (
        (shorter, "of an epoch of 43 samples .*and this one has 42"),
        (by_length, "another way than by this RandomSampler and by lengths"),
        (own, "another way than by this Restless"),
        (stream, "of a dataset with indexes, and this is a stream"),
    ):
        with pytest.raises(fd.ConfigError, match=text):
            other.load_state_dict(middle)
    next(iter(stream))
    middle = stream.state_dict()
    with pytest.raises(fd.ConfigError, match="9 samples of the stream"):
        stream.load_state_dict({**middle, "used": 9})
    with pytest.raises(fd.ConfigError, match="was read by 0 workers, and this loader has 2"):
        numbers("stream", 2).load_state_dict(middle)
    assert len(seen(loader)) == len(loader), "the loader works on"


def train_over(loader: Any, epochs: int = 1) -> None:
    model = mlp()
    fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


@pytest.mark.gate_cases("True-loader", "False-sampler")
@pytest.mark.parametrize("idiom", ["loader", "sampler"])
@pytest.mark.parametrize("shuffle", [True, False])
@ranks(3)
def test_ranks_that_choose_different_epochs_are_named_on_all(idiom: str, shuffle: bool) -> None:
    world = fd.init()
    loader = fd.shard(DataLoader(TensorDataset(*data(24)), batch_size=4, shuffle=shuffle))
    train_over(loader, 2)
    place: Any = loader if idiom == "loader" else loader.sampler
    place.set_epoch(5 if world.rank == 1 else 2)
    wanted = "samples of different epochs met in exchange 1: 2 on ranks 0 and 2, 5 on rank 1"
    with pytest.raises(fd.Mismatch, match=wanted):
        train_over(loader)


@ranks(2)
def test_a_rank_that_has_looked_at_a_batch_alone_is_named_where_it_matters() -> None:
    world = fd.init()
    rows = TensorDataset(*data(24))
    for shuffle in (False, True):
        loader = fd.shard(DataLoader(rows, batch_size=4, shuffle=shuffle))
        if world.rank == 0:
            next(iter(loader))
        if not shuffle:
            train_over(loader)  # the order is the same in each epoch
            continue
        with pytest.raises(fd.Mismatch, match="different epochs met in exchange 1: 0 on rank 1, 1 on rank 0"):
            train_over(loader)


@ranks(2)
def test_loops_that_go_back_and_forth_between_loaders_are_not_compared() -> None:
    """As each rank may choose for itself, here the second loader begins anew in other steps on rank 1."""
    world = fd.init()
    model = mlp()
    fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
    loaders = [fd.shard(DataLoader(TensorDataset(*data(n)), batch_size=2, shuffle=True)) for n in (48, 8)]
    iterators = [iter(each) for each in loaders]
    for step in range(16):
        at = int(step % (3 if world.rank else 2) == 0)
        batch = next(iterators[at], None)
        if batch is None:
            iterators[at] = iter(loaders[at])
            batch = next(iterators[at])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()


class Returning(IterableDataset[int]):
    """Knows where it is, and puts itself back at its end, so that the next epoch begins at the beginning."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        own = range(COUNT) if info is None else range(info.id, COUNT, info.num_workers)
        while self.at < len(own):
            self.at += 1
            yield own[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.gate_cases("1-0", "2-0")
@pytest.mark.parametrize("workers", [0, 2])
@ranks(1, 2)
def test_a_stream_that_stops_at_any_batch_gives_each_sample_once(workers: int) -> None:
    """Also at a short batch, the last one of the stream or of one of its workers."""
    fd.init()

    def loader() -> Any:
        return fd.shard(DataLoader(Returning(), batch_size=4, num_workers=workers))

    first = loader()
    whole = [seen(first) for _ in range(2)]
    assert whole[0] == whole[1]
    for stop in range(1, len(whole[0]) + 1):
        stopped, resumed = loader(), loader()
        iterator = iter(stopped)
        begun = [[int(i) for i in next(iterator)] for _ in range(stop)]
        state = json.loads(json.dumps(stopped.state_dict()))
        del iterator
        resumed.load_state_dict(state)
        assert begun + seen(resumed) == whole[0], stop
        assert seen(resumed) == whole[1], stop
