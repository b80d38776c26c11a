"""Gradients that are finite on every rank, and whose sum is not: one bad step, by every codec, and no more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.comm.engine.coded_bucket import CodedBucket
from farandole.comm.engine.sharded_bucket import CodedShardBucket
from farandole.core.vocabulary.errors import CommError
from farandole.parallel.loss_scaling import LEAST
from farandole.parallel.lower_precision import loss_scale_of
from farandole.parallel.model import DistributedModel
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits
from tests.ranks.test_negotiate import engine, run
from tests.ranks.test_routes import pretend_two_hosts

WIDTH = 128
HUGE = 3e38
ALL_ELEMENTS = ["bf16", "fp16", "fp8", "int8", "int8:rounding=stochastic", "int8:feedback=false", "int4", "sign"]
SOME_ELEMENTS = [
    "topk:0.05", "topk:0.05,momentum=0.5", "threshold:0.001", "randomk:0.2", "powersgd:4",
    "tests.ranks.test_coded_engine.half",
]  # fmt: skip


def one_matrix(**plan: Any) -> tuple[nn.Linear, torch.optim.Optimizer, CodedBucket]:
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    _, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), fd.Plan(**plan))
    backward(model, optimizer, 1.0)
    found = DistributedModel.of(model).reducer
    assert found is not None
    (bucket,) = found.buckets.buckets
    assert isinstance(bucket, CodedBucket)
    return model, optimizer, bucket


def backward(model: nn.Linear, optimizer: torch.optim.Optimizer, value: float) -> bool:
    """Exchange gradients of `value` on every rank; return whether what came back is finite."""
    optimizer.zero_grad()
    (model.weight.sum() * value).backward()
    assert model.weight.grad is not None
    return bool(torch.isfinite(model.weight.grad).all())


@pytest.mark.full("further")
@ranks(2)
def test_one_bad_step_by_every_codec() -> None:
    fd.init()
    for codec in [*ALL_ELEMENTS, *SOME_ELEMENTS]:
        model, optimizer, bucket = one_matrix(codec=codec, route="flat")
        seen = [backward(model, optimizer, HUGE if step == 2 else 1.0) for step in range(6)]
        # What is left out overflows in the step after, where it is asked for together with what is left.
        assert seen == [True, True, False, True, True, True], codec
        assert all(bool(torch.isfinite(unsent).all()) for unsent in bucket.coded.unsent()), codec
        optimizer.step()
        assert_same_bits(model)


@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_one_bad_step_across_hosts() -> None:
    pretend_two_hosts()
    fd.init()
    for codec in ("int8", "topk:0.05"):
        model, optimizer, bucket = one_matrix(codec=codec)
        assert bucket._route == "hierarchical"
        seen = [backward(model, optimizer, HUGE if step == 2 else 1.0) for step in range(5)]
        assert seen == [True, True, False, True, True], codec
        assert all(bool(torch.isfinite(unsent).all()) for unsent in bucket.coded.unsent()), codec
        assert_same_bits(model)


@pytest.mark.parametrize("codec", ["randomk:0.2", "topk:0.02,momentum=0.5"])
@ranks(2)
def test_what_was_left_out_and_overflowed_is_forgotten(codec: str) -> None:
    """What a rank keeps overflows, while the mean of what was sent is finite."""
    world = fd.init()
    model, optimizer, bucket = one_matrix(codec=codec, route="flat")
    sign = 1.0 if world.rank == 0 else -1.0  # the sum of what is sent is zero
    seen = [backward(model, optimizer, sign * HUGE / 2 if step < 6 else 1.0) for step in range(16)]
    assert not all(seen), "it overflowed"
    assert all(seen[10:]), seen
    assert all(bool(torch.isfinite(unsent).all()) for unsent in bucket.coded.unsent())
    assert_same_bits(model)


@ranks(2)
def test_the_step_is_skipped_with_a_reason() -> None:
    world = fd.init()
    model, optimizer, bucket = one_matrix(codec="int8", route="flat", nonfinite="skip")
    before, kept = model.weight.clone(), bucket.coded.unsent()[0].clone()
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        (model.weight.sum() * HUGE).backward()
    optimizer.step()
    assert model.weight.grad is None
    assert torch.equal(model.weight, before), "nothing was applied"
    assert torch.equal(bucket.coded.unsent()[0], kept), "as if it had not been"
    texts = [str(one.message) for one in heard if issubclass(one.category, RuntimeWarning)]
    expected = "gradients of weight are finite on every rank, and their sum over the ranks is not"
    assert texts == ([f"farandole: step skipped: {expected}"] if world.rank == 0 else [])
    assert backward(model, optimizer, 1.0)


@ranks(2)
def test_the_error_is_raised_on_all_ranks() -> None:
    fd.init()
    model, optimizer, _ = one_matrix(codec="int8", route="flat", nonfinite="raise")
    with pytest.raises(CommError, match="gradients of weight are finite on every rank, and their sum"):
        backward(model, optimizer, HUGE)
    assert backward(model, optimizer, 1.0)


@pytest.mark.parametrize("codec", ["int8", "randomk:0.2", "powersgd:4"])
@ranks(2)
def test_operations_by_name(codec: str) -> None:
    fd.init()
    with engine() as it:
        seen = []
        for step in range(6):
            tensor = torch.full((WIDTH, WIDTH), HUGE if step == 2 else 1.0, dtype=torch.float32)
            found = run(it, "w", "allreduce", tensor, reduction="average", codec=codec)
            seen.append(bool(torch.isfinite(found).all()))
        assert seen == [True, True, False, True, True, True]


def shards(**plan: Any) -> tuple[nn.Linear, torch.optim.Optimizer, CodedShardBucket]:
    """Return a training whose one packed bucket is divided over the ranks."""
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    _, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), fd.Plan(**plan))
    own_rows_of(model, optimizer, 1.0)
    found = DistributedModel.of(model).reducer
    assert found is not None, "no reducer"
    (bucket,) = found.buckets.buckets
    assert isinstance(bucket, CodedShardBucket), "nothing is packed"
    return model, optimizer, bucket


def own_rows_of(model: nn.Linear, optimizer: torch.optim.Optimizer, value: float) -> bool:
    """Exchange gradients of `value` on every rank; return whether this rank's rows of the mean are finite."""
    optimizer.zero_grad()
    (model.weight.sum() * value).backward()
    assert isinstance(model.weight.grad, DTensor), "the gradient is not divided"
    return bool(torch.isfinite(model.weight.grad.to_local()).all())


