"""Context parallel: sequences divided over ranks train as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.spec import Plan
from tests.ranks.context_models import Text, loss_of, texts
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits
from tests.ranks.sharded_cases import full


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)


def train(
    model: nn.Module, optimizer: Any, length: int, *, padded: bool, ragged: bool, steps: int = 5
) -> list[float]:
    """Train on whole sequences, or on this rank's part where the model is divided; return the losses."""
    losses = []
    for step in range(steps):
        tokens, targets = texts(2, length, seed=step)
        padding = torch.arange(length) >= torch.tensor([[0], [length // 3]]) if padded else None
        if ragged:
            targets[1, length // 4 :] = -100
        if hasattr(model, "_farandole_context"):
            tokens, targets = fd.context_shard(tokens, targets)
            padding = None if padding is None else fd.context_shard(padding)
        if ragged and hasattr(model, "_farandole_context"):
            fd.weight((targets != -100).sum())
        loss = loss_of(model(tokens, padding), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) * int((targets != -100).sum()))
    if ragged and hasattr(model, "_farandole_context"):
        fd.weight(None)
    return losses


@pytest.mark.gate_cases("3-heads")
@pytest.mark.parametrize("kind", ["ring", "heads"])
@ranks(2, 3, 4)
def test_training_is_that_of_one_process(kind: str) -> None:
    """Causal and not, padded and not, ragged targets, groups of heads, by both optimizers."""
    world = fd.init()
    size = world.size
    cases = [
        (True, False, False, "sgd"), (True, False, True, "adam"), (False, True, True, "sgd"),
        (False, True, False, "adam"),
    ]  # fmt: skip
    for causal, padded, ragged, name in cases:
        heads = {"ring": (4, 2), "heads": (8, 4) if size != 3 else (0, 0)}[kind]
        if heads == (0, 0):
            return  # 16 numbers a token are not 3 heads
        length = 2 * size * 3
        reference, model = (Text(heads=heads[0], groups=heads[1], is_causal=causal) for _ in range(2))
        plain, optimizer = (optimizer_of(each, name) for each in (reference, model))
        fd.distribute(model, optimizer, Plan(context=size, context_kind=kind))  # type: ignore[arg-type]
        expected = train(reference, plain, length, padded=padded, ragged=ragged)
        found = train(model, optimizer, length, padded=padded, ragged=ragged)
        both = torch.tensor(all_gather_json(world, "losses", found)).sum(0)
        torch.testing.assert_close(both, torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert_close(model, reference)
        assert_same_bits(model)


@pytest.mark.gate_cases("{'zero': 1}")
@pytest.mark.parametrize(
    "settings",
    [{"recompute": "blocks"}, {"zero": 1}, {"zero": 3}, {"precision": "bf16"}, {"clip_norm": 0.1}],
    ids=str,
)
@ranks(2)
def test_with_other_keys_of_the_plan(settings: dict[str, Any]) -> None:
    fd.init()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views, as a Linear layer of torch returns too
    reference, model = Text(is_causal=False), Text(is_causal=False)
    plain, optimizer = (optimizer_of(each, "sgd") for each in (reference, model))
    fd.distribute(model, optimizer, Plan(context=2, **settings))
    tokens, targets = texts(2, 16)
    targets[0, 9:] = -100
    padding = torch.arange(16) >= torch.tensor([[0], [5]])
    part, mine, pad = fd.context_shard(tokens, targets, padding)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled="precision" in settings):
            loss_of(reference(tokens, padding), targets).backward()
        fd.weight((mine != -100).sum())
        loss_of(model(part, pad), mine).backward()
        if "clip_norm" in settings:
            nn.utils.clip_grad_norm_(reference.parameters(), settings["clip_norm"])
        for one in (plain, optimizer):
            one.step()
            one.zero_grad()
    share = 0.03 if "precision" in settings else 1e-5
    expected = reference.state_dict()
    for name, value in full(model).items():
        torch.testing.assert_close(value, expected[name], rtol=share, atol=share / 10, msg=name)


@ranks(4)
def test_with_data_parallel_ranks() -> None:
    """Two replicas on other samples, each of two parts of its sequences; counts differ between all four."""
    world = fd.init()
    reference, model = Text(), Text()
    plain, optimizer = (optimizer_of(each, "adam") for each in (reference, model))
    fd.distribute(model, optimizer, Plan(context=2))
    assert (world.sample_rank, world.sample_size) == (world.rank // 2, 2), "context ranks share samples"
    for step in range(3):
        tokens, targets = texts(4, 16, seed=step)
        targets[0, 3:] = targets[1, :12] = -100
        loss_of(reference(tokens), targets).backward()
        own = slice(2 * world.sample_rank, 2 * world.sample_rank + 2)
        part, mine = fd.context_shard(tokens[own], targets[own])
        fd.weight((mine != -100).sum())
        loss_of(model(part), mine).backward()
        for one in (plain, optimizer):
            one.step()
            one.zero_grad()
    assert_close(model, reference)
    assert_same_bits(model)
