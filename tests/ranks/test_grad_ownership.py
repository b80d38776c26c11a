"""What users and torch do to ``p.grad``: gradients go on meeting, and what somebody still holds stays as it is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import assert_close, assert_same_bits, data, own

ROUTES = {
    "shared": fd.Plan(bucket_bytes=600, first_bucket_bytes=200),
    "flat": fd.Plan(route="flat", bucket_bytes=600, first_bucket_bytes=200),
    "int8": fd.Plan(route="flat", codec="int8", lossy=True),
}


def mlp() -> nn.Sequential:
    """One of its matrices is large enough for a codec."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def _by_data(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data = p.grad.data * 1.0


def _by_data_keeping_the_old(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        vars(model).setdefault("kept", []).append(p.grad.data)
        p.grad.data = p.grad.data * 1.0


def _by_set(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.set_(p.grad.clone())  # type: ignore[call-overload]


def _by_detach(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.detach()


def _crosswise(model: nn.Module) -> None:
    first, second = model[2].weight, model[2].bias  # type: ignore[index]
    first.grad.data, second.grad.data = second.grad.data.expand(64, 64).clone(), first.grad.data[0].clone()


def _swapped(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
    for p in list(model.parameters()):
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))


def _parameters_by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def _channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "double().float()": lambda model: model.double().float(),
    "p.grad.data": _by_data,
    "p.grad.data, the old kept": _by_data_keeping_the_old,
    "set_": _by_set,
    "detach": _by_detach,
    "crosswise": _crosswise,
    "swap_tensors": _swapped,
    "p.data": _parameters_by_data,
    "channels_last": _channels_last,
}


def _conv() -> nn.Sequential:
    torch.manual_seed(2)
    conv = nn.Conv2d(3, 16, (2, 1), padding=(1, 0))
    return nn.Sequential(nn.Unflatten(1, (3, 2, 1)), conv, nn.Flatten(), nn.Linear(48, 128), nn.Linear(128, 3))


@pytest.mark.full("further")
@pytest.mark.parametrize("zeroes", ["none", "never"])
@pytest.mark.parametrize("route", ["shared", "flat", "int8"])
@ranks(2)
@takes(90)
def test_gradients_meet_after_what_is_done_to_them(route: str, zeroes: str) -> None:
    fd.init()
    warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
    tolerance: dict[str, Any] = {"rtol": 0.1, "atol": 0.05} if route == "int8" else {}
    for how, change in CHANGES.items():
        make = _conv if how == "channels_last" else mlp
        model, reference = make(), make()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        fd.distribute(model, optimizer, ROUTES[route])
        other = torch.optim.SGD(reference.parameters(), 0.05)
        for step in range(5):
            x, y = data(8, step)
            for each, its, a, b in ((model, optimizer, own(x), own(y)), (reference, other, x, y)):
                nn.functional.mse_loss(each(a), b).backward()
                its.step()
                if step in (1, 3):
                    change(each)
                if zeroes == "none" or step == 2:
                    its.zero_grad(set_to_none=zeroes == "none")
            try:
                assert_same_bits(model)
                assert_close(model, reference, **tolerance)
            except AssertionError as problem:
                raise AssertionError(f"{how}, step {step}") from problem


def _object(grad: torch.Tensor) -> Any:
    return grad


def _numpy(grad: torch.Tensor) -> Any:
    return grad.numpy()


def _slice(grad: torch.Tensor) -> Any:
    return grad[:1]


def _detached(grad: torch.Tensor) -> Any:
    return grad.detach()


def _used(grad: torch.Tensor) -> Any:
    """In a graph that will be run backward later."""
    weight = torch.ones_like(grad, requires_grad=True)
    return weight, (weight * grad).sum()


def _value(kept: Any) -> torch.Tensor:
    if isinstance(kept, tuple):
        weight, loss = kept
        return torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
    return torch.as_tensor(kept).clone()


@pytest.mark.gate_cases("int8-_numpy")
@pytest.mark.parametrize("keep", [_object, _numpy, _slice, _detached, _used])
@pytest.mark.parametrize("route", ["shared", "flat", "int8"])
@ranks(2)
def test_what_is_kept_of_one_pass_is_not_overwritten_by_the_next(route: str, keep: Callable[..., Any]) -> None:
    fd.init()
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    fd.distribute(model, optimizer, ROUTES[route])
    other = torch.optim.SGD(reference.parameters(), 0.05)
    tolerance: dict[str, Any] = {"rtol": 0.1, "atol": 0.05} if route == "int8" else {"rtol": 1e-4, "atol": 1e-6}
    everything: list[tuple[Any, torch.Tensor]] = []
    for step in range(4):
        x, y = data(8, step)
        kept: dict[nn.Module, list[list[Any]]] = {model: [], reference: []}
        for each, its, a, b in ((model, optimizer, own(x), own(y)), (reference, other, x, y)):
            for factor in (1.0, 3.0, 0.5):
                its.zero_grad()
                (factor * nn.functional.mse_loss(each(a), b)).backward()
                kept[each].append([keep(p.grad) for p in each.parameters() if p.grad is not None])
            its.step()
        for mine, theirs in zip(kept[model], kept[reference], strict=True):
            for grad, alone in zip(mine, theirs, strict=True):
                torch.testing.assert_close(_value(grad), _value(alone), **tolerance)
                everything.append((grad, _value(grad)))
        assert_same_bits(model)
        assert_close(model, reference, **tolerance)
    for grad, was in everything:
        assert torch.equal(_value(grad), was), "later steps changed it"


@ranks(2)
def test_nothing_is_copied_where_nothing_is_kept() -> None:
    fd.init()
    for plan in ROUTES.values():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        fd.distribute(model, optimizer, plan)
        places = []
        for step in range(4):
            optimizer.zero_grad()
            x, y = data(8, step)
            nn.functional.mse_loss(model(own(x)), own(y)).backward()
            optimizer.step()
            places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        assert all(place == places[0] for place in places), places


@pytest.mark.parametrize("route", ["shared", "flat", "int8"])
@ranks(2)
def test_a_flat_gradient_of_the_users_own_is_used_and_filled(route: str) -> None:
    fd.init()
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    fd.distribute(model, optimizer, ROUTES[route])
    other = torch.optim.SGD(reference.parameters(), 0.05)
    tolerance: dict[str, Any] = {"rtol": 0.1, "atol": 0.05} if route == "int8" else {}
    flats = {}
    for each in (model, reference):
        flats[each] = torch.zeros(sum(p.numel() for p in each.parameters()))
        begin = 0
        for p in each.parameters():
            p.grad = flats[each][begin : begin + p.numel()].view_as(p)
            begin += p.numel()
    for step in range(4):
        x, y = data(8, step)
        for each, its, a, b in ((model, optimizer, own(x), own(y)), (reference, other, x, y)):
            flats[each].zero_()
            nn.functional.mse_loss(each(a), b).backward()
            flats[each].clamp_(-0.05, 0.05)
            its.step()
        torch.testing.assert_close(flats[model], flats[reference], **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))
    assert_close(model, reference, **tolerance)
    assert_same_bits(model)


@ranks(2)
def test_fused_optimizers_get_gradients_that_lie_as_their_parameters() -> None:
    """They go over both as they lie; the model's memory format may change, the gradients' stays as agreed."""
    world = fd.init()
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    other = torch.optim.SGD(alone.parameters(), 0.1, fused=True)
    fd.distribute(model, optimizer)
    images = torch.randn(4, 3, 5, 5)
    for step in range(3):
        for net, steps, x in ((model, optimizer, images[world.rank :: 2]), (alone, other, images)):
            steps.zero_grad()
            net(x).square().mean().backward()
            steps.step()
            if step == 0:
                net.to(memory_format=torch.contiguous_format)
    torch.testing.assert_close(model.weight, alone.weight)
