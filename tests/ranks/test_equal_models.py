"""Ranks that drift apart while they train are stopped, or told so, and the odd one is named."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.checkpoint.directory import saved_steps
from farandole.comm.world.store_sync import all_gather_json
from farandole.parallel.model import DistributedModel
from farandole.sync.local_steps import LocalSteps
from farandole.train import equal_models
from tests.ranks.pool import ranks
from tests.ranks.reference import data, mlp, own


def train(change: Callable[[int, Any, Any, float], None], steps: int = 18, **plan: Any) -> str:
    """Train, call `change` after each step, and return what was said or raised."""
    fd.init(progress=False)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    fd.distribute(model, optimizer, plan=fd.Plan(**plan) if plan else None)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                place = fd.world().rank // plan.get("tensor", 1)  # parts of one model have one batch
                x, y = data(4, 100 * place + step)
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                change(step, model, optimizer, loss.item())
        except fd.Mismatch as problem:
            print(f"stopped in step {step}: {problem}", file=said)
    fd.shutdown()
    return said.getvalue()


def flip(parameter: torch.Tensor, element: int = 0, bit: int = 20) -> None:
    """Flip a bit of one element: of float32, or the one of bfloat16 that is as high."""
    with torch.no_grad():
        whole, shift = (torch.int32, 0) if parameter.dtype is torch.float32 else (torch.int16, 16)
        mask = torch.tensor(-(2**31) if bit == 31 else 1 << max(bit, shift), dtype=torch.int32) >> shift
        parameter.detach().reshape(-1).view(whole)[element] ^= mask.to(whole)


STOPPED = "stopped in step {}: rank {}, comparison of models: after step {} the ranks no longer train one model: "


@ranks(3)
@pytest.mark.parametrize("warns", [False, True])
def test_a_rate_that_one_rank_changed_is_told_once(warns: bool) -> None:
    rank = fd.init().rank

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 5 and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.25

    said = train(change, steps=40, check_every=8, on_difference="warn" if warns else "stop")
    start = "farandole: warning: after step 8 the ranks no longer train one model: "
    start = start if warns else STOPPED.format(11, rank, 8)
    what = f"{start}their learning rates differ: 0.5 on ranks 0 and 2, 0.25 on rank 1; "
    assert said.startswith(what) if rank == 0 or not warns else not said, said
    assert said.count("\n") == (rank == 0 or not warns)
    assert not said or "use farandole.mean(loss)" in said


@ranks(2)
@pytest.mark.parametrize("changes", [False, True])
def test_rates_of_ranks_with_other_parts_of_a_model_are_compared(changes: bool) -> None:
    rank = fd.init().rank

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if changes and step == 5 and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.25

    said = train(change, tensor=2)
    told = STOPPED.format(13, rank, 10) + "their learning rates differ: 0.5 on rank 0, 0.25 on rank 1; "
    assert said.startswith(told) if changes else not said, said


@ranks(3)
@pytest.mark.parametrize(
    "keys",
    [
        {}, {"codec": "int8"}, {"codec": "powersgd:1"}, {"zero": 1}, {"zero": 2, "overlap_gather": True},
        {"bf16_parameters": True, "precision": "bf16"},
    ],
)  # fmt: skip
@pytest.mark.parametrize(("odd", "element", "bit"), [(0, 0, 23), (1, 100, 0), (2, 255, 31)])
def test_a_flipped_bit_stops_all_ranks_and_names_its_rank(
    keys: dict[str, Any], odd: int, element: int, bit: int
) -> None:
    rank, host = fd.init().rank, fd.world().host

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 16 and rank == odd:
            flip(model[2].weight, element, bit)

    said = train(change, steps=40, check_every=8, **keys)
    others = " and ".join(str(each) for each in range(3) if each != odd)
    told = f"parameters of rank {odd} (on {host}) differ from those of ranks {others}: '2.weight'"
    assert said.startswith(STOPPED.format(19, rank, 16) + told), said


@ranks(2)
def test_of_two_ranks_neither_is_said_to_be_wrong() -> None:
    rank, host = fd.init().rank, fd.world().host

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 11 and rank == 1:
            for each in model.parameters():
                flip(each)

    said = train(change, steps=40)
    told = f"parameters of ranks 0 and 1 (on {host}) differ, and which are right cannot be told: '0.weight' and 5 "
    assert said.startswith(STOPPED.format(23, rank, 20) + told), said


@ranks(2)
@pytest.mark.parametrize("every", [0, 1])
def test_how_often_models_are_compared(every: int) -> None:
    rank = fd.init().rank

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 11 and rank == 1:
            flip(model[0].weight)

    said = train(change, steps=40, check_every=every)
    assert said.startswith(STOPPED.format(19, rank, 16)) if every else not said, said


@ranks(2)
def test_a_pipeline_that_is_saved_before_its_first_step_is_compared_as_it_is_cut(tmp_path: Path) -> None:
    here = fd.init(progress=False)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    fd.distribute(model, optimizer, fd.Plan(pipeline=2, check_every=8))
    fd.save(tmp_path, model, optimizer, step=0)
    for step in range(12):
        optimizer.zero_grad()
        fd.step(model, nn.functional.mse_loss, *data(8, step))
        optimizer.step()
    assert here.size == 2


@ranks(2)
def test_a_save_compares_what_it_saves_and_no_model_in_local_steps(tmp_path: Path) -> None:
    rank = fd.init(progress=False).rank
    models = [mlp(), mlp()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        fd.distribute(model, optimizer, fd.Plan(sync="local:H=30"))
    for model, optimizer in zip(models, optimizers, strict=True):
        nn.functional.mse_loss(model(data(4, rank)[0]), data(4, rank)[1]).backward()
        optimizer.step()
    fd.save(tmp_path, models[0], optimizers[0], step=1)
    assert saved_steps(tmp_path) == [1]


@ranks(2)
def test_short_steps_are_compared_as_seldom_as_it_takes_half_a_percent() -> None:
    fd.init(progress=False)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    fd.distribute(model, optimizer)
    begun: list[int] = []
    clock = fd.world().session.keep(equal_models.EqualModels, lambda: pytest.fail("there is one"))._clock
    begin = clock.begin
    clock.begin = lambda step: (begun.append(step), begin(step))[1]  # type: ignore[method-assign, func-returns-value]
    with mock.patch.object(equal_models, "FREE_SECONDS", 0.0):
        for step in range(400):
            x, y = data(4, step + 1000 * fd.world().rank)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert len(set(map(tuple, all_gather_json(fd.world(), "begun", begun)))) == 1
    assert begun[0] == 10
    assert len(begun) < 30, "of 40: a step takes a millisecond"


@ranks(4)
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_a_part_of_a_layer_is_compared_with_that_of_another_replica(name: str) -> None:
    rank, host = fd.init().rank, fd.world().host

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 20 and rank == 1:
            flip(model.get_parameter(name))

    said = train(change, steps=40, tensor=2, data=2)
    told = f"parameters of ranks 1 and 3 (on {host}) differ, and which are right cannot be told: '0.weight'"
    if name == "2.bias":  # whole on all ranks
        told = f"parameters of rank 1 (on {host}) differ from those of ranks 0, 2 and 3: '2.bias'"
    assert said.startswith(STOPPED.format(23, rank, 20) + told), said


@ranks(4)
def test_shards_are_compared_with_those_of_another_copy() -> None:
    rank, host = fd.init().rank, fd.world().host

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if step == 20 and rank == 2:
            flip(model.get_parameter("2.weight").to_local())

    said = train(change, steps=40, zero=3, shard=2, data=2)
    told = f"parameters of ranks 0 and 2 (on {host}) differ, and which are right cannot be told: '2."
    assert said.startswith(STOPPED.format(23, rank, 20) + told), said


@ranks(2)
@pytest.mark.parametrize("sync", ["local:H=4", "local:H=8,fragments=2,overlap=1"])
def test_averaged_parameters_are_compared_in_each_meeting(sync: str) -> None:
    fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    fd.distribute(model, optimizer, fd.Plan(sync=sync))
    policy = DistributedModel.of(model).policy
    assert isinstance(policy, LocalSteps)
    stopped_in, said = 0, ""
    for step in range(1, 40):
        x, y = data(12, step)
        nn.functional.mse_loss(model(own(x)), own(y)).backward()
        try:
            optimizer.step()
        except fd.Mismatch as problem:
            stopped_in, said = step, str(problem)
            break
        if step == 11 and fd.world().rank:
            flip(policy.meetings.fragments[0].outer[0], 40)
    assert 12 <= stopped_in <= 20, "at the next meeting over it"
    assert "averaged parameters" in said


@ranks(3)
@pytest.mark.parametrize("warns", [False, True])
def test_no_checkpoint_is_written_of_ranks_that_differ(tmp_path: Path, warns: bool) -> None:
    here = fd.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    fd.distribute(model, optimizer, fd.Plan(check_every=1000, on_difference="warn" if warns else "stop"))
    saver = fd.Checkpointer(tmp_path, model, optimizer)
    assert saver.save(1)
    if here.rank == 2:
        flip(model.get_parameter("0.weight"), 3)
    if warns:
        assert saver.save(2)
    else:
        with pytest.raises(fd.Mismatch, match=r"of rank 2 .* differ from those of ranks 0 and 1: '0\.weight'"):
            saver.save(2)
    saver.close()
    assert saved_steps(tmp_path) == ([1, 2] if warns else [1])


@ranks(2)
def test_a_model_of_a_world_that_is_over_is_not_compared() -> None:
    rank = fd.init().rank
    model = mlp()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.5))
    fd.shutdown()
    with torch.no_grad():
        list(model.parameters())[-1].add_(rank)
    fd.init()
    assert not train(lambda step, model, optimizer, loss: None)
    assert model is not None, "it lives until here"


@pytest.mark.parametrize("agrees", [True, False])
@ranks(2)
def test_a_plateau_of_each_ranks_own_loss(agrees: bool) -> None:
    rank = fd.init().rank
    schedulers: list[Any] = []

    def change(step: int, model: Any, optimizer: Any, loss: float) -> None:
        if not schedulers:
            schedulers.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        schedulers[0].step(fd.mean(loss) if agrees else loss)

    said = train(change)
    assert said.startswith(STOPPED.format(13, rank, 10) + "their learning rates differ") is not agrees, said


class Renormed(nn.Module):
    """Keeps the rows that it reads short, as ``Embedding(max_norm=...)`` does, by hand: no layer says so."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out, self.alike = nn.Embedding(2000, 4), nn.Linear(4, 1), alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = torch.arange(2000) if self.alike else x
            self.words.weight.index_copy_(0, rows, self.words.weight[rows].renorm(2, 0, 0.5))
        found: torch.Tensor = self.out(self.words(x))
        return found


