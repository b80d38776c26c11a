"""The plan's `balance`: unequal shares of a batch, with the gradient of one process and every sample once."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.step_model import divide_samples, longest_seconds
from farandole.core.vocabulary.errors import PlanError
from farandole.train import balance as balancer
from farandole.train.balance import Division
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import assert_same_bits

COUNT, WHOLE = 61, 12


class Rows(TensorDataset):
    """Inputs, targets, and which sample it is."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        x, y = (torch.randn(COUNT, width, generator=draw, dtype=torch.float64) for width in (6, 3))
        super().__init__(x, y, torch.arange(COUNT))


class Sleeper(nn.Module):
    """A model that takes `seconds` for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, 6) to (batch, 3)."""
        time.sleep(self.seconds * len(x))
        result: torch.Tensor = self.layers(x)
        return result


def make(plan: fd.Plan | None) -> tuple[Sleeper, torch.optim.Optimizer]:
    model = Sleeper()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if plan is not None:
        fd.distribute(model, optimizer, plan)
    return model, optimizer


def train(
    model: nn.Module, optimizer: Any, batches: Iterable[Any], accumulate: int = 1, most: int = 10**9
) -> list[list[int]]:
    """Train on `batches`; return the samples of each that count."""
    seen: list[list[int]] = []
    for number, (x, y, index) in enumerate(batches, start=1):
        (nn.functional.mse_loss(model(x), y) / accumulate).backward()
        seen.append(index.tolist() if fd.world().session.batch_weight.by_samples else [])
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number == most:
            break
    return seen


def everyones(seen: list[list[int]]) -> list[list[list[int]]]:
    """Return what each rank saw, by step and rank."""
    return [list(step) for step in zip(*all_gather_json(fd.world(), "test/seen", seen), strict=True)]


def assert_near(model: nn.Module, reference: nn.Module) -> None:
    expected = reference.state_dict()
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, expected[name], rtol=1e-10, atol=1e-10)


def loader(workers: int = 0, **options: Any) -> Any:
    return DataLoader(Rows(), batch_size=WHOLE, shuffle=True, num_workers=workers, **options)


def alone(epochs: int, accumulate: int = 1, most: int = 10**9) -> Sleeper:
    """Train as one process does on the same order: that of the seed 5."""
    model, optimizer = make(None)
    rows = Rows()
    for epoch in range(epochs):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(5 + epoch))
        batches = [rows[piece] for piece in order.split(WHOLE)]
        for number, (x, y, _) in enumerate(batches[:most], start=1):
            (nn.functional.mse_loss(model(x), y) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    following = next(iterator, None)
    while following is not None:
        current, following = following, next(iterator, None)
        yield current


@pytest.mark.gate_cases("keys4", "keys2")
@pytest.mark.parametrize(
    "keys", [{}, {"accumulate": 2}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"clip_norm": 0.3}]
)
@ranks(3)
@takes(60)
def test_listed_shares_train_as_one_process(keys: dict[str, Any]) -> None:
    fd.init()
    accumulate = keys.get("accumulate", 1)
    plan = fd.Plan(balance="3,2,1", **keys)
    model, optimizer = make(plan)
    for loop in (iter, one_ahead, list):
        batches = fd.shard(loader(), split=True, seed=5)
        seen = []
        for _ in range(2):
            seen += train(model, optimizer, loop(batches), accumulate)
        steps = everyones(seen)
        assert [len(own) for own in steps[0]] == [6, 4, 2]
        assert sorted(i for step in steps for own in step for i in own) == sorted([*range(COUNT)] * 2)
        if loop is iter and "clip_norm" not in keys:
            assert_near(model, alone(2, accumulate))
    if keys.get("zero") != 3:
        assert_same_bits(model)


@ranks(2)
def test_a_loader_that_was_divided_before_the_plan_was_known() -> None:
    fd.init()
    batches = fd.shard(loader(), split=True, seed=5)
    model, optimizer = make(fd.Plan(balance="1,5"))
    steps = everyones(train(model, optimizer, batches))
    assert [len(own) for own in steps[0]] == [2, 10]
    assert_near(model, alone(1))


