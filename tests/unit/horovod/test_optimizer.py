"""`hvd.DistributedOptimizer` in a world of one: arguments, their errors, and being an optimizer like any other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # here, because it leaves a variable in the environment when it is first imported
from torch import nn

import farandole.horovod.torch as hvd


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def test_it_steps_as_the_optimizer_does() -> None:
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    other = sgd(twin)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        for net, each in ((model, optimizer), (twin, other)):
            each.zero_grad(set_to_none=True)
            net(torch.ones(1, 3)).sum().backward()
            each.step()
    assert torch.equal(model.weight, twin.weight)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer._farandole_path == "alone"  # type: ignore[attr-defined]
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad()  # nobody to talk to, nothing to forget


def test_hooks_of_a_step_run_once() -> None:
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(sgd(model))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for each in (optimizer, pickle.loads(pickle.dumps(sgd(model))), copy.deepcopy(optimizer)):
        each.step()
    assert calls == ["before", "after"]


def test_a_saved_optimizer_is_a_distributed_one_again() -> None:
    model = nn.Linear(3, 2)
    optimizer: Any = hvd.DistributedOptimizer(
        sgd(model),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.int8,
        backward_passes_per_step=2,
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is type(optimizer)
    assert list(again._parameter_names.values()) == ["weight", "bias"]
    assert again.process_set is hvd.global_process_set
    assert again.backward_passes_per_step == 2
    assert torch.equal(
        again.state[again.param_groups[0]["params"][0]]["momentum_buffer"],
        optimizer.state[model.weight]["momentum_buffer"],
    )
    again.step()


def test_names() -> None:
    model = nn.Linear(3, 2)
    unnamed: Any = hvd.DistributedOptimizer(sgd(model))
    assert list(unnamed._parameter_names.values()) == ["allreduce.noname.0.0", "allreduce.noname.0.1"]
    for wrong, text in (
        (list(model.parameters()), r"named_parameters should be a sequence of tuples \(name, parameter\)"),
        ([("a", model.weight), ("a", model.bias)], "must be unique. Found duplicates: a$"),
        ([("a", model.weight)], f"were not named. Python object ids: {id(model.bias)}$"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(model), named_parameters=wrong)  # type: ignore[arg-type]


def test_arguments_that_are_wrong() -> None:
    model = nn.Linear(3, 2)
    weight = model.weight
    cases: list[tuple[dict[str, Any], str]] = [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        (
            {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
            "gradient_predivide_factor not supported with op != Av",
        ),
        ({"groups": -1}, "groups should be a non-negative integer or a list of list of torch.Tensor."),
        ({"groups": [weight]}, "groups should be a non-negative integer or a list of list of torch.Tensor."),
        ({"groups": [["weight"]]}, "groups must consist of torch.Tensor."),
        ({"groups": [[weight], [weight]]}, "A parameter can only appear once in groups."),
        ({"compression": "fp16"}, "compression='fp16': expected one of Compression"),
    ]
    for keywords, text in cases:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(model), **keywords)
    with pytest.warns(DeprecationWarning, match="Parameter `num_groups` has been replaced by `groups`"):
        hvd.DistributedOptimizer(sgd(model), num_groups=1)
    optimizer: Any = hvd.DistributedOptimizer(sgd(model))
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        optimizer.set_backward_passes_per_step(0)


def test_one_warning_for_a_synchronize_that_is_not_skipped() -> None:
    model = nn.Linear(3, 2)
    optimizer: Any = hvd.DistributedOptimizer(sgd(model))
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize") as seen:
        optimizer.step()
    assert len(seen) == 1
    optimizer.step()


def test_adasum_alone_is_the_ordinary_optimizer() -> None:
    model = nn.Linear(3, 2)
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum)
    assert optimizer._farandole_path == "alone"
    with optimizer.skip_synchronize():
        optimizer.step()


def test_batch_norm_alone_is_the_ordinary_layer() -> None:
    x = torch.randn(4, 3, 2)
    assert torch.equal(hvd.SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))


def test_without_a_world() -> None:
    model = nn.Linear(3, 2)
    hvd.shutdown()
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.DistributedOptimizer(sgd(model))
