"""`fd.verify` finds what it is for, names the minority, and passes a healthy job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.train.verify.joined import MeanCounts
from farandole.train.verify.verify import Verification, check_loss, check_repeats, check_sizes, row_hashes
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp, own


def trained() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    fd.distribute(model, optimizer)
    x, y = data(12)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
    return model, optimizer


def failures(check: Verification) -> dict[str, str]:
    return {c.name: c.answer for c in check.checks if c.passed is False}


@ranks(3)
def test_a_healthy_job_passes_every_check() -> None:
    fd.init()
    model, optimizer = trained()
    x, _ = data(12)
    check = fd.verify(model, optimizer, batch=own(x), losses=[2.0, 1.5])
    assert check, str(check)
    assert {c.name for c in check.checks if c.passed} == {
        "ranks", "parameters", "buffers", "optimizer state", "gradients", "batches", "loss",
    }  # fmt: skip
    check.raise_if_failed()
    note = "  not exact  batch norm: 1 BatchNorm layer normalises per rank (1)"
    assert f"{note}\n{'':>11}  -> --set sync_batch_norm=true" in str(check)
    fd.distribute(
        model := nn.BatchNorm1d(3), torch.optim.SGD(model.parameters(), 0.1), fd.Plan(sync_batch_norm=True)
    )
    assert "batch norm" not in str(fd.verify(model))


@ranks(3)
def test_each_fault_is_found_and_its_minority_named() -> None:
    world = fd.init()
    model, optimizer = trained()
    odd = world.rank == 1
    with torch.no_grad():
        if odd:
            model[0][2].weight[3, 4] = torch.nextafter(model[0][2].weight[3, 4], torch.tensor(9.0))
            model[1].running_mean[0] += 1
            optimizer.state[model[0][0].bias]["exp_avg"][0] += 1
            assert model[0][4].bias.grad is not None
            model[0][4].bias.grad[1] += 1
    x, _ = data(12)
    batch = x[:4] if world.rank < 2 else x[4:8]
    losses = [1.0, float("nan") if world.rank == 2 else 0.5]
    found = failures(fd.verify(model, optimizer, batch=batch, losses=losses))
    assert found == {
        "parameters": "'0.2.weight' differs on rank 1",
        "buffers": "'1.running_mean' differs on rank 1",
        "optimizer state": "'0.0.bias.exp_avg' differs on rank 1",
        "gradients": "'0.4.bias' differs on rank 1",
        "batches": "ranks 0 and 1 saw the same samples in step 1",
        "loss": "is nan on rank 2 in step 2",
    }
    with pytest.raises(fd.VerificationFailed, match=r"'0.2.weight' differs on rank 1; buffers"):
        fd.verify(model, optimizer, batch=batch).raise_if_failed()


@ranks(2)
def test_what_cannot_be_checked_says_so() -> None:
    fd.init()
    check = fd.verify(mlp())
    unknown = {c.name for c in check.checks if c.passed is None}
    assert unknown == {"gradients", "batches", "loss"}
    (buffers,) = [c for c in check.checks if c.name == "buffers"]
    assert buffers.passed, "there are none, which is no question left open"
    assert buffers.answer == "there are none"
    text = str(check)
    assert "not checked  loss: no loss was seen" in text
    assert check_loss(fd.world(), [1.0, 1.0]).passed is False
    assert check_loss(fd.world(), [1.0]).passed is None


@ranks(2)
def test_means_over_different_numbers_of_elements_and_samples_are_named() -> None:
    world = fd.init()
    for ignored in (0, 2):
        counts = MeanCounts(world)
        counts.start()
        target = torch.tensor([0, 1, 2, 0])
        target[: ignored * world.rank] = -100
        nn.CrossEntropyLoss()(torch.zeros(4, 3), target)
        nn.functional.cross_entropy(torch.zeros(4, 3), target, reduction="sum")
        counts.stop()
        notes = counts.checks()
        assert len(notes) == bool(ignored)
    assert notes[0].word == "not exact"
    assert (
        notes[0].answer == "in call 1 it is over 4, 2 elements on ranks 0 and 1, and ranks are averaged by samples"
    )
    assert not check_sizes(world, [4, 4])
    (note,) = check_sizes(world, [4, 4 - world.rank])
    assert (
        note.answer == "ranks were given 4, 3 samples in step 2 (the input's first dimension), which count alike"
    )


@ranks(1)
def test_one_rank() -> None:
    fd.init()
    model, optimizer = trained()
    assert fd.verify(model, optimizer, batch=data(3), losses=[1.0, 0.5]).passed


DIVIDED: list[dict[str, Any]] = [
    {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tensor": 2, "tensor_recipe": {"0": "columns", "2": "rows"}},
    {"tensor": 2, "tensor_recipe": {"0": "columns", "2": "rows"}, "zero": 1},
]  # fmt: skip


@ranks(4)
def test_a_divided_model_passes_and_what_differs_in_a_part_of_it_is_named() -> None:
    here = fd.init()
    for keys in DIVIDED:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        fd.distribute(model, optimizer, fd.Plan(**keys))
        losses = []
        for step in range(2):
            torch.manual_seed(10 * step + here.sample_rank)
            x = torch.randn(4, 64)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        found = fd.verify(model, optimizer, batch=x, losses=losses)
        assert found.passed, f"{keys}: {found}"
        if "tensor" not in keys:
            continue
        with torch.no_grad():
            next(model.parameters()).add_(here.rank == 3)  # the same part as rank 1
        (wrong,) = [each for each in fd.verify(model, optimizer).checks if each.passed is False]
        assert wrong.answer == "'0.weight' differs on ranks 1 and 3 (no majority)", f"{keys}: {wrong}"
        alike = fd.verify(model, optimizer, batch=torch.full((2,), float(here.sample_rank == 5)))
        (_, same) = [each for each in alike.checks if each.passed is False]
        assert same.answer == "ranks 0 and 2 saw the same samples in step 1", f"{keys}: {same}"


def hashes(*values: float) -> list[str]:
    return row_hashes(((torch.tensor(values).view(-1, 1), None), {"mask": torch.ones(len(values))}))


@ranks(2)
def test_samples_that_several_ranks_train_on_are_counted() -> None:
    world = fd.init()

    def told(*passes: tuple[int, list[str]]) -> list[tuple[bool | None, str, str]]:
        return [(each.passed, each.answer, each.word) for each in check_repeats(world, passes)]

    def own(first: int, count: int = 8) -> list[str]:
        return hashes(*range(first * (1 + world.rank), first * (1 + world.rank) + count))

    assert told() == []
    other = hashes(*range(8 * (2 - world.rank), 8 * (3 - world.rank)))
    assert told((1, own(8)), (2, other)) == [], "another epoch's"
    assert told((1, own(1, 4)), (2, hashes(world.rank))) == [
        (True, "3 of 10 were trained on by another rank, too, in the same step", "")
    ]
    assert told((1, own(7))) == [], "a placeholder"
    assert told((1, [*own(1, 4), *own(1, 1)])) == [], "the data have equal samples"
    assert told(*[(step, own(3)) for step in range(4)]) == [
        (None, "20 of 64 were trained on by another rank, too, in the same step", "seen twice")
    ]
    assert hashes(1, 2) != hashes(2, 1)
    assert len(row_hashes(([torch.ones(4, 2), torch.ones(3)], {}))) == 4
