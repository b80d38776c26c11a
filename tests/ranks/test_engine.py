"""The main promise: ranks together compute what one process computes on the joined batch."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own, train_alone


@pytest.mark.gate_cases("sgd-True")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@ranks(3)
def test_training_equals_one_process(kind: str, set_to_none: bool) -> None:
    fd.init()
    model, reference = mlp(), mlp()
    make: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    }
    optimizer = make[kind](model.parameters())
    model, optimizer = fd.distribute(model, optimizer, fd.Plan(bucket_bytes=600, first_bucket_bytes=200))
    x, y = data(12)
    for _ in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
    train_alone(reference, make[kind](reference.parameters()), [(x, y)] * 5)
    assert_close(model, reference)
    assert_same_bits(model)
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    assert len(reducer.names_by_bucket) > 2, reducer.names_by_bucket
    assert reducer.names_by_bucket[0][0].startswith("4."), "the last layer is ready first"


@pytest.mark.full("further")
@ranks(2)
def test_backward_ends_with_the_mean_gradient_in_the_bucket() -> None:
    world = fd.init()
    model = mlp()
    model, _ = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = data(8)
    for _ in range(2):
        model.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
    alone = mlp()
    nn.functional.mse_loss(alone(x), y).backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=f"{name} on {world.rank}")
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    flat = reducer.buckets.buckets[0].gradients.flat  # type: ignore[attr-defined]
    last = list(model.parameters())[-1]
    assert last.grad is not None
    assert last.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.full("further")
@ranks(3)
def test_rank_0_wins_at_the_start() -> None:
    world = fd.init()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(world.rank + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (world.rank + 1))
    if world.rank == 0:  # as after loading a checkpoint on rank 0 alone
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(1)
    fd.distribute(model, optimizer)
    assert all(bool((tensor == 1).all()) for tensor in (*model.parameters(), *model.buffers()))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert len(optimizer.state) == 4
    check = fd.verify(model, optimizer)
    assert check.passed, str(check)
    assert any(c.name == "optimizer state" and c.passed for c in check.checks), str(check)


@pytest.mark.full("further")
@ranks(2)
def test_accumulation_is_silent_between_and_exact() -> None:
    fd.init()
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(accumulate=3))
    sent: list[float] = []
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    batches = [data(8, seed) for seed in range(8)]
    other = torch.optim.SGD(reference.parameters(), 0.1)
    for first in (0, 3, 6):  # the last group is short: 2 of 3
        group = batches[first : first + 3]
        for x, y in group:
            (nn.functional.mse_loss(model(own(x)), own(y)) / len(group)).backward()
            sent.append(float(reducer.passes.local.passes))
            (nn.functional.mse_loss(reference(x), y) / len(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
    assert_close(model, reference)
    assert_same_bits(model)
    assert sent == [1, 2, 0, 1, 2, 0, 1, 2], "passes held back before each exchange"


@pytest.mark.full("further")
@ranks(2)
def test_a_pass_that_was_thrown_away_does_not_count_as_one_of_those_held_back() -> None:
    fd.init()
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(accumulate=2))
    x, y = data(8)
    for _ in range(3):
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.zero_grad()
        reference.zero_grad()
        for _ in range(2):
            nn.functional.mse_loss(model(own(x)), own(y)).backward()
            nn.functional.mse_loss(reference(x), y).backward()
        # Before the step: what clipping sees.
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
        optimizer.zero_grad()


@ranks(2)
def test_clipping_by_the_users_loop_and_by_the_plan() -> None:
    fd.init()
    x, y = data(8)
    reference = mlp()
    train_alone(
        reference,
        torch.optim.SGD(reference.parameters(), 0.5),
        [(x, y * 10)] * 3,
        lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.1),
    )
    for plan, clips in ((fd.Plan(clip_norm=0.1), False), (fd.Plan(), True)):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        fd.distribute(model, optimizer, plan)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(own(x)), own(y * 10)).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert_close(model, reference)


class Branches(nn.Module):
    """A trunk and two heads of which a batch uses one; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](torch.tanh(self.trunk(x)))
        return out


@pytest.mark.full("further")
@ranks(2)
def test_unused_parameters() -> None:
    world = fd.init()
    model, reference = Branches(), Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    other = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    fd.distribute(model, optimizer, fd.Plan(bucket_bytes=100, first_bucket_bytes=50))
    x, y = data(8)
    # Which head each rank uses in each step: both the same, different ones, one unused for a while.
    for heads in ([0, 0], [0, 1], [1, 1], [1, 0], [0, 0]):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x), heads[world.rank]), own(y)).backward()
        optimizer.step()
        other.zero_grad()
        parts = zip(x.chunk(2), y.chunk(2), heads, strict=True)
        sum(nn.functional.mse_loss(reference(a, head), b) / 2 for a, b, head in parts).backward()  # type: ignore[union-attr]
        other.step()
        unused = [p.grad is None for p in model.heads[2].parameters()]
        assert unused == [True, True], "a gradient that nobody has stays None"
    assert_close(model, reference)
    assert_same_bits(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.body(self.embed(x))))
        return out


