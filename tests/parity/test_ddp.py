"""Beside the plain thing: stock DistributedDataParallel, step by step."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.bench.models.language import LanguageModel
from farandole.parallel.apply import engine_of
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_same_bits, own


@ranks(2)
def test_weights_are_those_of_ddp_bit_for_bit() -> None:
    """Two ranks: a sum of two has no order, so nothing but the same bits will do."""
    fd.init()
    torch.manual_seed(0)
    model = LanguageModel(width=32, depth=2, heads=4, context=16)
    stock = DistributedDataParallel(copy.deepcopy(model))
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, stock))
    fd.distribute(model, ours)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens = own(torch.randint(0, 256, (8, 17), generator=generator))
        for network, optimizer in ((model, ours), (stock, theirs)):
            optimizer.zero_grad()
            logits = network(tokens[:, :-1]).flatten(0, 1)
            nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            optimizer.step()
    for (name, mine), other in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, other), name
    assert_same_bits(model)


@ranks(2)
def test_the_engine_takes_no_more_memory_than_ddp() -> None:
    """Gradients and buckets are one memory: the buckets' bytes are those of the gradients, and nothing beside."""
    fd.init()
    model = LanguageModel(width=64, depth=2, heads=4, context=16)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    tokens = torch.randint(0, 256, (2, 17))
    for _ in range(2):
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradient_bytes = sum(p.numel() * 4 for p in model.parameters())
    engine = engine_of(model)
    assert engine is not None
    padding = 68 * len(list(model.parameters()))
    assert gradient_bytes <= sum(engine.bucket_bytes) <= gradient_bytes + padding
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(storages) == len(engine.bucket_bytes)
