"""1-bit Adam: Adam in its warm-up, then momentum by signs; equal on all ranks, and nearly as good."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.parallel.distribute import undistribute
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits, data, mlp, own, train_alone
from tests.ranks.test_coded_engine import (
    MATRICES,
    WIDTH,
    Branches,
    coded_buckets,
    gradients,
    loss_of,
    step,
    the_reducer,
    wide,
)


def one_bit(plan: fd.Plan | None = None, **settings: Any) -> tuple[nn.Sequential, fd.OneBitAdam]:
    model = wide()
    return fd.distribute(model, fd.OneBitAdam(model.parameters(), **{"warm_up_steps": 3, **settings}), plan)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@ranks(1)
def test_the_warm_up_is_adam(decay: float) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": decay}
    mine, other = mlp(), mlp()
    optimizer = fd.OneBitAdam(mine.parameters(), **settings, warm_up_steps=5)
    reference = torch.optim.Adam(other.parameters(), **settings)
    batches = [data(8, seed) for seed in range(5)]
    train_alone(mine, optimizer, batches)
    train_alone(other, reference, batches)
    for name, value in other.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value), name
    for expected, found in zip(reference.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(found[key], value) for key, value in expected.items())


@ranks(1)
def test_after_the_warm_up_the_variance_stays_and_momentum_goes_on() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4))
    optimizer = fd.OneBitAdam([parameter], 0.1, (0.9, 0.99), 0.0, 0.5, warm_up_steps=1)
    parameter.grad = torch.tensor([1.0, 2.0, 3.0, 4.0])
    optimizer.step()
    state = optimizer.state[parameter]
    before, variance, momentum = (t.detach().clone() for t in (parameter, state["exp_avg_sq"], state["exp_avg"]))
    optimizer.step()
    momentum = 0.9 * momentum + 0.1 * (parameter.grad + 0.5 * before)
    expected = before - 0.1 * (momentum / (1 - 0.9**2)) / (variance / (1 - 0.99)).sqrt()
    torch.testing.assert_close(parameter.detach(), expected)
    assert torch.equal(state["exp_avg_sq"], variance)


@ranks(1)
def test_entries_without_a_gradient_in_the_warm_up_take_the_mean_variance() -> None:
    seen, unseen = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
    optimizer = fd.OneBitAdam([seen, unseen], 0.1, warm_up_steps=1)
    seen.grad, unseen.grad = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.zeros(2)
    optimizer.step()
    variance = optimizer.state[seen]["exp_avg_sq"]
    assert variance[2] == variance[3] == variance[0] / 2
    assert optimizer.state[unseen]["exp_avg_sq"].tolist() == [1.0, 1.0]


@ranks(2)
def test_the_warm_up_is_adam_on_ranks() -> None:
    fd.init()
    model, optimizer = one_bit(lr=0.01, warm_up_steps=6)
    reference = wide()
    batches = [data(8, seed, WIDTH) for seed in range(5)]
    for x, y in batches:
        step(model, optimizer, x, y)
        assert not coded_buckets(model)
    train_alone(reference, torch.optim.Adam(reference.parameters(), 0.01), batches)
    assert_close(model, reference, rtol=1e-3, atol=1e-4)


@pytest.mark.gate_cases("plan2")
@pytest.mark.parametrize("plan", [{}, {"codec": "int8"}, {"accumulate": 2}, {"route": "flat"}])
@ranks(3)
def test_ranks_hold_the_same_bits_after_the_warm_up(plan: dict[str, Any]) -> None:
    fd.init()
    model, optimizer = one_bit(fd.Plan(**plan), lr=2e-3)
    x, y = data(24, width=WIDTH)
    losses = []
    for _ in range(12):
        for _ in range(plan.get("accumulate", 1)):
            loss = loss_of(model, own(x), own(y))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fd.mean(loss.item()))
    assert losses[-1] < 0.8 * losses[0], losses
    assert_same_bits(model)
    buckets = coded_buckets(model)
    assert sorted(buckets) == MATRICES
    assert {bucket.spec.to_text() for bucket in buckets.values()} == {"sign:block=512"}
    check = fd.verify(model, optimizer)
    assert check.passed, str(check)


@ranks(2)
def test_the_momentum_that_travels_is_adams_up_to_what_is_left() -> None:
    """With the model held still, what the ranks applied and what is left add up to the exact momenta."""
    fd.init()
    model, optimizer = one_bit(lr=0.0, warm_up_steps=2)
    alone = wide()
    reference = torch.optim.Adam(alone.parameters(), 0.0)
    x, y = data(8, width=WIDTH)
    loss_of(alone, x, y).backward()
    for _ in range(2):
        step(model, optimizer, x, y)
        reference.step()
    reducer = the_reducer(model)
    for name, parameter in model.named_parameters():
        exact = reference.state[alone.get_parameter(name)]["exp_avg"]
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], exact, rtol=1e-4, atol=1e-7, msg=name)
        assert reducer.has_pending(name) == (name in MATRICES)
    before = {name: optimizer.state[model.get_parameter(name)]["exp_avg"].clone() for name in MATRICES}
    step(model, optimizer, x, y)
    bucket = coded_buckets(model)["0.weight"]
    left = dict(zip(bucket.members, bucket.coded.unsent(), strict=True))
    for index, name in ((0, "0.weight"), (2, "2.weight")):
        sent = optimizer.state[model.get_parameter(name)]["exp_avg"]
        lost = 0.1 * fd_mean(left[index])
        exact = gradients(alone)[name]
        torch.testing.assert_close(sent + lost, 0.9 * before[name] + 0.1 * exact, rtol=1e-3, atol=1e-6, msg=name)


def fd_mean(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean over the ranks."""
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=fd.world().group)
    return total / fd.world().size


