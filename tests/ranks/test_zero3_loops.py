"""What loops do to a sharded model: uneven batches, held passes, cleared gradients, scalers, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.distribute import undistribute
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import data, mlp, own
from tests.ranks.sharded_cases import Words, batches, full, loss_of, require_close
from tests.ranks.test_accumulate import joined_batches, train


def pair(make: Any = Words, **named: Any) -> tuple[Any, Any]:
    """Return two equal models."""
    return make(**named), make(**named)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


@pytest.mark.gate_cases("2-41")
@pytest.mark.parametrize("count", [48, 41])
@ranks(2, 3)
def test_windows_with_uneven_batches_and_a_partial_one(count: int) -> None:
    """41 samples on 3 ranks: the last batch has 5 samples of 12; on 2 ranks one sample and a placeholder."""
    world = fd.init()
    wholes = joined_batches(count, 4 * world.size)
    for held in (True, False):
        reference, model = mlp(), mlp()
        train(reference, torch.optim.Adam(reference.parameters()), wholes, len(wholes), held=False)
        optimizer = torch.optim.Adam(model.parameters())
        fd.distribute(model, optimizer, Plan(zero=3))
        loader = fd.shard(DataLoader(TensorDataset(*data(count)), batch_size=4))
        train(model, optimizer, loader, len(loader), held=held)
        require_close(model, reference, f"held {held}", 1e-5)
    sharded = DistributedModel.of(model).sharded
    assert sharded is not None, "the model is sharded"
    assert sharded.exchanges_done == len(loader), "every pass was exchanged"


@pytest.mark.full("further")
@ranks(2)
def test_gradients_cleared_while_they_are_held_are_gone() -> None:
    fd.init()
    for to_none in (True, False):
        reference, model = pair()
        plain, optimizer = sgd(reference), sgd(model)
        fd.distribute(model, optimizer, Plan(zero=3))
        (a, b), (c, d) = batches(2)
        for _ in range(2):
            with fd.accumulate():
                loss_of(model, own(a), own(b)).backward()
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, own(c), own(d)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            step(reference, plain, c, d)
        require_close(model, reference, f"set_to_none={to_none}", 1e-5)
    for to_none in (True, False):
        reference, model = pair()
        plain, optimizer = sgd(reference), sgd(model)
        fd.distribute(model, optimizer, Plan(zero=3, accumulate=2))
        for _ in range(2):
            loss_of(model, own(a), own(b)).backward()  # its gradients are shards already
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, own(c), own(d)).backward()
            loss_of(model, own(a), own(b)).backward()
            optimizer.step(), plain.zero_grad()
            optimizer.zero_grad(set_to_none=to_none)
            (loss_of(reference, c, d) + loss_of(reference, a, b)).backward()
            plain.step()
        require_close(model, reference, f"accumulate=2, set_to_none={to_none}", 1e-5)


@pytest.mark.full("further")
@ranks(2)
def test_a_step_after_fewer_passes_takes_what_is_held() -> None:
    fd.init()
    reference, model = pair()
    plain, optimizer = sgd(reference), sgd(model)
    fd.distribute(model, optimizer, Plan(zero=3, accumulate=3, clip_norm=0.5))
    for x, y in batches(3):
        optimizer.zero_grad(), plain.zero_grad()
        loss_of(model, own(x), own(y)).backward()
        loss_of(model, own(y), own(x)).backward()
        (loss_of(reference, x, y) + loss_of(reference, y, x)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step(), plain.step()
    require_close(model, reference, "two of three passes", 1e-5)


@ranks(2)
def test_two_passes_before_a_step_add_up() -> None:
    fd.init()
    reference, model = pair()
    plain, optimizer = sgd(reference), sgd(model)
    fd.distribute(model, optimizer, Plan(zero=3))
    for x, y in batches(3):
        optimizer.zero_grad(), plain.zero_grad()
        for a, b in ((x, y), (y, x)):
            loss_of(model, own(a), own(b)).backward()
            loss_of(reference, a, b).backward()
        optimizer.step(), plain.step()
    require_close(model, reference, "two passes", 1e-5)


@ranks(2)
def test_a_parameter_that_one_rank_uses_has_the_gradient_of_all() -> None:
    world = fd.init()

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            found: torch.Tensor = (self.first if which else self.second)(x)
            return found

    reference, model = pair(Chooses)
    plain, optimizer = (torch.optim.AdamW(each.parameters(), 0.1, weight_decay=0.1) for each in (reference, model))
    fd.distribute(model, optimizer, Plan(zero=3))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        optimizer.zero_grad(), plain.zero_grad()
        model(x[2 * world.rank :][:2], world.rank).pow(2).mean().backward()
        (reference(x[:2], 0).pow(2).mean() / 2 + reference(x[2:], 1).pow(2).mean() / 2).backward()
        optimizer.step(), plain.step()
    assert model.never.weight.grad is None, "what no rank used has no gradient"
    require_close(model, reference, "one rank each", 1e-5)


@pytest.mark.full("further")
@ranks(2)
def test_a_grad_scaler_skips_the_step_of_all_ranks() -> None:
    world = fd.init()
    reference, model = pair()
    plain, optimizer = sgd(reference), sgd(model)
    fd.distribute(model, optimizer, Plan(zero=3, clip_norm=0.4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = loss_of(model, own(x), own(y))
        if i == 1 and world.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if i != 1:
            plain.zero_grad()
            loss_of(reference, x, y).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.4)
            plain.step()
    assert scaler.get_scale() == 512.0, "one step was skipped"
    require_close(model, reference, "scaled", 1e-5)


@pytest.mark.full("further")
@ranks(3)
def test_several_optimizers_with_state_and_frozen_parameters_that_thaw() -> None:
    fd.init()
    reference, model = pair()
    made = []
    for each in (reference, model):
        for parameter in each.blocks.parameters():
            parameter.requires_grad_(False)
        rest = [p for n, p in each.named_parameters() if not n.startswith("blocks")]
        made.append([torch.optim.Adam(each.blocks.parameters(), 0.01), torch.optim.SGD(rest, 0.1, momentum=0.9)])
    plains, optimizers = made
    (x, y), *others = batches(5)
    for each, own_optimizers in ((reference, plains), (model, optimizers)):
        loss_of(each, x, y).backward()
        for optimizer in own_optimizers:
            optimizer.step(), optimizer.zero_grad()
    fd.distribute(model, optimizers, Plan(zero=3, clip_norm=0.5))
    state = next(iter(optimizers[1].state.values()))
    assert isinstance(state["momentum_buffer"], DTensor), "state is cut as its parameter"
    for i, (a, b) in enumerate(others):
        if i == 2:
            for each in (reference, model):
                for parameter in each.blocks.parameters():
                    parameter.requires_grad_(True)
        loss_of(reference, a, b).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        loss_of(model, own(a), own(b)).backward()
        for optimizer in (*plains, *optimizers):
            optimizer.step(), optimizer.zero_grad()
    require_close(model, reference, "thawed", 1e-5)


@pytest.mark.gate_cases("True")
@pytest.mark.parametrize("sync", [True, False])
@ranks(2)
def test_running_statistics(sync: bool) -> None:
    fd.init()

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 3),
        )  # fmt: skip

    reference, model = pair(make)
    plain, optimizer = sgd(reference), sgd(model)
    fd.distribute(model, optimizer, Plan(zero=3, sync_batch_norm=sync))
    copies = [copy.deepcopy(reference) for _ in range(2)]
    x, y = data(16)
    for _ in range(3):
        optimizer.zero_grad(), plain.zero_grad()
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        optimizer.step()
        if sync:
            nn.functional.mse_loss(reference(x), y).backward()
            plain.step()
            continue
        for each, xs, ys in zip(copies, x.chunk(2), y.chunk(2), strict=True):  # what data parallel means here
            each.load_state_dict(reference.state_dict())
            each.zero_grad()
            nn.functional.mse_loss(each(xs), ys).backward()
        for parameter, *those in zip(reference.parameters(), *(c.parameters() for c in copies), strict=True):
            parameter.grad = sum(p.grad for p in those) / 2
        plain.step()
        for buffer, *buffers in zip(reference.buffers(), *(c.buffers() for c in copies), strict=True):
            buffer.copy_((sum(buffers) / 2).to(buffer.dtype))
    require_close(model, reference, f"sync_batch_norm={sync}", 1e-4)


@pytest.mark.full("further")
@ranks(2)
def test_evaluation_leaves_shards_and_a_failed_pass_is_forgotten() -> None:
    fd.init()
    reference, model = pair()
    plain, optimizer = sgd(reference), sgd(model)
    fd.distribute(model, optimizer, Plan(zero=3))
    (x, y), (a, b) = batches(2)
    step(reference, plain, x, y)
    step(model, optimizer, own(x), own(y))
    with torch.no_grad():
        model.eval()(x)
    assert all(isinstance(each, DTensor) for each in model.parameters()), "parameters are sharded after it"
    model.train()
    with pytest.raises(IndexError):
        model(torch.full((2, 2), 99))
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(own(x))
    handle.remove()
    loss_of(model, own(a), own(b))  # a pass without backward
    step(reference, plain, a, b)
    step(model, optimizer, own(a), own(b))
    require_close(model, reference, "after failures", 1e-5)
    assert "ok  parameters" in str(fd.verify(model, optimizer)), str(fd.verify(model, optimizer))


class Norm(torch.optim.Optimizer):
    """Steps along the gradient over the norm of all of it: it mixes elements, by operations of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm() * group["lr"])


