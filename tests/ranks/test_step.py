"""`fd.step` and `fd.evaluate`: targets that do not count, and batches of any size, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.split import split_of
from tests.ranks.pool import ranks, takes
from tests.ranks.test_degrees import Text, batch, loss_of, plan_of


def counted(targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum()


def ignoring(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a batch in which two samples have no target that counts, and others few."""
    tokens, places, targets = batch(number)
    targets = targets.clone()
    targets[0, 3:], targets[1], targets[5, :7], targets[7] = -100, -100, -100, -100
    return tokens, places, targets


def shares(here: Any, plan: Plan, whole: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    own = [each.chunk(here.sample_size)[here.sample_rank].contiguous() for each in whole]
    return list(fd.context_shard(*own)) if plan.context != 1 else own


def require_equal(model: nn.Module, reference: nn.Module, what: str) -> None:
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        if found.numel():
            split, whole = split_of(parameter), wanted[name].detach()
            torch.testing.assert_close(
                found.detach(), whole if split is None else split.take(whole), rtol=1e-5, atol=2e-6,
                msg=lambda m: f"{name} by {what}: {m}",  # noqa: B023
            )  # fmt: skip


def train(plan: Plan) -> None:
    """Three steps beside one process whose loss is the mean over all targets that count."""
    here = fd.init()
    reference, model = Text(experts=plan.expert != 1), Text(experts=plan.expert != 1)
    plain, optimizer = (torch.optim.SGD(each.parameters(), 0.3) for each in (reference, model))
    fd.distribute(model, optimizer, plan)
    for number in range(3):
        tokens, places, targets = ignoring(number)
        plain.zero_grad(), optimizer.zero_grad()
        expected = loss_of(reference(tokens, places), targets)
        expected.backward()
        own = shares(here, plan, (tokens, places, targets))
        loss = fd.step(model, loss_of, (own[0], own[1]), own[2], count=counted)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        plain.step(), optimizer.step()
        again = fd.evaluate(model, loss_of, (own[0], own[1]), own[2], count=counted)
        with torch.no_grad():
            torch.testing.assert_close(again, loss_of(reference(tokens, places), targets), rtol=1e-5, atol=1e-6)
    require_equal(model, reference, str(here.degrees))


@pytest.mark.full("further")
@ranks(2)
@takes(60)
def test_targets_that_do_not_count_by_one_degree() -> None:
    for degree, keys in (
        ("data", {"micro_batches": 4}),
        ("pipeline", {"micro_batches": 8}),
        ("pipeline", {"micro_batches": 4, "schedule": "zb-h1"}),
        ("shard", {"micro_batches": 2}),
        ("tensor", {"micro_batches": 4}),
        ("expert", {"micro_batches": 2}),
        ("context", {"micro_batches": 4}),
    ):
        train(plan_of((degree,), **keys))


@pytest.mark.gate_cases("tensor-pipeline")
@pytest.mark.parametrize(
    "pair", [("data", "pipeline"), ("context", "pipeline"), ("tensor", "pipeline")], ids="-".join
)
@ranks(4)
@takes(60)
def test_targets_that_do_not_count_by_two_degrees(pair: tuple[str, str]) -> None:
    train(plan_of(pair, micro_batches=4))


@ranks(4)
def test_unequal_numbers_without_a_count_are_an_error_on_all_ranks() -> None:
    here = fd.init()
    for plan in (Plan(pipeline=2, micro_batches=4), Plan(micro_batches=2)):
        model = Text(experts=False)
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
        tokens, places, targets = batch(0)
        targets = targets.clone()
        targets[0, 2:] = -100  # on the first replica alone
        own = shares(here, plan, (tokens, places, targets))
        with pytest.raises(ConfigError, match=r"unequal numbers of targets of -100 .*count=lambda"):
            fd.step(model, loss_of, (own[0], own[1]), own[2])
        with pytest.raises(ConfigError, match=r"unequal numbers of targets of -100"):
            fd.evaluate(model, loss_of, (own[0], own[1]), own[2])
        with pytest.raises(ConfigError, match="count returned -1; expected"):
            fd.step(model, loss_of, (own[0], own[1]), own[2], count=lambda _: -1)


@pytest.mark.gate_cases("shard", "expert")
@pytest.mark.parametrize("degree", ["data", "shard", "pipeline", "expert"])
@ranks(2)
@takes(60)
def test_an_evaluation_takes_batches_of_any_size(degree: str) -> None:
    here = fd.init()
    keys = {"schedule": "interleaved", "chunks": 2} if degree == "pipeline" else {}
    plan = plan_of((degree,), micro_batches=4, **keys)
    reference, model = Text(experts=plan.expert != 1).eval(), Text(experts=plan.expert != 1).eval()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    tokens, places, targets = batch(0)
    for first, second in ((8, 8), (5, 3), (1, 4), (6, 2)):  # samples of the two ranks
        counts = [first, second] if here.sample_size == 2 else [first]
        begin = sum(counts[: here.sample_rank])
        mine = slice(begin, begin + counts[here.sample_rank])
        x, y = tokens.repeat(2, 1), targets.repeat(2, 1)
        at = places.repeat(2, 1)
        with torch.no_grad():
            every = slice(0, sum(counts))
            expected = loss_of(reference(x[every], at[every]), y[every])
        loss = fd.evaluate(model, loss_of, (x[mine], at[mine]), y[mine])
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, msg=f"{degree}: {counts} samples")
    with torch.no_grad(), pytest.raises(ConfigError, match="is not distributed"):
        fd.step(reference, loss_of, (tokens, places), targets)


@ranks(2)
def test_the_loss_of_unequal_batches_is_the_mean_over_samples() -> None:
    here = fd.init()
    torch.manual_seed(0)
    rows, model = torch.randn(7, 3), nn.Linear(3, 1)
    reference = nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), Plan())
    loader = fd.shard(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2))
    assert here.size == 2, "two batches of two rows, then two rows and one"
    for number, (x,) in enumerate(loader):
        whole = rows[4 * number : 4 * number + 4]
        loss = fd.step(model, lambda out, _: out.square().mean(), x)
        torch.testing.assert_close(loss, reference(whole).square().mean().detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.full("further")
@ranks(4)
@takes(60)
def test_losses_of_routers_are_added_on_the_ranks_that_have_them() -> None:
    here = fd.init()
    for keys in ({"schedule": "1f1b"}, {"schedule": "zb-h1"}):
        plan = plan_of(("expert", "pipeline"), micro_batches=2, pipeline_cuts=("blocks.2",), **keys)
        reference, model = Text(experts=True), Text(experts=True)
        plain, optimizer = (torch.optim.SGD(each.parameters(), 0.3) for each in (reference, model))
        fd.distribute(model, optimizer, plan)
        for number in range(3):
            plain.zero_grad(), optimizer.zero_grad()
            whole = batch(number)
            expected = torch.zeros(())
            for part in range(2):  # of both ranks that have samples
                rows = [2 * part, 2 * part + 1, 4 + 2 * part, 5 + 2 * part]
                tokens, places, targets = (each[rows] for each in whole)
                loss = loss_of(reference(tokens, places), targets) + fd.router_loss(reference, balance=0.5, z=0.1)
                (loss / 2).backward()
                expected += loss.detach() / 2
            own = shares(here, plan, whole)
            found = fd.step(model, loss_of, (own[0], own[1]), own[2], balance=0.5, z=0.1)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            plain.step(), optimizer.step()
        require_equal(model, reference, str(here.degrees))
        with pytest.raises(ConfigError, match=r"on different ranks .*balance=0.01"):
            fd.router_loss(model)
