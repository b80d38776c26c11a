"""Every way to divide a training is exact: in float64 it is that of one process to 1e-10.

Losses, the norm of the first gradients, and parameters after five steps of Adam, with clipping.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.parallel.split import split_of
from tests.ranks.pool import ranks, takes
from tests.ranks.test_degrees import STEPS, Text, batch, loss_of, plan_of

CLIP = 0.5
NEAR = 1e-10

FOUR: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("data", "tensor"), {}),
    (("data", "pipeline"), {}),
    (("data", "context"), {}),
    (("data", "shard"), {}),
    (("shard", "tensor"), {}),
    (("tensor", "pipeline"), {}),
    (("tensor", "context"), {}),
    (("shard", "pipeline"), {}),
    (("shard", "context"), {}),
    (("pipeline", "context"), {}),
    (("data", "expert"), {}),
    (("shard", "expert"), {}),
    (("tensor", "expert"), {}),
    (("pipeline", "expert"), {}),
    (("expert", "context"), {}),
    (("data", "tensor"), {"zero": 1}),
    (("data", "tensor"), {"zero": 2}),
]
ANY: list[dict[str, Any]] = [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 2, "accumulate": 2}]


def in_float64(plan: fd.Plan) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        compare(plan)
    finally:
        torch.set_default_dtype(torch.float32)


def compare(plan: fd.Plan) -> None:
    here = fd.init()
    reference, model = (Text(experts=plan.expert != 1) for _ in range(2))
    plain, optimizer = (torch.optim.Adam(each.parameters(), 0.01, eps=1e-4) for each in (reference, model))
    fd.distribute(model, optimizer, plan)
    for number in range(STEPS):
        expected: list[float] = []
        for part in range(plan.accumulate):
            tokens, places, targets = batch(number * plan.accumulate + part)
            loss = loss_of(reference(tokens, places), targets)
            loss.backward()
            expected.append(float(loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        plain.step(), plain.zero_grad()
        for part in range(plan.accumulate):
            own = [
                each.chunk(here.sample_size)[here.sample_rank].contiguous()
                for each in batch(number * plan.accumulate + part)
            ]
            if plan.context != 1:
                own = list(fd.context_shard(*own))
            found = fd.step(model, loss_of, (own[0], own[1]), own[2])
            assert abs(float(found) - expected[part]) < NEAR, (
                f"loss of step {number}: {float(found)} for {expected[part]}"
            )
        mine = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        assert abs(float(mine) - float(norm)) < NEAR, f"norm of step {number}: {float(mine)} for {float(norm)}"
        optimizer.step(), optimizer.zero_grad()
    whole = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        split, theirs = split_of(parameter), whole[name].detach()
        theirs = theirs if split is None else split.take(theirs)
        if value.numel():  # another stage's has none
            torch.testing.assert_close(value, theirs, rtol=0, atol=NEAR, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.gate_cases("data-pipeline", "shard-pipeline", "tensor-context", "tensor-expert")
@pytest.mark.parametrize(("degrees", "keys"), FOUR, ids=["-".join([*d, *map(str, k.values())]) for d, k in FOUR])
@ranks(4)
@takes(60)
def test_pairs_of_degrees(degrees: tuple[str, ...], keys: dict[str, Any]) -> None:
    in_float64(plan_of(degrees, **keys))


@pytest.mark.gate_cases("2-zero1", "4-zero2", "4-zero3")
@pytest.mark.parametrize("keys", ANY, ids=lambda keys: "-".join(f"{k}{v}" for k, v in keys.items()) or "plain")
@ranks(2, 4)
@takes(60)
def test_stages(keys: dict[str, Any]) -> None:
    in_float64(fd.Plan(**keys))


@pytest.mark.full_cases("data-tensor-pipeline", "data-shard-tensor")
@pytest.mark.parametrize("degrees", [("data", "shard", "tensor"), ("data", "tensor", "pipeline")], ids="-".join)
@ranks(8)
@takes(120)
def test_three_degrees(degrees: tuple[str, ...]) -> None:
    in_float64(plan_of(degrees))