@ranks(2)
def test_a_gradient_that_no_step_used_takes_no_momentum_with_it() -> None:
    fd.init()
    model, optimizer = one_bit(lr=0.0, warm_up_steps=1)
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    reducer = the_reducer(model)
    loss_of(model, own(x), own(y)).backward()
    assert not reducer.has_pending("0.weight")
    optimizer.zero_grad()
    assert reducer.has_pending("0.weight")


@pytest.mark.parametrize("steps", [1, 4])
@ranks(2)
def test_training_goes_on_alone_once_the_world_is_left(steps: int) -> None:
    fd.init()
    model, optimizer = one_bit(lr=1e-3, warm_up_steps=3)
    x, y = data(8, width=WIDTH)
    for _ in range(steps):
        step(model, optimizer, x, y)
    fd.shutdown()
    alone = wide()
    alone.load_state_dict(model.state_dict())
    reference = fd.OneBitAdam(alone.parameters(), warm_up_steps=1)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_alone(model, optimizer, [(x, y)] * 4)
    train_alone(alone, reference, [(x, y)] * 4)
    assert_close(model, alone)


@ranks(2)
def test_a_parameter_that_only_one_rank_uses_keeps_its_momentum() -> None:
    world = fd.init()
    model = Branches()
    optimizer = fd.OneBitAdam(model.parameters(), 0.0, warm_up_steps=1)
    fd.distribute(model, optimizer)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4))
    sizes = []
    for turn in range(40):
        optimizer.zero_grad()
        model(x, True, turn != 5 and (turn == 0 or world.rank == 0)).backward()
        optimizer.step()
        sizes.append(float(optimizer.state[model.right.weight]["exp_avg"].abs().mean()))
    assert sizes[5] == sizes[4], "used by nobody: stays as it is"
    full = 10 * sizes[0]
    assert 0.2 * full < sizes[-1] < 1.2 * full, sizes
    assert_same_bits(model)