def switch_to(*speeds: float) -> None:
    """Change the shares now, as a decision does; none is taken any more."""
    mine = balancer.balancer_of(fd.world())
    assert mine is not None
    mine._next_step = 10**9
    mine.division = Division(speeds)
    mine._change()


@pytest.mark.parametrize("loop", [iter, one_ahead])
@pytest.mark.parametrize("workers", [0, 2])
@ranks(2)
@takes(60)
def test_shares_that_change_in_an_epoch(workers: int, loop: Any) -> None:
    """What was drawn ahead, for workers or by the loop, keeps its shares; each sample is used once in an epoch."""
    fd.init()
    model, optimizer = make(fd.Plan(balance="speed"))
    batches = fd.shard(loader(workers, persistent_workers=workers > 0, prefetch_factor=1 if workers else None),
                       split=True, seed=5)  # fmt: skip
    changes: list[tuple[float, float]] = [(1.0, 3.0), (5.0, 1.0), (1.0, 1.0)]
    counts = []
    for change in changes:
        mine = []
        for number, batch in enumerate(loop(batches)):
            if number == 0:
                switch_to(*change)
            mine += train(model, optimizer, [batch])
        steps = everyones(mine)
        assert sorted(i for step in steps for own in step for i in own) == list(range(COUNT))
        counts.append([[len(own) for own in step] for step in steps])
    drawn = 1 + workers + (loop is one_ahead)
    assert counts[0] == [[6, 6]] * drawn + [[3, 9]] * (5 - drawn) + [[0, 1]]
    assert counts[1] == [[3, 9]] * drawn + [[10, 2]] * (5 - drawn) + [[1, 0]]
    assert counts[2] == [[10, 2]] * drawn + [[6, 6]] * (5 - drawn) + [[1, 0]]
    assert_near(model, alone(3))
    assert_same_bits(model)


@ranks(3)
@takes(60)
def test_resuming_in_the_middle_of_an_epoch_after_a_change() -> None:
    """Bit by bit with as many ranks, changes that were still to come included; with others the same samples."""
    fd.init()
    model, optimizer = make(fd.Plan(balance="speed"))
    saved: Any = None
    batches = fd.shard(loader(1), split=True, seed=5)
    switch_to(1.0, 1.0, 1.0)  # as they are: it is in the state
    rest: list[list[int]] = []
    for number, batch in enumerate(batches):
        if saved is None:
            train(model, optimizer, [batch])
        else:
            rest += train(model, optimizer, [batch])
        if number == 1:
            switch_to(1.0, 2.0, 3.0)  # two more are drawn
            saved = json.loads(json.dumps(batches.state_dict()))
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            momentum = copy.deepcopy(optimizer.state_dict())
    assert all(each == saved for each in all_gather_json(fd.world(), "test/state", saved))
    assert saved["shares"] == [[24, [1.0, 1.0, 1.0]], [48, [1.0, 2.0, 3.0]]], f"{saved}"
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("same ranks", "others"):
        shares = saved["shares"] if name == "same ranks" else [[24, [1.0, 9.0]]]
        switch_to(3.0, 1.0, 1.0)  # not what was saved
        model.load_state_dict(kept)
        optimizer.load_state_dict(copy.deepcopy(momentum))
        again = fd.shard(loader(1), split=True, seed=5)
        again.load_state_dict({**saved, "shares": shares})
        found = train(model, optimizer, again)
        if name == "same ranks":
            assert found == rest
            for key, value in model.state_dict().items():
                assert torch.equal(value, expected[key]), f"{key}: other bits than without the interruption"
        used = sorted(i for step in everyones(found) for own in step for i in own)
        assert used == sorted(torch.randperm(COUNT, generator=torch.Generator().manual_seed(5))[24:].tolist())
    assert_near(model, alone(1))
    with pytest.raises(fd.ConfigError, match="expected what state_dict"):
        again.load_state_dict({**saved, "shares": [[24, [1.0, 0.0, 3.0]]]})


