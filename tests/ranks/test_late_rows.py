"""ZeRO stages 1 and 2 by chunks: steps in parts, and parameters that arrive after the step that updated them."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import farandole as fd
from farandole.comm.engine import row_gather
from farandole.comm.engine.row_gather import LateParameter, RowGather
from farandole.parallel.zero.sharded_step import KNOWN
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import assert_same_bits
from tests.ranks.test_routes import pretend_two_hosts
from tests.ranks.test_zero import Branches, batch, loss_of, model_of, part, train

LATE = fd.Plan(zero=1, overlap_gather=True)


@contextmanager
def small_chunks() -> Iterator[list[int]]:
    """Have a chunk for almost every parameter; yield the numbers of those that are gathered."""
    names, start, numbers = vars(row_gather), RowGather.start, list[int]()
    before = names["CHUNK_BYTES"]

    def counted(self: RowGather, number: int) -> Any:
        numbers.append(number)
        return start(self, number)

    names["CHUNK_BYTES"], RowGather.start = 64, counted  # type: ignore[method-assign]
    try:
        yield numbers
    finally:
        names["CHUNK_BYTES"], RowGather.start = before, start  # type: ignore[method-assign]


def made(kind: type[torch.optim.Optimizer], plan: fd.Plan | None, **options: Any) -> tuple[Branches, Any]:
    """Return a model and its optimizer of two groups, distributed if there is a plan."""
    model = model_of()
    parameters: list[Any] = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}]
    make: Any = kind
    optimizer = make(groups, lr=0.01, **options)
    if plan is not None:
        fd.distribute(model, optimizer, plan)
    return model, optimizer


@pytest.mark.full("further")
@ranks(2)
@takes(60)
def test_every_optimizer_that_steps_in_parts_does_what_one_step_does() -> None:
    fd.init()
    options: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "AdamW": {"fused": True}}
    for kind in KNOWN:
        given = options.get(kind.__name__, {})
        in_parts = made(kind, fd.Plan(zero=1), **given)
        at_once = made(type(f"My{kind.__name__}", (kind,), {}), fd.Plan(zero=1), **given)
        with small_chunks() as numbers:
            train(*in_parts, cut=part, steps=3)
        train(*at_once, cut=part, steps=3)
        assert len(set(numbers)) > 3, f"{kind.__name__}: chunks {numbers}"
        assert_same_bits(in_parts[0])
        for (name, one), other in zip(in_parts[0].named_parameters(), at_once[0].parameters(), strict=True):
            torch.testing.assert_close(one, other, msg=lambda m: f"{kind.__name__}, {name}: {m}")  # noqa: B023


@ranks(2)
def test_a_hook_of_the_script_sees_all_rows_before_the_first_is_updated() -> None:
    fd.init()
    seen: list[int] = []

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rows = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        seen.append(len(rows))
        torch._foreach_mul_([each.grad for each in rows], 0.5)

    model, optimizer = made(torch.optim.SGD, fd.Plan(zero=1))
    optimizer.register_step_pre_hook(halve)
    with small_chunks():
        train(model, optimizer, cut=part, steps=3)
    other, reference = made(torch.optim.SGD, None)
    for group in reference.param_groups:
        group["lr"] *= 0.5
    train(other, reference, cut=lambda tensor: tensor, steps=3)
    assert seen[0] > 5, f"the hook saw {seen} gradients"
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=lambda m: f"{name}: {m}")  # noqa: B023 - called at once


def numbers_of(parameters: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(each.detach().numpy()) for each in parameters]


def through_pickle(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_a_thread(model: nn.Module) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(numbers_of(model.parameters())))
    thread.start()
    thread.join()
    return found


def in_a_child(model: nn.Module) -> list[torch.Tensor]:
    """Return what is here after a fork whose child has found nothing late."""
    child = os.fork()
    if child == 0:
        os._exit(any(type(each) is LateParameter for each in model.parameters()))
    assert os.waitpid(child, 0)[1] == 0, "the child has parameters that are late"
    return numbers_of(model.parameters())


def broadcast(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        for each in model.parameters():
            dist.broadcast(each, 0)
    return numbers_of(model.parameters())


READERS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "p.data": lambda model: [each.data.clone() for each in model.parameters()],
    "detach": lambda model: numbers_of(model.parameters()),
    "state_dict": lambda model: list(copy.deepcopy(model.state_dict()).values()),
    "a copy of the model": lambda model: numbers_of(copy.deepcopy(model).parameters()),
    "copies of parameters": lambda model: numbers_of(map(copy.deepcopy, model.parameters())),
    "many at once": lambda model: [each.detach() for each in torch._foreach_mul(list(model.parameters()), 1.0)],
    "torch.save of a state": lambda model: list(through_pickle(model.state_dict()).values()),
    "torch.save of parameters": lambda model: numbers_of(through_pickle(list(model.parameters()))),
    "an average": lambda model: [
        each.detach() for each in torch.optim.swa_utils.AveragedModel(model).module.parameters()
    ],
    "another thread": in_a_thread,
    "a fork": in_a_child,
    "a collective": broadcast,
}


@ranks(2)
@takes(60)
def test_whoever_reads_a_parameter_after_a_step_sees_its_update() -> None:
    """Compared after every step with a model whose parameters are whole when a step ends."""
    fd.init()
    late, optimizer = made(torch.optim.Adam, LATE)
    prompt, reference = made(torch.optim.Adam, fd.Plan(zero=1))
    hooks = nn.modules.module._global_forward_pre_hooks
    before, late_at = len(hooks), list[int]()
    for step, (name, read) in enumerate(READERS.items()):
        with small_chunks():
            for model, each in ((late, optimizer), (prompt, reference)):
                tokens, targets = batch(step)
                each.zero_grad()
                loss_of(model, part(tokens), part(targets)).backward()
                each.step()
        late_at.append(sum(type(each) is LateParameter for each in late.parameters()))
        for mine, other in zip(read(late), read(prompt), strict=True):
            assert torch.equal(mine, other), f"{name} of a late parameter: {mine}, not {other}"
        optimizer.zero_grad()
    late(torch.arange(3))
    # In some steps the comparison of the ranks' models has read them already.
    assert sum(count > 5 for count in late_at) > len(READERS) - 3, f"late parameters by reader: {late_at}"
    assert len(hooks) == before, "a hook of all modules stays"
    assert not any(isinstance(each, LateParameter) for each in late.parameters()), "something is still late"


@ranks(2)
def test_memory_that_others_have_is_up_to_date_when_the_step_ends() -> None:
    fd.init()
    model, optimizer = made(torch.optim.SGD, LATE)
    prompt, reference = made(torch.optim.SGD, fd.Plan(zero=1))

    def step() -> list[str]:
        with small_chunks():
            train(model, optimizer, cut=part, steps=1)
            train(prompt, reference, cut=part, steps=1)
        return [name for name, each in model.named_parameters() if type(each) is LateParameter]

    weight, other = model.inner.weight, prompt.inner.weight

    def graph() -> torch.Tensor:
        return (weight.t() @ torch.ones(7, 1, requires_grad=True)).sum()

    for what, hold in (
        ("a view", lambda: weight.data),
        ("an array", lambda: weight.detach().numpy()),
        ("the storage", weight.untyped_storage),
        ("a graph", graph),
    ):
        held: Any = hold()
        found = step()
        assert "inner.weight" not in found, f"{what} is held, and the parameter late"
        assert found, f"{what}: other parameters are not late"
        if what == "an array":
            assert torch.equal(torch.from_numpy(held), other.detach()), "the array has old numbers"
        del held
        assert torch.equal(weight.detach(), other.detach()), what
    assert "inner.weight" in step(), "nobody holds it, and it is not late"


@ranks(2)
def test_a_graph_of_before_the_step_is_refused_as_without_late_rows() -> None:
    fd.init()
    model, optimizer = made(torch.optim.SGD, LATE)
    train(model, optimizer, cut=part, steps=1)
    tokens, targets = batch(1)
    loss = loss_of(model, tokens, targets)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.full("further")
@pytest.mark.parametrize("stage", [1, 2])
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_late_rows_across_hosts_packed_and_saved(stage: int, tmp_path: str) -> None:
    """The shutdown, with parameters on their way, brings them."""
    pretend_two_hosts()
    for codec in ("none", "int8"):
        found = []
        for late in (False, True):
            fd.init()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64))
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            fd.distribute(model, optimizer, fd.Plan(zero=stage, weight_codec=codec, overlap_gather=late))
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + fd.world().rank)
                optimizer.zero_grad()
                model(torch.randn(3, 64, generator=generator)).square().mean().backward()
                optimizer.step()
                is_late = [type(each) is LateParameter for each in model.parameters()]
                assert any(is_late) == late, f"step {step}: {is_late}"
                if step == 1:
                    fd.save(f"{tmp_path}/{codec}{late}", model, optimizer, step=step)
            fd.shutdown()
            assert not any(type(each) is LateParameter for each in model.parameters()), "late after the end"
            found.append([each.detach() for each in model.parameters()])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), f"{codec}: parameters differ by {float((one - other).abs().max())}"