@pytest.mark.full("further")
@ranks(2)
def test_five_hundred_steps_end_near_adam() -> None:
    world = fd.init()
    inputs, noise = data(2048, width=WIDTH)
    torch.manual_seed(11)
    teacher = wide(5)
    with torch.no_grad():
        targets = 10 * teacher(3 * inputs) + 0.3 * noise
    indices = torch.Generator().manual_seed(2)
    chosen = [torch.randint(2048, (64,), generator=indices) for _ in range(500)]
    batches = [(inputs[rows], targets[rows]) for rows in chosen]
    model, optimizer = one_bit(lr=3e-3, warm_up_steps=125)
    for x, y in batches[:125]:
        step(model, optimizer, x, y)
    warm = loss_of(model, inputs, targets).item()
    for x, y in batches[125:]:
        step(model, optimizer, x, y)
    assert_same_bits(model)
    mine = loss_of(model, inputs, targets).item()
    if world.rank == 0:
        alone = wide()
        begin = loss_of(alone, inputs, targets).item()
        train_alone(alone, torch.optim.Adam(alone.parameters(), 3e-3), batches)
        theirs = loss_of(alone, inputs, targets).item()
        assert theirs < 0.6 * warm < 0.5 * begin, (begin, warm, theirs, "much is learnt after the warm-up")
        assert mine < 1.1 * theirs, (begin, theirs, mine)


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 6])
@ranks(1)
def test_the_state_makes_the_round_trip_bit_for_bit(steps: int) -> None:
    model = mlp()
    optimizer = fd.OneBitAdam(model.parameters(), 0.01, warm_up_steps=4)
    train_alone(model, optimizer, [data(8, seed) for seed in range(steps)])
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    other = mlp(3)
    resumed = fd.OneBitAdam(other.parameters(), 1.0, warm_up_steps=1)
    saved = torch.load(file)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["warm_up_steps"] == 4
    further = [data(8, 20 + seed) for seed in range(5)]
    train_alone(model, optimizer, further)
    train_alone(other, resumed, further)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for left, right in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert all(torch.equal(left[key], right[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@ranks(2)
def test_a_loaded_state_decides_what_travels() -> None:
    fd.init()
    model, optimizer = one_bit(fd.Plan(codec="bf16"), warm_up_steps=2)
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    early = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        step(model, optimizer, x, y)
    late = copy.deepcopy(optimizer.state_dict())
    for state, codec in ((early, "bf16"), (late, "sign")):
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        loss_of(model, own(x), own(y)).backward()
        assert {bucket.spec.name for bucket in coded_buckets(model).values()} == {codec}
    again = wide()
    resumed = fd.OneBitAdam(again.parameters(), warm_up_steps=2)
    resumed.load_state_dict(late)
    fd.distribute(again, resumed)
    step(again, resumed, x, y)
    assert sorted(coded_buckets(again)) == MATRICES
    assert_same_bits(again)


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "lr = -1.0, expected at least 0"),
        ({"betas": (1.0, 0.9)}, r"betas = \(1.0, 0.9\), expected two numbers of at least 0 and below 1"),
        ({"betas": (0.9, -0.1)}, "betas = "),
        ({"eps": -1e-8}, "eps = -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"warm_up_steps": 0}, "warm_up_steps = 0, expected at least 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(fd.ConfigError, match=f"OneBitAdam: {text}"):
        fd.OneBitAdam(mlp().parameters(), **{"warm_up_steps": 3, **settings})


@ranks(1)
def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = fd.OneBitAdam(model.parameters(), warm_up_steps=3)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(fd.ConfigError, match=r"shape \(10, 4\) is sparse; make its embedding with sparse=False"):
        optimizer.step()


@ranks(1)
def test_clipping_by_the_plan_is_refused() -> None:
    fd.init()
    with pytest.raises(fd.ConfigError, match=r"clip_norm = 1.0 with OneBitAdam"):
        one_bit(fd.Plan(clip_norm=1.0))


@ranks(1)
def test_a_scaler_is_refused() -> None:
    fd.init()
    model, optimizer = one_bit()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, *data(8, width=WIDTH))).backward()
    with pytest.raises(fd.ConfigError, match="a GradScaler scales the gradients"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    _, another = one_bit()
    off.step(another)


@ranks(2)
def test_without_the_plan_momentum_is_this_ranks_own() -> None:
    here = fd.init()
    model, optimizer = one_bit()
    for number in range(5):
        step(model, optimizer, *data(8, number, WIDTH))
    undistribute(model)
    by_hand = copy.deepcopy(model)
    plain = fd.OneBitAdam(by_hand.parameters(), warm_up_steps=3)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    batches = [data(8, 10 * here.rank + number, WIDTH) for number in range(2)]
    train_alone(model, optimizer, batches)
    train_alone(by_hand, plain, batches)
    assert_close(model, by_hand, rtol=0.0, atol=0.0)
