"""`fd.shard` refuses data that are not the same on all ranks, and leaves no trace of having looked."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.train.data.rank_sampler import generator_states
from farandole.train.same_data import data_of
from tests.ranks.pool import ranks

ROWS = TensorDataset(torch.arange(40.0).view(-1, 1))


class Made(Dataset[Any]):
    """Samples that a function makes of the index."""

    def __init__(self, make: Callable[[int], Any], count: int = 12) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Wrapper(Dataset[Any]):
    """What scripts write to have another transform for each part of a split."""

    def __init__(self, part: Dataset[Any]) -> None:
        self.part = part

    def __len__(self) -> int:
        return len(self.part)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.part[index]


def refusal(dataset: Any, **options: Any) -> str:
    with pytest.raises(fd.Mismatch) as caught:
        fd.shard(DataLoader(dataset, batch_size=2), **options)
    return str(caught.value)


@ranks(3)
def test_a_split_that_each_rank_drew_is_refused_on_all_of_them() -> None:
    world = fd.init()
    fd.seed(0, per_rank=True)
    for part in random_split(ROWS, [30, 10]):
        text = refusal(part)
        assert "the split by indices in the Subset on ranks 1 and 2 is not that of rank 0" in text
        assert "draw the split with a generator of its own (generator=torch.Generator().manual_seed(0))" in text
    for part in random_split(ROWS, [30, 10], generator=torch.Generator().manual_seed(0)):
        fd.shard(DataLoader(part, batch_size=5))
    order: Any = np.random.permutation(40)  # seeded per rank, as NumPy's without a seed is
    nested: Any = ConcatDataset([ROWS, Subset(Subset(ROWS, order), range(10))])
    assert "the split by indices in the ConcatDataset on ranks 1 and 2 is not" in refusal(nested)
    order[[0, world.rank]] = order[[world.rank, 0]]
    assert "the split by indices in the Wrapper on ranks 1 and 2 is not" in refusal(Wrapper(Subset(ROWS, order)))


def test_indices_are_the_same_in_whatever_they_are_kept() -> None:
    kinds: list[Any] = [
        [0, 1, 2],
        range(3),
        np.arange(3, dtype=np.uint8),
        torch.arange(3),
        [np.int64(i) for i in range(3)],
    ]
    assert len({data_of(Subset(ROWS, kind))[0] for kind in kinds}) == 1
    assert data_of(Subset(ROWS, [0, 2, 1]))[0] != data_of(Subset(ROWS, range(3)))[0]
    keys: Any = Subset({"a": 1}, ["a"])  # type: ignore[arg-type, list-item]
    assert data_of(keys)[0] is None, "they are no numbers"


def nest(index: int, other: Any) -> Any:
    return {
        "text": "a",
        "parts": (np.array([index, 2.5]), [torch.ones(2, dtype=torch.bfloat16), b"x"]),
        "label": other,
    }


@pytest.mark.full("busy")  # samples that are not read within seconds are not compared
@pytest.mark.parametrize(
    "pair",
    [
        (1, 2),
        (0.5, 0.6),
        ("x", "y"),
        (b"x", b"y"),
        (None, 0),
        (np.str_("x"), np.str_("y")),
        (1j, 2j),
        ([1], [1, 1]),
    ],
    ids=repr,
)
@ranks(2)
def test_another_sample_is_refused_wherever_it_differs(pair: tuple[Any, Any]) -> None:
    world = fd.init()
    mine = Made(lambda index: nest(index, pair[world.rank if index == 6 else 0]))
    assert "sample 6 in the Made on rank 1 is not that of rank 0" in refusal(mine)


@ranks(2)
def test_another_file_on_one_rank_is_refused_with_any_sampler() -> None:
    world = fd.init()
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(world.rank))
    found = TensorDataset(rows)
    assert "sample 0 in the TensorDataset on rank 1" in refusal(found)
    assert "sample 0 in the TensorDataset on rank 1" in refusal(found, lengths=[1] * 12)
    with pytest.raises(fd.Mismatch, match="sample 0 in the TensorDataset on rank 1"):
        fd.shard(DataLoader(found, batch_sampler=BatchSampler(SequentialSampler(found), 2, False)))


def own_coin(rank: int) -> random.Random:
    """Return a generator that falls alike twice, on each rank otherwise, and then differently."""
    for seed in range(1000):
        drawn = random.Random(seed)
        flips = [drawn.choice("01") for _ in range(4)]
        if flips[:2] == [str(rank)] * 2 and len(set(flips)) == 2:
            return random.Random(seed)
    raise AssertionError("no such seed")


@ranks(2)
def test_what_is_random_or_rounded_or_elsewhere_is_not_refused() -> None:
    world = fd.init()
    fd.seed(0, per_rank=True)
    coin = own_coin(world.rank)
    makes: list[Callable[[int], Any]] = [
        lambda index: torch.randn(3),
        lambda index: float(np.random.rand()),
        lambda index: random.random() < 0.5,
        lambda index: coin.choice("01"),
        lambda index: torch.ones(1000) * (1 + world.rank * 1e-6),
        lambda index: {"path": f"/scratch/{world.rank}/{index}.png"},
        lambda index: torch.tensor([float("nan"), float("inf"), 1.0]),
    ]
    for make in makes:
        fd.shard(DataLoader(Made(make), batch_size=2))


@ranks(2)
def test_looking_disturbs_no_random_numbers_and_no_object() -> None:
    fd.init()
    fd.seed(0, per_rank=True)
    calls: list[int] = []
    own = random.Random(0)

    def make(index: int) -> Any:
        calls.append(index)
        return torch.randn(2), np.random.rand(), random.random(), own.random()

    before, own_before = generator_states(), own.getstate()
    fd.shard(DataLoader(Made(make), batch_size=2))
    assert generator_states() == before
    assert (own.getstate(), calls) == (own_before, [])


class Lazy(Made):
    """Opens its file at the first sample, as one does with h5py."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda index: index)
        self.path, self.handle, self.opened_by = path, None, 0
        self.path.write_bytes(bytes(range(12)))

    def __getitem__(self, index: int) -> Any:
        if self.handle is None:
            self.handle, self.opened_by = self.path.open("rb"), os.getpid()  # type: ignore[assignment]
        assert self.opened_by == os.getpid(), "a handle of another process"
        self.handle.seek(index)  # type: ignore[attr-defined]
        return self.handle.read(1)[0]  # type: ignore[attr-defined]


