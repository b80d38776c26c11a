"""Gradients that are finite on every rank, and whose sum is not: one bad step, by every codec, and no more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.buckets.coded_bucket import CodedBucket
from farandole.core.vocabulary.errors import CommError
from farandole.parallel.apply import reducer_of
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits
from tests.ranks.test_negotiate import engine, run
from tests.ranks.test_routes import pretend_two_hosts

WIDTH = 128
HUGE = 3e38
ALL_ELEMENTS = ["bf16", "fp16", "int8", "int8:rounding=stochastic", "int8:feedback=false", "int4", "sign"]
SOME_ELEMENTS = [
    "topk:0.05", "topk:0.05,momentum=0.5", "threshold:0.001", "randomk:0.2", "powersgd:4",
    "tests.ranks.test_coded_engine.half",
]  # fmt: skip


def one_matrix(**plan: Any) -> tuple[nn.Linear, torch.optim.Optimizer, CodedBucket]:
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    _, optimizer = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), fd.Plan(**plan))
    backward(model, optimizer, 1.0)
    found = reducer_of(model)
    assert found is not None
    (bucket,) = found.parts.buckets.buckets
    assert isinstance(bucket, CodedBucket)
    return model, optimizer, bucket


def backward(model: nn.Linear, optimizer: torch.optim.Optimizer, value: float) -> bool:
    """Exchange gradients of `value` on every rank; return whether what came back is finite."""
    optimizer.zero_grad()
    (model.weight.sum() * value).backward()
    assert model.weight.grad is not None
    return bool(torch.isfinite(model.weight.grad).all())


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
