"""Frozen weights that are stored in few bits, at ZeRO stage 3: each rank stores its share of the blocks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import farandole as fd
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.frozen_weight import FrozenWeight
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import own
from tests.ranks.sharded_cases import Words, batches, loss_of, whole
from tests.ranks.tensor_models import batch as language_batch
from tests.ranks.tensor_models import gpt2
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts

pytestmark = pytest.mark.full("slow")


def model_of(seed: int = 1) -> Words:
    """A model whose words, blocks and tied head are frozen, with adapters in the blocks."""
    model = Words(is_tied=False, seed=seed)
    model.head.weight = model.words.weight
    model.requires_grad_(False)
    fd.low_rank_adapters(model, "blocks.*", rank=2)
    model.blocks[1].requires_grad_(True)
    return model


class Run:
    """A training of it."""

    def __init__(self, keys: dict[str, Any], seed: int = 1) -> None:
        gc.collect()  # an optimizer that lives on, on some ranks, would go on leading their count of steps
        self.model = model_of(seed)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.Adam(trained, 0.01)
        fd.distribute(self.model, self.optimizer, Plan.from_mapping(keys, where="test"))

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for x, y in batches(8)[first:last]:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, own(x), own(y))
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @property
    def frozen(self) -> dict[str, FrozenWeight]:
        return {n: each for n, each in self.model.named_parameters() if isinstance(each, FrozenWeight)}

    @property
    def decoded(self) -> dict[str, torch.Tensor]:
        named = self.model.state_dict().items()
        return {n: each.decode() if isinstance(each, FrozenWeight) else whole(each) for n, each in named}


def alone(codec: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same in one process, with plain weights that have been through the codec."""
    model = model_of()
    for name, each in model.named_parameters():
        if not each.requires_grad and each.dim() == 2 and "adapter" not in name:
            each.data = FrozenWeight.encode(each, codec).decode()
    return model, torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 0.01)


def compare(codec: str, keys: dict[str, Any], sharers: int, folder: Path) -> None:
    keys = {"zero": 3, "frozen_codec": codec, **keys}
    run = Run(keys)
    names = list(run.frozen)
    assert names == ["words.weight", *(f"blocks.{i}.layers.{j}.weight" for i in (0, 2) for j in (0, 2))], names
    plain, optimizer = alone(codec)
    for x, y in batches(8)[:3]:
        optimizer.zero_grad()
        loss_of(plain, x, y).backward()
        optimizer.step()
    run.train(0, 2)
    loss_of(run.model, *batches(1)[0])  # a pass without backward leaves the rest of the model gathered
    run.train(2, 3)
    assert fd.verify(run.model, run.optimizer), "copies are equal"
    full = sum(FrozenWeight.encode(each.decode(), codec).stored_bytes for each in run.frozen.values())
    assert all(isinstance(part, DTensor) for each in run.frozen.values() for part in each.parts.values()), "shards"
    mine = sum(each.stored_bytes for each in run.frozen.values())
    assert mine <= full / sharers + 400, f"{mine} bytes on this rank of {full} in all"  # one block a weight more
    expected = {n: each.clone() for n, each in plain.state_dict().items()}
    for name, each in run.decoded.items():
        if name in run.frozen:
            assert torch.equal(each, expected[name]), f"{name}: other bits than one process has"
        torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    trained = [n for n, each in run.model.named_parameters() if each.requires_grad]
    assert any("blocks.1" in each for each in trained), "a block trains whole"
    exchange(run, {**keys, "zero": 0, "shard_within": "world"}, keys, folder / codec)


def exchange(run: Run, plain: dict[str, Any], sharded: dict[str, Any], folder: Path) -> None:
    """Save in shards, load whole, save whole, load in shards: the same bits, and training goes on."""
    before = run.decoded
    fd.save(folder / "shards", run.model, run.optimizer)
    there = Run({**plain, "recompute": "none"}, seed=5)
    fd.load(folder / "shards", there.model, there.optimizer)
    fd.save(folder / "whole", there.model, there.optimizer)
    back = Run(sharded, seed=6)
    fd.load(folder / "whole", back.model, back.optimizer)
    for other in (there, back):
        for name, each in other.decoded.items():
            assert torch.equal(each, before[name]), f"{name} is another one after loading"
    assert back.train(3, 5) == run.train(3, 5), "it goes on bit for bit"
    with torch.no_grad():
        back.model.load_state_dict(
            {**back.model.state_dict(), "words.weight": run.frozen["words.weight"].decode()}
        )
    assert torch.equal(back.frozen["words.weight"].decode(), run.frozen["words.weight"].decode()), "plain weights"


@takes(60)
@ranks(3)
def test_each_rank_stores_a_third_and_computes_as_one_process(tmp_path: Path) -> None:
    fd.init()
    compare("int8", {"recompute": "blocks"}, 3, tmp_path)
    compare("int4", {}, 3, tmp_path)
    run = Run({"zero": 3, "frozen_codec": "int8", "weight_codec": "int8"})
    run.train(0, 1)
    parts = [part for each in run.frozen.values() for part in each.parts.values()]
    assert not any(isinstance(part, DTensor) for part in parts), "whole where parameters travel packed"
    with pytest.raises(RuntimeError, match="would change a frozen weight"):
        run.frozen["words.weight"].mul_(2)


def adapted_gpt2() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = gpt2().requires_grad_(False)
    return model, torch.optim.Adam(fd.low_rank_adapters(model, ["*.attn.*", "*.mlp.*"], rank=2), 0.01)


@takes(60)
@ranks(2)
def test_gpt_2_whose_weights_are_transposed_trains_as_with_the_decoded_ones() -> None:
    fd.init()
    model, optimizer = adapted_gpt2()
    fd.distribute(model, optimizer, Plan(zero=3, frozen_codec="int4", recompute="blocks"))
    stored = {n for n, each in model.named_parameters() if isinstance(each, FrozenWeight)}
    assert sum("attn" in name or "mlp" in name for name in stored) == 8, f"of two blocks with four each: {stored}"
    plain, by_hand = adapted_gpt2()
    for name, each in plain.named_parameters():
        if name in stored:
            each.data = FrozenWeight.encode(each, "int4").decode()
    for step in range(3):
        tokens, targets = language_batch(step)
        pairs = ((model, optimizer, own(tokens), own(targets)), (plain, by_hand, tokens, targets))
        for trained, its_optimizer, x, y in pairs:
            its_optimizer.zero_grad()
            functional.cross_entropy(trained(x).logits.flatten(0, 1), y.flatten()).backward()
            its_optimizer.step()
    for name, each in plain.named_parameters():
        if each.requires_grad:
            torch.testing.assert_close(whole(model.get_parameter(name)), each, rtol=1e-4, atol=1e-5, msg=name)


@takes(60)
@ranks(4, **TWO_HOSTS)
def test_hybrid_stores_a_half(tmp_path: Path) -> None:
    pretend_two_hosts()
    fd.init()
    compare("int8", {"shard_within": "host"}, 2, tmp_path)