@ranks(2)
def test_what_is_opened_late_is_not_opened_for_the_comparison(tmp_path: Path) -> None:
    world = fd.init()
    lazy = Lazy(tmp_path / str(world.rank))
    loader = fd.shard(DataLoader(lazy, batch_size=2, num_workers=1))
    assert lazy.handle is None
    seen = all_gather_json(world, "test/seen", [int(i) for batch in loader for i in batch])
    assert sorted(index for part in seen for index in part) == list(range(12))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a stream is not read")


@ranks(2)
def test_what_cannot_be_compared_is_left_to_the_loop() -> None:
    world = fd.init()

    def broken(index: int) -> Any:
        if world.rank:
            raise KeyError(index)
        return index

    def dies(index: int) -> Any:
        os._exit(world.rank)

    for make in (broken, dies, lambda index: object(), lambda index: torch.ones(2).to_sparse() * world.rank):
        fd.shard(DataLoader(Made(make), batch_size=2))
    fd.shard(DataLoader(Stream(), batch_size=2))


def test_a_sample_that_takes_long_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    def slow(index: int) -> int:
        print("reading", flush=True)
        time.sleep(30 if index else 0)
        return index

    begin = time.monotonic()
    assert [each is None for each in data_of(Made(slow), takes=1)] == [False, False, True, True]
    assert time.monotonic() - begin < 5
    assert capfd.readouterr() == ("", "")


def test_a_million_indices_are_quick() -> None:
    indices = torch.randperm(1_000_000).tolist()
    begin = time.monotonic()
    data_of(Subset(ROWS, indices))
    assert time.monotonic() - begin < 2


class Records(Dataset[Any]):
    """Samples in a file that is open, whose bytes are read ahead, and a connection to a server beside it."""

    def __init__(self, path: Path, peer: socket.socket | None = None) -> None:
        self.file, self.peer = path.open("rb"), peer
        self.file.read(16)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.peer is not None:
            self.peer.sendall(b"?")
            self.peer.recv(1)
        self.file.seek(16 + index * 100)
        read = self.file.read(100)
        assert read == bytes([index % 251]) * 100, f"sample {index} is {read!r}"
        return torch.full((2,), float(index))


@ranks(2)
def test_what_a_dataset_has_open_is_not_moved_by_the_comparison(tmp_path: Path) -> None:
    world = fd.init()
    path = Path(tmp_path) / f"records of {world.rank}"
    path.write_bytes(b"h" * 16 + b"".join(bytes([i % 251]) * 100 for i in range(400)))
    mine, theirs = socket.socketpair()
    asked = 0
    for dataset in (Records(path), Records(path, mine)):
        for place in (0, 81, 82, 200):
            if dataset.peer is not None:
                theirs.sendall(b"!")
            dataset[place]
        asked = 4 * (dataset.peer is not None)
        loader = fd.shard(DataLoader(dataset, batch_size=4))
        for place in (83, 163, 399):
            if dataset.peer is not None:
                theirs.sendall(b"!")
            dataset[place]
            asked += dataset.peer is not None
        assert len(loader) == 50
    theirs.setblocking(False)
    assert theirs.recv(100) == b"?" * asked, "nothing but the loop has asked the server"
