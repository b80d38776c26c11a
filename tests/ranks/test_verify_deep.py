"""``verify --deep``: injected faults are found and named, healthy programs pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.comm.engine.bucket import DenseBucket
from farandole.parallel.model import DistributedModel
from farandole.train.verify.deep_check import DeepCheck
from farandole.train.verify.joined import MeanCounts
from farandole.train.verify.verify import Check
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp, own

GRADIENTS = "gradients of one process"


@contextmanager
def deep(found: dict[str, Check]) -> Iterator[None]:
    check = DeepCheck(fd.world())
    check.start()
    try:
        yield
    finally:
        check.stop()
    found.update({each.name: each for each in check.checks()})


def examine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    loss: Callable[..., torch.Tensor] = nn.functional.mse_loss,
    accumulate: int = 1,
) -> dict[str, Check]:
    found: dict[str, Check] = {}
    batches = batches or [(own(x), own(y)) for x, y in (data(12, seed) for seed in (1, 2, 3))]
    with deep(found):
        for i, (x, y) in enumerate(batches):
            loss(model(x), y).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return found


def healthy(found: dict[str, Check]) -> bool:
    return all(check.passed is not False for check in found.values())


def ready(model: nn.Module, **plan: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return fd.distribute(model, torch.optim.SGD(model.parameters(), 0.05), fd.Plan(**plan))


class WithLoss(nn.Module):
    """As the models of transformers: the loss is computed inside, and both it and what it is of come out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.mse_loss(logits * 2, labels), "logits": logits}


@pytest.mark.full("further")
@ranks(2)
def test_healthy_programs_pass() -> None:
    fd.init()
    model: nn.Module
    for model, accumulate in ((mlp(), 1), (mlp(), 3), (mlp().double(), 1)):
        dtype = next(model.parameters()).dtype
        batches = [(own(x).to(dtype), own(y).to(dtype)) for x, y in (data(12, seed) for seed in (1, 2, 3))]
        found = examine(*ready(model, accumulate=accumulate), batches, accumulate=accumulate)
        assert found[GRADIENTS].passed, found
        assert accumulate > 1 or found["joined batch"].passed, found
    found = examine(*ready(mlp()), accumulate=3)  # exchanged with each pass, added up in place
    assert found[GRADIENTS].answer.startswith("the same in 3 exchanges"), found
    model, optimizer = ready(WithLoss())
    with deep(found):
        for seed in (1, 2):
            optimizer.zero_grad()
            x, y = data(12, seed)
            (model(own(x), labels=own(y))["loss"] * 7).backward()
            optimizer.step()
    assert found[GRADIENTS].answer.startswith("the same in 2 exchanges"), found
    assert "random numbers" in found["joined batch"].answer
    assert healthy(found)


@ranks(2)
def test_uneven_batches_and_outputs_used_twice_pass() -> None:
    fd.init()
    model, optimizer = ready(mlp())
    loader = fd.shard(DataLoader(TensorDataset(*data(9)), batch_size=4), split=True)
    found = examine(model, optimizer, list(loader))
    assert found[GRADIENTS].passed, found
    both, stepper = ready(WithLoss().eval())
    with deep(found):
        x, y = data(12)
        out = both(own(x), labels=own(y))
        (out["loss"] + out["logits"].square().sum()).backward()
        stepper.step()
    assert found[GRADIENTS].passed, found


@ranks(2)
def test_a_mean_that_is_wrong_is_found_and_its_kind_named() -> None:
    fd.init()
    patch = pytest.MonkeyPatch()
    land = DenseBucket.finalize
    for factor, text in ((0.5, "it is 0.5 times that"), (2.0, "it is 2 times that (added up, and not divided)")):

        def spoilt(self: Any, *arguments: Any, factor: float = factor, **named: Any) -> None:
            land(self, *arguments, **named)
            self.gradients.flat.mul_(factor)

        patch.setattr(DenseBucket, "finalize", spoilt)
        found = examine(*ready(mlp(), route="flat"))
        patch.undo()
        assert found[GRADIENTS].passed is False, found
        assert text in found[GRADIENTS].answer
        assert "on ranks 0 and 1 in step " in found[GRADIENTS].answer
    model, optimizer = ready(mlp())
    reducer = DistributedModel.of(model).reducer
    assert reducer is not None
    reducer.passes.divisor = 1.0
    assert "added up, and not divided" in examine(model, optimizer)[GRADIENTS].answer


@ranks(2)
def test_gradients_that_never_met_and_one_rank_alone() -> None:
    world = fd.init()
    patch = pytest.MonkeyPatch()
    land = DenseBucket.finalize

    def local(self: Any, *arguments: Any, **named: Any) -> None:
        land(self, *arguments, **named)
        if world.rank == 1:
            self.gradients.flat[0] += 1.0

    patch.setattr(DenseBucket, "finalize", local)
    found = examine(*ready(mlp(), route="flat"))
    patch.undo()
    assert "on rank 1 in step 1" in found[GRADIENTS].answer, found


@pytest.mark.full("further")
@ranks(2)
def test_batch_norm_is_not_exact_until_it_is_synchronised() -> None:
    fd.init()
    answers = {}
    for synchronised in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        found = examine(*ready(model, sync_batch_norm=synchronised))
        answers[synchronised] = found
        assert healthy(found), found
    assert answers[True][GRADIENTS].answer.startswith("the same in 3 exchanges")
    assert answers[False]["joined batch"].word == "not exact"
    assert "1 BatchNorm layers normalise per rank" in answers[False]["joined batch"].answer
    assert answers[False]["joined batch"].remedy == "--set sync_batch_norm=true"


