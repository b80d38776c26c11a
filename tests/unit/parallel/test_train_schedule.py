"""`train_schedule`: which parameters train from which step on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import PlanError
from farandole.parallel.distribute import undistribute

SCHEDULE = {"0": "0.*", "2": "0.* 1.*", "4": "1.weight 2.*"}
Job = tuple[nn.Sequential, torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    fd.init(progress=False)
    yield
    fd.shutdown()


def begin(seed: int = 0, *, load: Path | None = None) -> Job:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    if load is not None:
        fd.load(load, model, optimizer)
    return fd.distribute(model, optimizer, fd.Plan(train_schedule=SCHEDULE))


def step(job: Job, seed: int) -> set[str]:
    """Return the names of the parameters that moved."""
    model, optimizer = job
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad(set_to_none=seed % 2 == 0)  # zeros would be stepped with decay and momentum
    model(x).square().mean().backward()
    optimizer.step()
    return {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}


FIRST = {"0.weight", "0.bias"}
BY_STEP = [FIRST, FIRST, FIRST | {"1.weight", "1.bias"}, FIRST | {"1.weight", "1.bias"},
           {"1.weight", "2.weight"}, {"1.weight", "2.weight"}]  # fmt: skip


def test_what_moves_in_each_step_is_what_the_entry_names() -> None:
    job = begin()
    for number, wanted in enumerate(BY_STEP):
        trains = {name for name, each in job[0].named_parameters() if each.requires_grad}
        assert trains == wanted, f"before step {number}"
        assert step(job, number) == wanted, f"in step {number}; 2.bias was frozen by the script and stays so"


@pytest.mark.parametrize("saved_after", [1, 3, 5])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_loaded_training_goes_on_where_it_was(saved_after: int, order: str, tmp_path: Path) -> None:
    job = begin()
    for number in range(saved_after):
        step(job, number)
    fd.save(tmp_path, *job, step=100 + saved_after)  # a step of the script's own counting
    other = begin(1, load=tmp_path) if order == "before" else begin(1)
    if order == "after":
        fd.load(tmp_path, *other)
    for number in range(saved_after, 6):
        assert step(other, number) == BY_STEP[number], f"step {number}"
        step(job, number)
    for one, two in zip(job[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(one, two), "bit for bit"


def test_another_optimizer_goes_on_with_the_schedule() -> None:
    job = begin()
    for number in range(3):
        step(job, number)
    model = job[0]
    undistribute(model)
    again = fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(train_schedule=SCHEDULE))
    assert step(again, 3) == BY_STEP[3]
    assert step(again, 4) == BY_STEP[4]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"0": "0.*", "5": "nothing"}, "'nothing' matches none of 6"),
        ({"5": "*"}, "from step 0"),
        ({"0": "*", "x": "*"}, "the step 'x'"),
        ({"0": "*", "05": "*"}, "the step '05'"),
        ({"0": "*", "-1": "*"}, "the step '-1'"),
        ({"0": " "}, "no pattern for step 0"),
    ],
)
def test_refusals(schedule: dict[str, str], words: str) -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    with pytest.raises(PlanError, match=words):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(train_schedule=schedule))
    assert all(each.requires_grad for each in model.parameters()), "nothing was frozen"
