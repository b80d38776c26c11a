"""The plan's key `expert`: trainings with divided experts are those of one process on the joined batch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import farandole as fd
from farandole.core.vocabulary.errors import CheckpointError, PlanError
from farandole.core.vocabulary.events import Logged, Setup
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.expert.layer import MixtureOfExperts, router_loss
from farandole.parallel.split import split_of
from tests.ranks.pool import ranks, takes

HIDDEN, EXPERTS = 10, 8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def mixture(**keys: Any) -> nn.Sequential:
    """Return a model with two mixtures of experts, the same on all ranks."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, HIDDEN),
        MixtureOfExperts(HIDDEN, 16, **{"num_experts": EXPERTS, "shared_size": 5, **keys}),
        nn.Tanh(),
        MixtureOfExperts(HIDDEN, 12, num_experts=EXPERTS, top_k=1, activation="gelu"),
        nn.Linear(HIDDEN, 3),
    )


def batch(step: int, counts: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs and targets of each rank, `counts` rows of them."""
    generator = torch.Generator().manual_seed(100 + step)
    return [
        (torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator))
        for count in counts
    ]


def assert_parts(mine: nn.Module, whole: nn.Module, of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Compare what `of` says of each parameter with this rank's part of that of one process."""
    expected = dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        value, reference, split = of(parameter), of(expected[name]), split_of(parameter)
        assert value is not None, name
        assert reference is not None, name
        part = reference if split is None else split.take(reference)
        torch.testing.assert_close(value, part, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def check(plan: Plan, counts: list[int], make: Callable[..., torch.optim.Optimizer], **keys: Any) -> None:
    """Train five steps beside one process that has the batches of all ranks."""
    here = fd.world()
    whole, mine = mixture(**keys), mixture(**keys)
    plain, optimizer = make(whole.parameters()), make(mine.parameters())
    names = list(mine.state_dict())
    fd.distribute(mine, optimizer, plan)
    assert list(mine.state_dict()) == names, "names stay"
    for step in range(5):
        batches = batch(step, counts)
        joined = whole(torch.cat([x for x, _ in batches])).split(counts)
        losses = [(out - y).square().mean() for out, (_, y) in zip(joined, batches, strict=True)]
        expected = torch.stack(losses).mean() + (router_loss(whole, z=0.01) if len(set(counts)) == 1 else 0.0)
        plain.zero_grad(), expected.backward()
        x, y = batches[here.rank]
        own = (mine(x) - y).square().mean()
        loss = own + (router_loss(mine, z=0.01) if len(set(counts)) == 1 else 0.0)
        optimizer.zero_grad(), loss.backward()
        mean = fd.mean(loss.detach())
        torch.testing.assert_close(torch.tensor(mean), expected.detach(), rtol=1e-5, atol=1e-6)
        assert_parts(mine, whole, lambda each: each.grad)
        if plan.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(whole.parameters(), plan.clip_norm)
            assert norm > plan.clip_norm, "gradients are clipped"
        plain.step(), optimizer.step()
    assert_parts(mine, whole, lambda each: each.detach())


@pytest.mark.full("further")
@ranks(2, 4)
@takes(90)
def test_five_steps_are_those_of_one_process() -> None:
    size = fd.init().size
    even, uneven = [5] * size, [3 + 4 * rank for rank in range(size)]
    for plan in [Plan(expert=size), *([Plan(expert=2, data=2)] if size == 4 else [Plan(data=2)])]:
        check(plan, even, OPTIMIZERS["sgd"])
        check(plan, uneven, OPTIMIZERS["adam"])
        clipped = replace(plan, clip_norm=0.05)
        check(clipped, even, OPTIMIZERS["adam"], capacity_factor=0.7)


@ranks(2)
def test_tokens_that_weigh_alike_in_batches_of_unequal_length() -> None:
    here = fd.init()
    whole, mine = mixture(), mixture()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    fd.distribute(mine, optimizer, Plan(expert=2))
    batches = batch(0, [3, 9])
    expected = whole(torch.cat([x for x, _ in batches])) - torch.cat([y for _, y in batches])
    (expected.square().mean() + router_loss(whole)).backward()
    x, y = batches[here.rank]
    loss = (mine(x) - y).square().mean() + router_loss(mine)
    fd.weight(len(x))
    loss.backward()
    assert_parts(mine, whole, lambda each: each.grad)
    fd.weight(None)


@pytest.mark.full("further")
@ranks(4)
def test_accumulated_and_recomputed_passes() -> None:
    here = fd.init()
    whole, mine = mixture(), mixture()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    fd.distribute(mine, optimizer, Plan(expert=2, data=2, accumulate=2, recompute=("1", "3")))
    for step in range(2):
        batches = batch(step, [4] * 4)
        whole(torch.cat([x for x, _ in batches])).square().mean().backward()
        mine(batches[here.rank][0]).square().mean().backward()
    assert_parts(mine, whole, lambda each: each.grad)
    optimizer.step()


@ranks(2)
def test_a_rank_that_has_all_experts_may_evaluate_alone() -> None:
    here = fd.init()
    model = mixture()
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan())
    x, _ = batch(0, [4])[0]
    with torch.no_grad():
        if here.rank == 0:
            torch.testing.assert_close(model.eval()(x), mixture().eval()(x))
    fd.barrier()


class _Events(list[Any]):
    """A recorder that keeps all."""

    def record(self, event: Any) -> None:
        self.append(event)


@pytest.mark.full("further")
@ranks(2)
def test_the_share_of_each_expert_is_recorded() -> None:
    here = fd.init()
    recorded = here.session.recorder = _Events()
    model = mixture(capacity_factor=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fd.distribute(model, optimizer, Plan(expert=2))
    for step in range(2):
        x, _ = batch(step, [8, 6])[here.rank]
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()(x)
    metrics = [dict(event.metrics or {}) for event in recorded if isinstance(event, Logged)]
    assert len(metrics) == (4 if here.rank == 0 else 0), "a layer and training pass, of the first rank"
    if here.rank == 0:
        shares = [metrics[0][f"experts/1/share/{i}"] for i in range(EXPERTS)]
        assert sum(shares) == pytest.approx(1.0, abs=1e-5), f"{shares}"
        assert metrics[0]["experts/1/imbalance"] == pytest.approx(max(shares) * EXPERTS, rel=1e-3)
        assert 0 < metrics[0]["experts/1/dropped"] < 1, "half of an even share is taken"
        assert metrics[1]["experts/3/dropped"] == 0.0, "the other layer drops nothing"
    facts = [event.values for event in recorded if isinstance(event, Setup) and "expert_layer" in event.values]
    assert len(facts) == 2, "after steps 1 and 2"
    assert facts[-1]["expert_layer"] in ("1", "3"), f"{facts}"
    assert float(facts[-1]["expert_seconds"] or 0) > 0, "on every rank"


class OddExperts(nn.Module):
    """Experts of a form that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 6, 6))


class WithPairs(torch.optim.SGD):
    """Works element by element, and keeps what is no part of a parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["pair"] = torch.ones(2)


def make_adam(model: nn.Module, keys: dict[str, Any]) -> torch.optim.Optimizer:
    """Return Adam, with which rounding does not decide how far a small gradient leads."""
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, **keys)


@pytest.mark.parametrize("keys", [{"foreach": True}, {"fused": True}, {}], ids=["foreach", "fused", "neither"])
@ranks(2)
def test_shards_and_experts_step_together_with_any_options(
    keys: dict[str, bool],
) -> None:
    here = fd.init()
    whole, mine = mixture(), mixture()
    plain, optimizer = make_adam(whole, {}), make_adam(mine, keys)
    fd.distribute(mine, optimizer, Plan(expert=2, zero=3))
    heard = io.StringIO()
    for step in range(3):
        batches = batch(step, [5, 5])
        expected = whole(torch.cat([x for x, _ in batches])) - torch.cat([y for _, y in batches])
        plain.zero_grad(), expected.square().mean().backward(), plain.step()
        x, y = batches[here.rank]
        with redirect_stderr(heard):
            optimizer.zero_grad(), (mine(x) - y).square().mean().backward(), optimizer.step()
    assert_parts(mine, whole, lambda each: each.full_tensor() if isinstance(each, DTensor) else each.detach())
    asked = "".join(keys)
    told = [line for line in heard.getvalue().splitlines() if "one parameter after the other" in line]
    assert len(told) == (1 if keys and here.rank == 0 else 0), told
    assert all(f"without {asked}: its groups" in line for line in told)
    assert all(group[key] for group in optimizer.param_groups for key in keys), (
        "options are the user's between steps"
    )


class Stages(nn.Module):
    """Two blocks, of which the second has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), fd.MixtureOfExperts(8, 8, num_experts=4, top_k=2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens); return (batch, tokens, 9)."""
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


@ranks(4)
def test_experts_in_some_stages_alone_are_saved_with_shards(tmp_path: Path) -> None:
    here = fd.init()
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Stages()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        fd.distribute(
            model, optimizer,
            Plan(expert=2, pipeline=2, zero=3, micro_batches=2, pipeline_cuts=("blocks.1",)),
        )  # fmt: skip
        models.append((model, optimizer))
    tokens = (torch.arange(8).view(4, 2) + here.sample_rank) % 9
    for step in range(3):
        for model, optimizer in models:
            if step == 2 and model is models[0][0]:
                fd.save(tmp_path / "saved", model, optimizer)
                fd.load(tmp_path / "saved", *models[1])
            optimizer.zero_grad()
            fd.step(model, lambda out, y: functional.cross_entropy(out.flatten(0, 1), y.flatten()), tokens, tokens)
            optimizer.step()
    for one, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        pair = [each.to_local() if isinstance(each, DTensor) else each for each in (one.detach(), other.detach())]
        assert torch.equal(*pair)


@pytest.mark.full("further")
@ranks(2)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    fd.init()
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (nn.Linear(4, 4), {}, "has no mixture of experts that is known"),
        (nn.Sequential(nn.Linear(4, 4), OddExperts()), {}, r"1 \(OddExperts\) have another form"),
        (mixture(num_experts=3), {}, "expert = 2 does not divide the 3 experts of 1; set expert to one of 3"),
        (mixture(num_experts=9), {}, "does not divide the 9 experts of 1; set expert to one of 3, 9"),
        (mixture(), {"zero": 1}, "zero = 1 with expert = 2"),
        (mixture(), {"precision": "fp16"}, 'precision = "fp16" with expert = 2'),
    ]
    for model, keys, message in cases:
        with pytest.raises(PlanError, match=message):
            fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(expert=2, **keys))
    model = mixture()
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(expert=2))
    with pytest.raises(CheckpointError, match="a module that is not distributed differs between the ranks"):
        fd.save(tmp_path / "not written", model, mean=copy.deepcopy(model))
    strange = mixture()
    with pytest.raises(fd.ConfigError, match=r"expert = 2: Adafactor cannot update parts of parameters"):
        fd.distribute(strange, torch.optim.Adafactor(strange.parameters(), lr=0.1), Plan(expert=2))
    optimizer = WithPairs(strange.parameters(), lr=0.1)
    fd.distribute(strange, optimizer, Plan(expert=2))
    strange(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"pair has the shape .* divided over ranks"):
        fd.save(tmp_path / "not written", strange, optimizer)