@ranks(2)
def test_a_mean_over_tokens_is_named() -> None:
    world = fd.init()
    generator = torch.Generator().manual_seed(1)

    def tokens(ragged: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        x, y = own(x), own(y).clone()
        if ragged and world.rank:
            y[:3] = -100
        return [(x, y)]

    loss = nn.CrossEntropyLoss()
    assert "mean of the loss" not in examine(*ready(mlp()), tokens(False), loss)
    found = examine(*ready(mlp()), tokens(True), loss)
    assert found[GRADIENTS].passed, found
    note = found["mean of the loss"]
    assert note.word == "not exact"
    assert "is over 4, 1 elements on ranks 0 to 1" in note.answer
    assert "fd.weight(count)" in note.remedy

    def weighed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fd.weight((target != -100).sum())
        mean: torch.Tensor = loss(output, target)
        return mean

    found = examine(*ready(mlp()), tokens(True), weighed)
    assert found[GRADIENTS].passed, found
    assert found["joined batch"].passed, found
    assert "mean of the loss" not in found


@ranks(2)
def test_plain_verify_asks_for_the_weight_too() -> None:
    world = fd.init()
    model, optimizer = ready(mlp())
    x, y = data(8)[0], torch.arange(8) % 3
    y[5:] = -100
    for weighs in (False, True):
        counts = MeanCounts(world)
        counts.start()
        for _ in range(2):
            output = model(own(x))
            loss = nn.functional.cross_entropy(output, own(y))
            if weighs:
                fd.weight((own(y) != -100).sum())
            counts.backward_begins()  # as `Tensor.backward` does under `farandole verify`
            loss.backward()
            optimizer.step()
        found = counts.checks()
        counts.stop()
        assert [check.name for check in found] == ([] if weighs else ["mean of the loss"])


@pytest.mark.full("further")
@ranks(2)
def test_a_kept_gradient_that_is_overwritten_is_found() -> None:
    fd.init()
    model, optimizer = ready(mlp())
    x, y = own(data(12)[0]), own(data(12)[1])
    found: dict[str, Check] = {}
    with deep(found):
        nn.functional.mse_loss(model(x), y).backward()
        first = next(model.parameters()).grad
        assert first is not None
        optimizer.zero_grad()
        weight = next(model.parameters())
        weight.register_hook(lambda _: first.add_(1.0) * 0)  # as a reducer does that uses the memory again
        (3 * nn.functional.mse_loss(model(x), y)).backward()
    assert found["kept gradients"].passed is False
    assert "'0.weight' of one pass was overwritten by the next" in found["kept gradients"].answer


@ranks(2)
def test_gradients_that_the_loop_clips_in_place_are_not_overwritten() -> None:
    fd.init()
    model, optimizer = ready(mlp())
    found: dict[str, Check] = {}
    with deep(found):
        for seed in (1, 2, 3):
            nn.functional.mse_loss(model(own(data(12, seed)[0])), own(data(12, seed)[1])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert "kept" not in " ".join(found), found
    assert healthy(found)


@ranks(2)
def test_what_cannot_be_compared_says_why() -> None:
    fd.init()
    found = examine(*ready(nn.Sequential(nn.Linear(6, 1024), nn.Linear(1024, 3)), codec="fp16"))
    assert "codec fp16 sends approximations" in found[GRADIENTS].answer

    found = examine(*ready(mlp(), codec="auto", lossy=True))
    assert "codec auto sends approximations" in found[GRADIENTS].answer

    class Stubborn(nn.Linear):
        def __deepcopy__(self, _: Any) -> Any:
            raise TypeError("no copies of this")

    found = examine(*ready(Stubborn(6, 3)))
    assert found[GRADIENTS].passed is None
    assert "cannot be copied (TypeError: no copies of this)" in found[GRADIENTS].answer


@ranks(2)
@pytest.mark.parametrize("keys", [{"zero": 1}, {"zero": 2, "weight_codec": "int8"}], ids=str)
def test_gradients_in_shards_are_compared_whole(keys: dict[str, Any]) -> None:
    fd.init()
    assert healthy(examine(*ready(mlp(), **keys)))


@ranks(2)
def test_everything_is_put_back() -> None:
    fd.init()
    before = torch.autograd.backward, nn.functional.cross_entropy, nn.functional.nll_loss
    examine(*ready(mlp()))
    assert before == (torch.autograd.backward, nn.functional.cross_entropy, nn.functional.nll_loss)


class Agent(nn.Module):
    """Of reinforcement learning: the loop calls its methods, and never the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def value(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


@ranks(2)
def test_passes_through_methods_of_a_model_are_said_to_be_not_recorded() -> None:
    fd.init()
    agent = Agent()
    _, optimizer = ready(agent)
    other, other_optimizer = ready(mlp())
    x, y = own(data(12)[0]), own(data(12)[1])
    check = DeepCheck(fd.world())
    check.start()
    nn.functional.mse_loss(agent.value(x), y).backward()
    optimizer.step()
    (alone,) = [each for each in check.checks() if each.name == GRADIENTS]
    nn.functional.mse_loss(other(x), y).backward()
    other_optimizer.step()
    check.stop()
    why = "no call of Agent itself was seen with gradients, and passes through methods or parts of a model are"
    assert alone.passed is None
    assert alone.answer.startswith(why)
    compared, partly = [each for each in check.checks() if each.name == GRADIENTS]
    assert compared.passed, "the other model is compared"
    assert partly.passed is None
    assert partly.answer.startswith(f"not of every exchange: {why}")