@pytest.mark.full("further")
@ranks(2)
def test_shared_parameters() -> None:
    fd.init()
    model, reference = Tied(), Tied()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    fd.distribute(model, optimizer)
    other = torch.optim.AdamW(reference.parameters(), 1e-2)
    tokens = torch.arange(12) % 11
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(own(tokens)), own(tokens)).backward()
        optimizer.step()
        other.zero_grad()
        nn.functional.cross_entropy(reference(tokens), tokens).backward()
        other.step()
    assert model.out.weight is model.embed.weight
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_frozen_then_unfrozen_then_frozen_again() -> None:
    fd.init()
    x, y = data(8)

    def schedule(model: nn.Sequential, step: int) -> None:
        model[0].requires_grad_(step >= 2)
        model[4].requires_grad_(step != 3)

    def run(model: nn.Sequential, a: torch.Tensor, b: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        for step in range(6):
            schedule(model, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()

    model, reference = mlp(), mlp()
    schedule(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    fd.distribute(model, optimizer, fd.Plan(bucket_bytes=600, first_bucket_bytes=200))
    run(model, own(x), own(y), optimizer)
    run(reference, x, y, torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9))
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_several_optimizers_and_several_backward_passes() -> None:
    fd.init()
    x, y = data(8)

    def optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(model[2:].parameters(), 1e-2)]

    def run(model: nn.Sequential, a: torch.Tensor, b: torch.Tensor, mine: list[torch.optim.Optimizer]) -> None:
        for _ in range(4):
            for each in mine:
                each.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            (0.3 * model(a).abs().mean()).backward()  # a second loss, before the step
            for each in mine:
                each.step()

    model, reference = mlp(), mlp()
    _, mine = fd.distribute(model, optimizers(model))
    run(model, own(x), own(y), mine)
    run(reference, x, y, optimizers(reference))
    assert_close(model, reference)
    assert_same_bits(model)
    assert fd.world().session.steps.done == 4


@ranks(2)
def test_two_models_in_one_backward() -> None:
    fd.init()
    x, y = data(8)
    first, second = mlp(1), nn.Linear(3, 3)
    pair, joint = (first, second), (copy.deepcopy(first), copy.deepcopy(second))
    mine = [torch.optim.SGD(m.parameters(), 0.1) for m in pair]
    for model, optimizer in zip(pair, mine, strict=True):
        fd.distribute(model, optimizer)
    other = [torch.optim.SGD(m.parameters(), 0.1) for m in joint]
    for _ in range(4):
        for models, steps, a, b in ((pair, mine, own(x), own(y)), (joint, other, x, y)):
            for each in steps:
                each.zero_grad()
            nn.functional.mse_loss(models[1](models[0](a)), b).backward()
            for each in steps:
                each.step()
    for model, alone in zip(pair, joint, strict=True):
        assert_close(model, alone)
        assert_same_bits(model)


@pytest.mark.gate_cases("float64")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64"])
@ranks(2)
def test_other_dtypes(name: str) -> None:
    fd.init()
    dtype = getattr(torch, name)
    model, reference = mlp().to(dtype), mlp().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    x, y = (t.to(dtype) for t in data(8))
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), [(x, y)] * 3)
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}[name]
    assert_close(model, reference, rtol=tolerance, atol=tolerance)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_mixed_dtypes_have_their_own_buckets() -> None:
    fd.init()
    model = mlp()
    model[2].to(torch.float64)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model[4](model[2](model[0](x).double()).float())
        return out

    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = data(8)
    for _ in range(2):
        model.zero_grad()
        nn.functional.mse_loss(forward(own(x)), own(y)).backward()
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    assert sorted(map(sorted, reducer.names_by_bucket)) == [
        ["0.bias", "0.weight", "4.bias", "4.weight"],
        ["2.bias", "2.weight"],
    ]
    mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    reducer.remove()
    model.zero_grad()
    nn.functional.mse_loss(forward(x), y).backward()
    for got, parameter in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