LEFT = 1.5e38
"""A residual, as earlier steps may leave it: sums with gradients of `HUGE` overflow, those with 1 do not."""


@pytest.mark.gate_cases("2")
@ranks(2, 3)
def test_a_sum_that_overflows_at_its_owner_is_known_to_all_ranks() -> None:
    fd.init()
    for codec, stage in [("bf16", 1), ("fp16", 2), ("int8", 1), ("int8:rounding=stochastic", 2), ("int4", 1)]:
        model, optimizer, bucket = shards(codec=codec, route="flat", zero=stage)
        bucket._sums._lost[-1].fill_(LEFT)  # of the last rank's rows alone
        seen = [own_rows_of(model, optimizer, HUGE if step == 0 else 1.0) for step in range(4)]
        assert seen == [False, True, True, True], f"{codec}: {seen}"
        assert all(bool(torch.isfinite(each).all()) for each in bucket._sums._lost), codec
        optimizer.step()
        assert_same_bits(model)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@ranks(2)
def test_what_overflows_at_its_owner_is_skipped_or_raised_on_all_ranks(nonfinite: str) -> None:
    world = fd.init()
    model, optimizer, bucket = shards(codec="int8", route="flat", zero=1, nonfinite=nonfinite)
    bucket._sums._lost[-1].fill_(LEFT)
    before, kept = model.weight.clone(), [each.clone() for each in bucket._sums._lost]
    text = "gradients of weight are finite on every rank, and their sum over the ranks is not"
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if nonfinite == "raise":
            with pytest.raises(CommError, match=text):
                (model.weight.sum() * HUGE).backward()
        else:
            (model.weight.sum() * HUGE).backward()
            optimizer.step()
    told = [str(one.message) for one in heard if issubclass(one.category, RuntimeWarning)]
    expected = [f"farandole: step skipped: {text}"] if world.rank == 0 and nonfinite == "skip" else []
    assert told == expected, told
    assert nonfinite == "raise" or model.weight.grad is None, "the gradient is still there"
    assert torch.equal(model.weight, before), "something was applied"
    assert all(map(torch.equal, bucket._sums._lost, kept)), "the residual has changed"
    assert own_rows_of(model, optimizer, 1.0), "the next step is not finite"


@ranks(2)
def test_a_loss_scale_sees_what_overflows_at_its_owner() -> None:
    fd.init()
    model, optimizer, bucket = shards(precision="fp16", codec="int8", route="flat", zero=2)
    scale = loss_scale_of(model)
    assert scale is not None, "no loss scale"
    optimizer.step()
    bucket._sums._lost[-1].fill_(LEFT)
    before = model.weight.clone()
    scale.value = LEAST  # or it would be infinite on each rank
    for factor, skipped in ((HUGE, 1), (1.0, 1)):
        optimizer.zero_grad()
        (model.weight.sum() * factor).backward()
        optimizer.step()
        assert scale.skipped_steps == skipped, f"{scale.skipped_steps} steps were skipped, expected {skipped}"
        assert torch.equal(model.weight, before) == (factor != 1.0), f"factor {factor}: skipped, or not"