@ranks(2)
def test_what_is_refused() -> None:
    fd.init()

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    with pytest.raises(
        PlanError, match='balance = "2,1,1" has 3 shares, and 2 ranks train on different samples; give'
    ):
        make(fd.Plan(balance="2,1,1"))
    with pytest.raises(PlanError, match="whose ranks wait for each other"):
        fd.Plan(balance="speed", tensor=2)


@ranks(2)
def test_loaders_that_are_refused() -> None:
    fd.init()
    make(fd.Plan(balance="speed", balance_cap=5))

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    own = BatchSampler(SequentialSampler(range(9)), 3, drop_last=False)
    lengths = [1 + i % 4 for i in range(COUNT)]
    for made, options, said in (
        (DataLoader(Stream(), batch_size=4), {}, "was given a stream"),
        (DataLoader(Rows(), batch_sampler=own), {}, "was given batches of a BatchSampler of the script's own"),
        (DataLoader(Rows(), shuffle=True), {"lengths": lengths, "max_tokens": 9}, "was given max_tokens"),
        (
            loader(),
            {"split": True},
            "balance_cap = 5, and 2 ranks of at most so many samples hold 10",
        ),
    ):
        with pytest.raises(PlanError, match=said):
            fd.shard(made, **options)
    evaluation = fd.shard(loader(), split=True, evaluate=True)
    assert [len(each[0]) for each in evaluation][:2] == [6, 6], "an evaluation is divided equally"
    with pytest.raises(PlanError, match="another model of this job has"):
        make(fd.Plan())


@ranks(2)
def test_a_cap_is_kept() -> None:
    fd.init()
    model, optimizer = make(fd.Plan(balance="9,1", balance_cap=8))
    steps = everyones(train(model, optimizer, fd.shard(loader(), split=True, seed=5)))
    assert [len(own) for own in steps[0]] == [8, 4]
    assert_near(model, alone(1))


@pytest.mark.full("busy")
@ranks(4)
@takes(90)
def test_four_ranks_of_which_one_is_half_as_fast() -> None:
    """Within 60 steps at 1.05 of the integer optimum, and 1.55 times as fast as the equal split."""
    fd.init()
    fast, slow = 0.006, 0.012
    seconds = {}
    for balance, steps in (("none", 25), ("speed", 80)):
        model, optimizer = make(fd.Plan(balance=balance))
        model.seconds = slow if fd.world().rank == 3 else fast
        x = torch.randn(64 * steps, 6, dtype=torch.float64)
        ends = []
        for (rows,) in fd.shard(DataLoader(TensorDataset(x), batch_size=64), split=True):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.monotonic())
        seconds[balance] = statistics.median(b - a for a, b in pairwise(ends[-20:]))
        fd.shutdown()
        fd.init()
    speeds = (1 / fast, 1 / fast, 1 / fast, 1 / slow)
    optimum = longest_seconds(divide_samples(64, speeds), speeds)
    assert seconds["speed"] <= 1.05 * optimum, f"{seconds}, optimum {optimum}"
    assert seconds["none"] / seconds["speed"] >= 1.55, f"{seconds}"


@pytest.mark.full("busy")
@ranks(2)
@takes(60)
def test_a_rank_with_a_slow_loader_keeps_its_samples() -> None:
    fd.init()

    class SlowRows(Rows):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.002 * fd.world().rank)
            return super().__getitem__(index)

    model, optimizer = make(fd.Plan(balance="speed"))
    batches = fd.shard(DataLoader(SlowRows(), batch_size=WHOLE), split=True)
    for _ in range(10):
        train(model, optimizer, batches)
    found = balancer.balancer_of(fd.world())
    assert found is not None
    counts = found.division.counts(1200)
    assert max(counts) < 800, f"a rank whose loader is slow was taken for a slow one: {counts}"
