"""`fd.accumulate`: held passes are one exchange, and the step is what one process makes."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own

STEPS = 3


def joined_batches(count: int, whole: int) -> list[Any]:
    x, y = data(count)
    return [(x[i : i + whole], y[i : i + whole]) for i in range(0, count, whole)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, count: int, *, held: bool) -> int:
    """Train one epoch with windows of `STEPS`; return how many exchanges there were."""
    for i, (x, y) in enumerate(batches):
        last = (i + 1) % STEPS == 0 or i + 1 == count
        with fd.accumulate(held and not last):
            (nn.functional.mse_loss(model(x), y) / STEPS).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    reducer = DistributedModel.of(model).reducer
    return 0 if reducer is None else reducer.exchanges_done


@pytest.mark.gate_cases("1-44")
@pytest.mark.parametrize("count", [48, 44, 41])
@ranks(1, 2, 3)
def test_windows_with_uneven_batches_and_a_partial_one_are_those_of_one_process(count: int) -> None:
    """41 samples on 3 ranks: the last batch has 5 samples of 12; on 2 ranks one sample and a placeholder."""
    world = fd.init()
    whole = 4 * world.size
    batches = joined_batches(count, whole)
    reference = mlp()
    train(reference, torch.optim.Adam(reference.parameters()), batches, len(batches), held=False)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    fd.distribute(model, optimizer)
    loader = fd.shard(DataLoader(TensorDataset(*data(count)), batch_size=4))
    exchanges = train(model, optimizer, loader, len(loader), held=True)
    assert exchanges == (0 if world.size == 1 else -(-len(loader) // STEPS))
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_the_step_exchanges_what_no_pass_outside_did() -> None:
    fd.init()
    batches = joined_batches(16, 8)
    reference, model = mlp(), mlp()
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (reference, model))
    fd.distribute(model, optimizer)
    for _ in range(3):
        for x, y in batches:
            nn.functional.mse_loss(reference(x), y).backward()
            with fd.accumulate():
                nn.functional.mse_loss(model(own(x)), own(y)).backward()
        plain.step(), plain.zero_grad(), optimizer.step(), optimizer.zero_grad()
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    assert reducer.exchanges_done == 3
    assert_close(model, reference)
    assert_same_bits(model)


@ranks(2)
def test_a_pass_held_after_an_exchange_in_the_same_step() -> None:
    """The gradient is a mean already when this rank's own is added to it, also where ranks weigh unequally."""
    world = fd.init()
    x, y = data(9)
    reference, model = mlp(), mlp()
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model))
    fd.distribute(model, optimizer)
    for i, rows in enumerate((range(3), range(3, 8), range(8, 9))):  # odd numbers: rank 0 has one more
        nn.functional.mse_loss(reference(x[rows]), y[rows]).backward()
        mine = list(rows)[:: world.size] if world.rank == 0 else list(rows)[1 :: world.size] or [0]
        count = len(list(rows)[world.rank :: world.size])
        world.session.batch_weight.set(count * world.size / len(rows))
        with fd.accumulate(i == 1):
            nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
    plain.step(), optimizer.step()
    assert_close(model, reference)
    assert_same_bits(model)


@ranks(2)
def test_two_models_are_held_and_exchanged_together() -> None:
    fd.init()
    x, y = data(16)
    pairs = [(mlp(1), mlp(2)) for _ in range(2)]
    optimizers = [[torch.optim.Adam(each.parameters()) for each in pair] for pair in pairs]
    for model, optimizer in zip(pairs[1], optimizers[1], strict=True):
        fd.distribute(model, optimizer)
    for step in range(3):
        for part in (slice(0, 8), slice(8, 16)):
            for model in pairs[0]:
                nn.functional.mse_loss(model(x[part]), y[part]).backward()
            with fd.accumulate(part.start == 0):
                for model in pairs[1][:: -1 if step else 1]:
                    nn.functional.mse_loss(model(own(x[part])), own(y[part])).backward()
        for pair in optimizers:
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    for mine, reference in zip(pairs[1], pairs[0], strict=True):
        assert_close(mine, reference)
        assert_same_bits(mine)


@ranks(3)
def test_ranks_that_hold_different_passes_are_told_on_all() -> None:
    world = fd.init(timeout_seconds=20)
    model = mlp()
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = data(4)
    nn.functional.mse_loss(model(x), y).backward()

    def accumulate_differently() -> None:
        for i in range(2):
            with fd.accumulate(world.rank == 2 and i == 0):
                nn.functional.mse_loss(model(x), y).backward()

    with pytest.raises(fd.Mismatch, match=r"met in exchange 2: 1 on ranks 0 and 1, 2 on rank 2; .*accumulate"):
        accumulate_differently()


@ranks(1, 2)
def test_misuse_is_refused() -> None:
    fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer)
    x, y = data(4)
    with pytest.raises(fd.ConfigError, match=r"inside another fd\.accumulate"), fd.accumulate(), fd.accumulate():
        pass
    with pytest.raises(fd.ConfigError, match="hold is a int, expected True or False"), fd.accumulate(4):  # type: ignore[arg-type]
        pass
    with pytest.raises(fd.ConfigError, match=r"steps inside fd\.accumulate"), fd.accumulate():  # noqa: PT012
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    optimizer.step()  # the context is left, whatever was raised in it
    planned = mlp()
    fd.distribute(planned, torch.optim.SGD(planned.parameters(), lr=0.1), fd.Plan(accumulate=2))
    with pytest.raises(fd.ConfigError, match="the plan says accumulate = 2"), fd.accumulate(False):
        pass


@ranks(2)
def test_a_scaler_that_looked_at_held_gradients_is_refused() -> None:
    fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    x, y = data(4)
    with fd.accumulate():
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    with pytest.raises(fd.ConfigError, match=r"1 backward passes inside fd\.accumulate.*GradScaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize(("passes", "keys"), [(1, {}), (1, {"zero": 3}), (2, {}), (2, {"zero": 3})])
@ranks(2)
def test_an_accumulation_without_effect_is_said_at_the_end(passes: int, keys: dict[str, Any]) -> None:
    here = fd.init()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(accumulate=2, **keys))
    for _ in range(3):
        for _ in range(passes):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    heard = io.StringIO()
    with redirect_stderr(heard):
        fd.shutdown()
    told = "accumulate = 2 had no effect: the optimizer stepped after each backward pass" in heard.getvalue()
    assert told == (passes == 1 and here.rank == 0)
