"""Codecs that change during a run: the ranks stay equal, and nothing that was not sent yet is lost."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.engine.coded_bucket import CodedBucket
from farandole.core.vocabulary.codec_spec import CodecSpec
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, data, own
from tests.ranks.test_coded_engine import (
    MATRICES,
    WIDTH,
    Branches,
    coded_buckets,
    distributed,
    gradients,
    loss_of,
    poisoned,
    step,
    the_reducer,
    wide,
)


def switch(model: nn.Module, codec: str, names: list[str] = MATRICES) -> None:
    the_reducer(model).switch_codecs({name: CodecSpec.parse(codec) for name in names})


def used(model: nn.Module) -> dict[str, str]:
    return {name: bucket.spec.to_text() for name, bucket in coded_buckets(model).items()}


@pytest.mark.gate_cases("1048576-shared")
@pytest.mark.parametrize("route", ["flat", "shared"])
@pytest.mark.parametrize("limit", [2**20, 20000])
@ranks(3)
def test_ranks_hold_the_same_bits_through_all_switches(limit: int, route: str) -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan(first_bucket_bytes=limit, bucket_bytes=limit, route=route))  # type: ignore[arg-type]
    x, y = data(24, width=WIDTH)
    losses = []
    for codec in ("none", "int8", "powersgd:4", "none", "sign"):
        switch(model, codec)
        losses += [fd.mean(step(model, optimizer, x, y)) for _ in range(4)]
        expected = CodecSpec.parse(codec).to_text()
        assert used(model) == ({} if codec == "none" else dict.fromkeys(MATRICES, expected))
        assert_same_bits(model)
    assert losses[-1] < 0.8 * losses[0], losses
    check = fd.verify(model, optimizer)
    assert check.passed, str(check)


def assert_nothing_lost(model: nn.Module, codecs: list[str], x: torch.Tensor, y: torch.Tensor) -> None:
    """Six passes by each codec over the same gradients, and an exact one: their sum is that of the gradients."""
    alone = wide()
    loss_of(alone, x, y).backward()
    sums = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for codec in [*codecs, "none"]:
        switch(model, codec)
        for _ in range(1 if codec == "none" else 6):
            model.zero_grad()
            loss_of(model, own(x), own(y)).backward()
            for name, grad in gradients(model).items():
                sums[name] += grad
    for name, exact in gradients(alone).items():
        torch.testing.assert_close(sums[name], exact * (6 * len(codecs) + 1), rtol=1e-4, atol=2e-5, msg=name)
    assert not the_reducer(model).buckets.carry_over.unsent


SEQUENCES = [["sign"], ["topk:0.05", "sign"], ["powersgd:1", "int4", "powersgd:2"]]


@pytest.mark.gate_cases("codecs1", "codecs2")
@pytest.mark.parametrize("codecs", SEQUENCES)
@ranks(2)
def test_what_was_not_sent_is_added_to_the_next_gradient(codecs: list[str]) -> None:
    fd.init()
    model, _ = distributed(fd.Plan(first_bucket_bytes=20000, bucket_bytes=20000))
    assert_nothing_lost(model, codecs, *data(8, width=WIDTH))


@pytest.mark.gate_cases("codecs1")
@pytest.mark.parametrize("codecs", SEQUENCES)
@ranks(4, FARANDOLE_LOCAL_SIZE="2", FARANDOLE_NODE_COUNT="2")
def test_nothing_is_lost_across_hosts(codecs: list[str]) -> None:
    rank = int(os.environ["FARANDOLE_RANK"])
    os.environ["FARANDOLE_LOCAL_RANK"], os.environ["FARANDOLE_NODE_RANK"] = str(rank % 2), str(rank // 2)
    fd.init()
    model, _ = distributed(fd.Plan(route="hierarchical"))
    assert_nothing_lost(model, codecs, *data(8, width=WIDTH))


@pytest.mark.full("further")
@ranks(2)
def test_a_switch_before_the_first_pass() -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan())
    switch(model, "bf16", ["0.weight"])
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    assert used(model) == {"0.weight": "bf16"}
    assert_same_bits(model)


@ranks(2)
def test_buckets_that_are_not_concerned_stay_as_they_are() -> None:
    fd.init()
    model, optimizer = distributed(fd.Plan(codec="int8", codec_for={"0.weight": "sign"}))
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    before = coded_buckets(model)
    switch(model, "int4", ["2.weight"])
    after = coded_buckets(model)
    assert after["0.weight"] is before["0.weight"]
    assert used(model) == {"0.weight": "sign:block=512", "2.weight": "int4"}
    step(model, optimizer, x, y)
    switch(model, "int4", ["2.weight"])
    assert coded_buckets(model) == after, "nothing to do"


@ranks(2)
def test_what_is_owed_waits_until_some_rank_uses_the_parameter() -> None:
    world = fd.init()
    model = Branches()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(codec="sign"))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4))
    model(x, True, True).backward()
    sent = gradients(model)["right.weight"].clone()
    the_reducer(model).switch_codecs({"right.weight": CodecSpec.parse("none")})
    for _ in range(2):
        model.zero_grad()
        model(x, True, False).backward()
        assert "right.weight" not in gradients(model)
    model.zero_grad()
    model(x, True, world.rank == 0).backward()
    alone = Branches()
    alone(x, True, True).backward()
    exact = gradients(alone)["right.weight"]
    torch.testing.assert_close(gradients(model)["right.weight"] + sent, 1.5 * exact, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_what_is_owed_survives_a_gradient_that_is_not_finite() -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan(codec="sign"))
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    switch(model, "int8")
    owed = set(the_reducer(model).buckets.carry_over.unsent)
    assert len(owed) == 2
    with poisoned(model, float("nan"), world.rank == 1):
        model.zero_grad()
        loss_of(model, own(x), own(y)).backward()
    assert set(the_reducer(model).buckets.carry_over.unsent) == owed
    model.zero_grad()
    loss_of(model, own(x), own(y)).backward()
    assert all(bool(torch.isfinite(grad).all()) for grad in gradients(model).values())
    assert not the_reducer(model).buckets.carry_over.unsent


@ranks(2)
def test_a_sparse_gradient_stays_exact() -> None:
    fd.init()
    torch.manual_seed(0)
    model = nn.EmbeddingBag(100, WIDTH, sparse=True)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        model(torch.tensor([[1, 2]])).sum().backward()
        switch(model, "int8", ["weight"])
        assert not any(isinstance(bucket, CodedBucket) for bucket in the_reducer(model).buckets.buckets)
        model.zero_grad()


@ranks(2)
def test_switches_that_cannot_be() -> None:
    world = fd.init()
    model, optimizer = distributed(fd.Plan())
    with pytest.raises(fd.ConfigError, match=r"no parameter '9\.weight'"):
        switch(model, "int8", ["9.weight"])
    with pytest.raises(fd.PlanError, match=r"codec 'int8': parameter '0\.bias' has shape .*; give it codec none"):
        switch(model, "int8", ["0.bias"])
    with pytest.raises(fd.PlanError, match="none was chosen"):
        switch(model, "auto")
    with pytest.raises(fd.Mismatch, match=r"codec of '0\.weight'"):
        switch(model, "int8" if world.rank else "int4")
    assert used(model) == {}
    x, y = data(8, width=WIDTH)
    step(model, optimizer, x, y)
    assert_same_bits(model)