@ranks(3)
def test_sparse_embedding_gradients() -> None:
    world = fd.init()

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.embed = nn.Embedding(20, 6, sparse=True)
            self.rare = nn.Embedding(20, 6, sparse=True)
            self.out = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, with_rare: bool) -> torch.Tensor:
            hidden = self.embed(x) + (self.rare(x) if with_rare else 0)
            out: torch.Tensor = self.out(hidden)
            return out

    def make(model: Words) -> list[torch.optim.Optimizer]:
        sparse = [*model.embed.parameters(), *model.rare.parameters()]
        return [torch.optim.SparseAdam(sparse, 1e-2), torch.optim.SGD(model.out.parameters(), 0.1)]

    model, reference = Words(), Words()
    mine, other = make(model), make(reference)
    fd.distribute(model, mine)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        tokens = torch.randint(0, 20, (12,), generator=generator)
        y = torch.randn(12, 3, generator=generator)
        rare = [rank == step % 3 for rank in range(3)]  # one rank uses it, another one each step
        for each in (*mine, *other):
            each.zero_grad()
        nn.functional.mse_loss(model(own(tokens), rare[world.rank]), own(y)).backward()
        parts = zip(tokens.chunk(3), y.chunk(3), rare, strict=True)
        sum(nn.functional.mse_loss(reference(a, use), b) / 3 for a, b, use in parts).backward()  # type: ignore[union-attr]
        assert model.embed.weight.grad is not None
        assert model.embed.weight.grad.is_sparse
        for each in (*mine, *other):
            each.step()
    assert_close(model, reference)
    assert_same_bits(model)


def checkpointed(model: nn.Sequential, x: torch.Tensor, segments: int) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    hidden = torch.tanh(model[0](x))
    for _ in range(segments):
        hidden = checkpoint(lambda h: torch.tanh(model[2](h)), hidden, use_reentrant=True)
    out: torch.Tensor = model[4](hidden)
    return out


@pytest.mark.full("further")
@ranks(2)
def test_a_layer_in_two_reentrant_segments_is_an_error() -> None:
    fd.init()
    model = mlp()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x, _ = data(8)
    with pytest.raises(fd.CommError, match=r"gradient of '2\.\w+' became ready twice .* use_reentrant=False"):
        checkpointed(model, own(x), 2).sum().backward()


@pytest.mark.full("further")
@ranks(2)
def test_nested_backward_of_reentrant_checkpointing() -> None:
    fd.init()

    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(bucket_bytes=600, first_bucket_bytes=200))
    x, y = data(8)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(checkpointed(model, own(x), 1), own(y)).backward()
        optimizer.step()
    other = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(3):
        other.zero_grad()
        nn.functional.mse_loss(checkpointed(reference, x, 1), y).backward()
        other.step()
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_grad_scaler_skips_on_all_ranks_when_one_overflows() -> None:
    world = fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = data(8)
    before = [p.detach().clone() for p in model.parameters()]
    loss = nn.functional.mse_loss(model(own(x)), own(y))
    if world.rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for was, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(was, parameter), "the step was skipped"
    assert_same_bits(model)


@pytest.mark.parametrize("steps_before", [0, 1])
@ranks(2)
def test_an_abandoned_backward_does_not_poison_the_next(steps_before: int) -> None:
    fd.init()
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(bucket_bytes=600, first_bucket_bytes=200))
    x, y = data(8)
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), [(x, y)] * (2 + steps_before))
    for _ in range(steps_before):
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            raise MemoryError("as if memory had run out")

    hidden = torch.tanh(model[2](Explode.apply(model[0](own(x)))))
    with pytest.raises(MemoryError):
        nn.functional.mse_loss(model[4](hidden), own(y)).backward()
    optimizer.zero_grad()
    for _ in range(2):
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(3)
def test_a_resumed_run_continues_bit_for_bit() -> None:
    fd.init()
    plan = fd.Plan(bucket_bytes=600, first_bucket_bytes=200)
    x, y = data(12)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(own(x)), own(y)).backward()
            optimizer.step()

    straight = mlp()
    optimizer = torch.optim.AdamW(straight.parameters(), 1e-2)
    fd.distribute(straight, optimizer, plan)
    run(straight, optimizer, 3)
    kept = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    run(straight, optimizer, 3)
    resumed = mlp(seed=9)
    later = torch.optim.AdamW(resumed.parameters(), 1e-2)
    resumed.load_state_dict(kept[0])
    later.load_state_dict(kept[1])
    fd.distribute(resumed, later, plan)
    run(resumed, later, 3)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@ranks(1)
def test_a_world_of_one_changes_nothing() -> None:
    fd.init()
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    assert DistributedModel.of(model).reducer is None
    x, y = data(8)
    train_alone(model, optimizer, [(x, y)] * 3)
    train_alone(reference, torch.optim.SGD(reference.parameters(), 0.1), [(x, y)] * 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name]), name
    assert fd.world().session.steps.done == 3


@pytest.mark.full("further")
@ranks(1)
def test_steps_are_counted_on_when_the_first_model_is_dropped() -> None:
    fd.init()
    first, second = mlp(), mlp()
    optimizers_of = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    fd.distribute(first, optimizers_of[0])
    fd.distribute(second, optimizers_of[1])
    x, y = data(8)
    train_alone(first, optimizers_of[0], [(x, y)] * 2)
    train_alone(second, optimizers_of[1], [(x, y)])
    assert fd.world().session.steps.done == 2, "the first model's optimizer counts"
    del first, optimizers_of[0]
    gc.collect()
    train_alone(second, optimizers_of[0], [(x, y)] * 3)
    assert fd.world().session.steps.done == 5