@pytest.mark.full("further")
@ranks(2)
def test_an_optimizer_of_the_users_sees_whole_tensors() -> None:
    fd.init()
    reference, model = pair()
    plain, optimizer = Norm(reference.parameters()), Norm(model.parameters())
    fd.distribute(model, optimizer, Plan(zero=3))
    for x, y in batches(3):
        step(reference, plain, x, y)
        step(model, optimizer, own(x), own(y))
    require_close(model, reference, "norms", 1e-5)


@pytest.mark.full("further")
@takes(60)
@ranks(2)
def test_what_cannot_be_sharded_is_named() -> None:
    fd.init()
    adam = torch.optim.Adam

    def refused(model: nn.Module, *words: str, make: Any = adam) -> None:
        with pytest.raises(ConfigError) as caught:
            fd.distribute(model, make(model.parameters()), Plan(zero=3))
        for word in words:
            assert word in str(caught.value), f"{word!r} in {caught.value}"

    scalar, mixed, strided = nn.Linear(2, 2), mlp(), nn.Conv2d(3, 4, 3)
    strided.weight.data = strided.weight.data.contiguous(memory_format=torch.channels_last)
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    mixed[2].to(torch.bfloat16)
    strange = nn.Linear(2, 2)
    strange.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    refused(scalar, "'temperature'", "reshape(1)")
    refused(mixed, "'2.weight' is bfloat16", "float32")
    refused(strided, "'weight'", "contiguous_format")
    refused(strange, "'phase'", "complex")
    refused(nn.ModuleList([nn.Linear(2, 2)]), "ModuleList", "forward")
    refused(nn.Embedding(4, 4, sparse=True), "sparse=False", make=torch.optim.SparseAdam)
    refused(mlp(), "LBFGS", "zero = 0", make=torch.optim.LBFGS)
    refused(mlp(), "Adafactor", "cannot be divided", make=torch.optim.Adafactor)
    normalised = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match="bf16_parameters leaves normalisations"):
        fd.distribute(
            normalised, adam(normalised.parameters()), Plan(zero=3, precision="bf16", bf16_parameters=True)
        )
    assert normalised[0].weight.dtype == torch.float32, "nothing is changed"
    model = mlp()
    optimizer = adam(model.parameters())
    fd.distribute(model, optimizer, Plan(zero=3))
    x, y = data(4)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="sharded"):
        undistribute(model)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"extra\.weight.*after farandole\.distribute"):
        model(x)
    del model.extra
    model(x)
    assert list(full(model)) == list(mlp().state_dict()), "the names stay"