def train_renormed(alike: bool, steps: int) -> str:
    world = fd.init(progress=False)
    model = Renormed(alike)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(1490 + 10 * step + 5 * world.rank + torch.arange(5)).square().mean().backward()
        try:
            optimizer.step()
        except fd.Mismatch as problem:
            return f"stopped in step {step}: {problem}"
    return ""


@ranks(2)
@pytest.mark.parametrize("alike", [False, True])
def test_a_parameter_that_forward_changes_by_the_batch_is_named_after_the_first_step(alike: bool) -> None:
    said = train_renormed(alike, 4)
    expected = STOPPED.format(4, fd.world().rank, 1) + f"parameters of ranks 0 and 1 (on {fd.world().host}) differ"
    more = (
        ": 'words.weight'; the forward pass changes 'words.weight', on each rank by its own batch; change models"
    )
    assert not said if alike else said.startswith(expected) and more in said, said


@ranks(2)
def test_layers_with_max_norm_are_refused_and_at_zero_3_any_change_in_forward() -> None:
    fd.init()
    for layer in (nn.Embedding(9, 4, max_norm=1.0), nn.EmbeddingBag(9, 4, max_norm=1.0)):
        model = nn.Sequential(layer, nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for plan in (fd.Plan(), fd.Plan(zero=2), fd.Plan(zero=3)):
            with pytest.raises(
                fd.ConfigError, match=r"'0' is Embedding(Bag)? with max_norm=1.0.*renorm\(2, 0, 1\)"
            ):
                fd.distribute(model, optimizer, plan)
    renormed = Renormed(alike=True)
    optimizer = torch.optim.SGD(renormed.parameters(), 0.1)
    fd.distribute(renormed, optimizer, fd.Plan(zero=3))
    with pytest.raises(fd.ConfigError, match=r"forward pass changes 'words\.weight' in place"):
        renormed(torch.arange(5))
