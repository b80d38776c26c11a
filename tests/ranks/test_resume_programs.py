"""Generated trainings that stop anywhere: what is left is what would have come, to the augmented sample."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from tests.ranks.pool import ranks, takes

KINDS = (
    "shuffled", "in order", "weighted", "weighted by its generator", "drawn again", "of the user", "batches",
    "by length", "by tokens",
)  # fmt: skip
STREAMS = ("stream", "stream with states")


class Augmented(Dataset[torch.Tensor]):
    """Each sample is its index, and a number from each generator that augmentation draws from."""

    def __init__(self, count: int) -> None:
        self.reads = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        return augmented(index)


class AllAtOnce(Augmented):
    def __getitems__(self, indexes: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indexes]


class Stream(IterableDataset[torch.Tensor]):
    """Each worker has its part of the numbers."""

    def __init__(self, count: int) -> None:
        self.reads = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.reads)

    def begin(self) -> int:
        return 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(self.begin(), len(range(first, len(self.reads), step))):
            self.at = i + 1
            self.reads[first + step * i] += 1
            yield augmented(first + step * i) if info is None else torch.tensor([float(first + step * i)])


class StatefulStream(Stream):
    at = resumed = 0

    def begin(self) -> int:
        begin, self.resumed = self.resumed, 0
        return begin

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed = self.at = state["at"]


class OfUser(Sampler[int]):
    """Draws with every global generator, and by an epoch that it is told."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        random.shuffle(order)
        order = np.random.permutation(order).tolist()
        begin = (self.epoch + int(torch.randint(self.count, ()))) % self.count
        return iter(order[begin:] + order[:begin])


def augmented(index: int) -> torch.Tensor:
    return torch.tensor([index, float(torch.rand(())), np.random.rand(), random.random()], dtype=torch.float64)


def generator_states() -> Any:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def restore(states: Any) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def make(kind: str, options: dict[str, Any], count: int, batch: int) -> tuple[Any, torch.Tensor]:
    """Return a new loader of a program, and how often each of its samples was read."""
    seed = 5
    if kind in STREAMS:
        stream = StatefulStream(count) if kind == "stream with states" else Stream(count)
        return fd.shard(DataLoader(stream, batch, **options), seed=seed), stream.reads
    rows: Any = Augmented(count) if batch % 2 else AllAtOnce(count)
    weights = [1.0 + i % 3 for i in range(count)]
    samplers: dict[str, Any] = {
        "weighted": WeightedRandomSampler(weights, count),
        "weighted by its generator": WeightedRandomSampler(
            weights, count, generator=torch.Generator().manual_seed(count)
        ),
        "drawn again": RandomSampler(rows, replacement=True, num_samples=count + 3),
        "of the user": OfUser(count),
    }
    if kind == "batches":
        drop_last = options.pop("drop_last")
        batches = BatchSampler(RandomSampler(rows), batch, drop_last)
        loader: Any = DataLoader(rows, batch_sampler=batches, **options)
    elif kind in samplers:
        loader = DataLoader(rows, batch, sampler=samplers[kind], **options)
    else:
        loader = DataLoader(rows, 1 if kind == "by tokens" else batch, shuffle=kind != "in order", **options)
    lengths: Any = {"lengths": [1 + i * i % 17 for i in range(count)]} if kind.startswith("by ") else {}
    if kind == "by tokens":
        lengths["max_tokens"] = 20 + batch
    made = fd.shard(loader, seed=seed, **lengths)
    rows.reads.zero_()  # in shared memory: a child has compared samples
    return made, rows.reads


def read(loader: Any, epochs: int, seen: list[Any], limit: int = 99999) -> None:
    """Read on until `epochs` are over or so many batches were read."""
    epoch = loader.state_dict()["epoch"]
    while epoch < epochs:
        loader.set_epoch(epoch)
        for batch in loader:
            seen.append(batch.tolist())
            limit -= 1
            if not limit:
                return
        epoch += 1


def play(chance: random.Random, kind: str, workers: int) -> None:
    count, batch, epochs = chance.randrange(1, 40), chance.randrange(1, 6), chance.randrange(1, 4)
    options: dict[str, Any] = {"num_workers": workers, "drop_last": chance.random() < 0.3}
    if workers:
        options |= {"prefetch_factor": chance.randrange(1, 4), "persistent_workers": chance.random() < 0.5}
    program = f"{kind}, {count} samples, batches of {batch}, {epochs} epochs, {options}"
    fd.seed(count, per_rank=True)
    whole: list[Any] = []
    loader, _ = make(kind, dict(options), count, batch)
    read(loader, epochs, whole)
    for _ in range(1 if workers else 2):
        stop = chance.randrange(1, max(2, min(all_gather_json(fd.world(), "test/batches", len(whole)))))
        fd.seed(count, per_rank=True)
        begun: list[Any] = []
        first, _ = make(kind, dict(options), count, batch)
        read(first, epochs, begun, stop)
        state = json.loads(json.dumps(first.state_dict()))
        assert len({str(each) for each in all_gather_json(fd.world(), "test/state", state)}) == 1, program
        generators = generator_states()
        del first
        fd.seed(1)
        resumed, reads = make(kind, dict(options), count, batch)
        resumed.load_state_dict(state)
        restore(generators)
        before, samples = len(begun), state["used"]
        read(resumed, epochs, begun)
        assert begun == whole, f"{program}, stopped after {before} batches"
        left = len([row for each in begun[before:] for row in each])
        if kind == "stream with states" and not workers:
            left = max(0, count - samples) + count * (epochs - 1 - state["epoch"])
        if kind != "stream" and not (workers and kind in STREAMS):
            assert int(reads.sum()) == left, f"{program}, stopped after {before}: {reads.tolist()}"


@pytest.mark.gate_cases("1")
@takes(60)
@ranks(1, 3)
def test_a_training_that_stops_anywhere_goes_on_as_if_it_had_not() -> None:
    chance = random.Random(fd.init().size)
    for kind in (*KINDS, *STREAMS):
        for _ in range(2):
            play(chance, kind, 0)


@pytest.mark.full("further")
@takes(60)
@ranks(2)
def test_with_workers_too() -> None:
    fd.init()
    chance = random.Random(8)
    for kind in ("shuffled", "of the user", "batches", "by tokens", *STREAMS):
        play(chance, kind, 2)
    augmented_by: list[Any] = [[], []]
    for workers, seen in zip((1, 2), augmented_by, strict=True):
        read(make("by length", {"num_workers": workers, "pin_memory": False}, 9, 2)[0], 1, seen)
    assert augmented_by[0] == augmented_by[1], "augmentation goes by the place, not by the worker"