@pytest.mark.full("further")
@ranks(2)
def test_a_block_that_is_left_out_does_not_run_with_old_parameters_later() -> None:
    fd.init()

    class Skips(Words):
        depth = 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.words(x)
            for block in list(self.blocks)[: self.depth]:
                x = block(x)
            found: torch.Tensor = self.head(x)
            return found

    reference, model = pair(Skips)
    plain, optimizer = sgd(reference), sgd(model)
    fd.distribute(model, optimizer, Plan(zero=3))
    for i, (x, y) in enumerate(batches(6)):
        reference.depth = model.depth = (3, 1, 2)[i % 3]
        step(reference, plain, x, y)
        step(model, optimizer, own(x), own(y))
        reference.depth = model.depth = 1
        with torch.no_grad():
            expected, found = reference(x), model(x)
            for each in (reference, model):
                for parameter in each.parameters():
                    parameter.mul_(0.9)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    require_close(model, reference, "left out", 1e-5)


class Stage(nn.Module):
    """A block that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Views(nn.Module):
    """Blocks and a model that return views: linear layers of three dimensions do."""

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Stage() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.changes = changes

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
            if self.changes:
                x += 1.0
        return {"out": self.head(x).transpose(1, 2), "hidden": x}


@ranks(2)
def test_outputs_that_are_views_train_without_a_warning_and_refuse_changes_in_place() -> None:
    """Warnings are errors here."""
    fd.init()
    reference, model = pair(Views)
    plain, optimizer = sgd(reference), sgd(model)
    fd.distribute(model, optimizer, Plan(zero=3))
    x = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        for each, stepper, batch in ((reference, plain, x), (model, optimizer, own(x))):
            stepper.zero_grad()
            answer = each(batch)
            (answer["out"].square().mean() + answer["hidden"].square().mean()).backward()
            stepper.step()
    require_close(model, reference, "views", 1e-5)
    answer = model(own(x))
    assert answer["out"]._base is not None, "the test has a view"
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        answer["out"] += 1.0
    with torch.no_grad():
        assert torch.allclose(model(x)["out"].add_(1.0), reference(x)["out"] + 1.0), "without gradients it may be"
    changing = Views(changes=True)
    fd.distribute(changing, sgd(changing), Plan(zero=3))
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        changing(own(x))


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "of squares": lambda parameter: parameter.square().sum(),
    "of a sum": lambda parameter: parameter.sum() * 0.1,
    "of a mean, squared": lambda parameter: parameter.mean() ** 2,
}


@ranks(2)
@pytest.mark.parametrize("kind", PENALTIES)
def test_a_penalty_that_is_taken_before_the_forward_pass(kind: str) -> None:
    """As docs/fit/memory.md says: afterwards parameters outside of blocks are whole."""
    fd.init()
    alone, mine = pair()
    penalty_of = PENALTIES[kind]
    others, optimizer = sgd(alone), sgd(mine)
    fd.distribute(mine, optimizer, Plan(zero=3))
    for x, y in batches(3):
        for model, each, samples, targets in ((alone, others, x, y), (mine, optimizer, own(x), own(y))):
            penalty: Any = 0.05 * sum(penalty_of(parameter) for parameter in model.parameters())
            loss = loss_of(model, samples, targets)
            each.zero_grad()
            (loss + (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)).backward()
            each.step()
    require_close(mine, alone, "with a penalty", 1e-6)


@ranks(2)
def test_an_evaluation_in_inference_mode_before_any_training() -> None:
    fd.init()
    reference, model = pair()
    fd.distribute(model, sgd(model), Plan(zero=3))
    ((x, _),) = batches(1)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(model(x), reference(x))


@ranks(2)
def test_gradients_of_gradients_and_other_tensors_as_parameters_are_refused() -> None:
    fd.init()
    mine = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = sgd(mine)
    fd.distribute(mine, optimizer, Plan(zero=3))
    x = torch.ones(3, 4, requires_grad=True)
    refused = "zero = 3: a backward pass with create_graph=True"
    with pytest.raises(ConfigError, match=refused):
        mine(x).sum().backward(create_graph=True)
    with pytest.raises(ConfigError, match=refused):
        torch.autograd.grad(mine(x).sum(), x, create_graph=True)
    loss = mine(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match=refused):
        loss.backward(create_graph=True)
    others = {name: each * 1.1 for name, each in mine.named_parameters()}
    with pytest.raises(ConfigError, match=r"another tensor stands for parameter .*torch\.func\.functional_call"):
        torch.func.functional_call(mine, others, (x,))
    optimizer.zero_grad()
    mine(x).sum().backward()
    optimizer.step()
