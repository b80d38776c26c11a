"""Weights under `precision = "bf16"`: cast by shard at stage 3, once a step in a pipeline, for a block alone."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

import farandole as fd
from tests.ranks.pool import ranks, takes
from tests.ranks.sharded_cases import full

WIDTH, WORDS = 16, 24
MATRICES = ("attention.in_proj_weight", "attention.out_proj.weight", "up.weight", "down.weight", "mix.weight")


class Mixing(nn.Module):
    """Products by layers, and weights of layers that are read beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.router, self.unused = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):
            share = linear(x.float(), self.router.weight).softmax(-1)
            x = x + 0.1 * self.router(x.float()).mean()
        x = x + self.down(torch.relu(self.up(x))) * share[..., :1]
        return x + self.up.weight.square().mean()


class Model(nn.Module):
    def __init__(self, block: Any = Mixing) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def train(
    plan: dict[str, Any], *, held: int = 0, compiles: bool = False, adam: bool = True, frozen: str = ""
) -> dict[str, torch.Tensor]:
    """Return the parameters after some steps; `held`: passes of a step inside `fd.accumulate`."""
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.01) if adam else torch.optim.SGD(trained, 0.1)
    fd.distribute(model, optimizer, fd.Plan(precision="bf16", **plan))
    if compiles:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    rank, passes = fd.world().rank, held + int(plan.get("accumulate", 1))
    for step in range(3):
        optimizer.zero_grad()
        for number in range(passes):
            tokens = batch_of(passes * step + number, rank)
            if number < held:
                with fd.accumulate():
                    (loss_of(model(tokens), tokens) / passes).backward()
            else:
                (loss_of(model(tokens), tokens) / passes).backward()
        optimizer.step()
        with torch.no_grad():
            model(batch_of(50, rank))
    return full(model)


@ranks(2)
def test_stage_3_has_the_bits_of_stage_0() -> None:
    """What is cast and gathered is what autocast casts; another read of a weight has float32, and its gradient."""
    fd.init()
    expected = train({})
    for keys in ({}, {"recompute": "blocks"}, {"shard": 2}):
        found = train({"zero": 3, **keys})
        for name, each in expected.items():
            assert torch.equal(found[name], each), (keys, name, (found[name] - each).abs().max())


@pytest.mark.full("slow")
@ranks(2, 3)
@takes(60)
def test_passes_and_what_is_frozen() -> None:
    """Sums of more passes and ranks are taken in another order, in float32."""
    fd.init()
    for keys, options in (
        ({}, {"held": 1}), ({"clip_norm": 0.1}, {}), ({}, {"frozen": "up"}), ({"accumulate": 2}, {}),
    ):  # fmt: skip
        expected, found = train({**keys}, **options), train({"zero": 3, **keys}, **options)
        for name, each in expected.items():
            assert torch.allclose(found[name], each, rtol=0, atol=2e-4), (keys, options, name)


@pytest.mark.full("slow")
@ranks(2)
@takes(90)
def test_compiled_blocks_train_as_others() -> None:
    fd.init()
    expected = train({}, adam=False)
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):  # of the graphs that reads beside products break
        found = train({"zero": 3}, compiles=True, adam=False)
    for name, each in expected.items():
        assert torch.allclose(found[name], each, rtol=0, atol=1e-3), (name, (found[name] - each).abs().max())


@ranks(2)
def test_backward_keeps_no_16_bit_copy() -> None:
    """The matrices of blocks are 16 bits while a block runs, and nothing of them is left until backward."""
    fd.init()
    model = Model()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(precision="bf16", zero=3))
    types: dict[str, torch.dtype] = {}
    saved: list[torch.Tensor] = []

    block = model.blocks[1]

    def note(*_: Any) -> None:
        types.update({name: each.dtype for name, each in block.named_parameters()})

    block.get_submodule("norm").register_forward_hook(note)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16:
            saved.append(tensor)
        return tensor

    tokens = batch_of(0, fd.world().rank)
    for _ in range(2):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(model(tokens), tokens)
        matrices = {tuple(each.shape) for name, each in Model().blocks.named_parameters() if each.dim() > 1}
        weights = [each for each in saved if {tuple(each.shape), tuple(each.shape[::-1])} & matrices]
        assert len(weights) >= 3 * len(MATRICES) - 3, "they are saved by reference"
        assert not any(each.untyped_storage().nbytes() for each in weights)
        loss.backward()
    assert {name for name, each in types.items() if each == torch.bfloat16} >= {*MATRICES}
    assert types["norm.weight"] == types["up.bias"] == torch.float32
    assert all(each.dtype == torch.float32 for each in model.parameters()), "masters"


class Clipping(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@ranks(2)
def test_a_weight_that_forward_changes_in_place_is_refused() -> None:
    """What it changes is a copy, gathered for the read."""
    fd.init()
    model = Model(Clipping)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(precision="bf16", zero=3))
    with pytest.raises(fd.ConfigError, match=r"changes 'blocks.0.up.weight'.* in place"):
        model(batch_of(0, fd.world().rank))


@ranks(2)
def test_tensors_that_stand_for_a_weight_are_read_as_they_are() -> None:
    fd.init()
    model = Model(Plain)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(precision="bf16", zero=3))
    layer: Any = model.blocks[0].get_submodule("up")
    other = torch.ones(layer.weight.shape, dtype=torch.bfloat16)
    with torch.no_grad():
        found = torch.func.functional_call(layer, {"weight": other, "bias": other[:, 0]}, (other[:1],))
    assert torch.equal(found, torch.full_like(found, WIDTH + 1))
    assert not hasattr(layer, "in_proj_weight")
    del layer.weight
    assert not hasattr(layer, "weight")


class _Casts(TorchDispatchMode):
    """Notes casts of the blocks' matrices to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_cast = function is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if is_cast and result.shape in ((2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)):
            self.storages.append(weakref.ref(result.untyped_storage()))
        return result

    def alive(self) -> int:
        return sum(each() is not None for each in self.storages)


@pytest.mark.gate_cases("zb-v", "1f1b")
@ranks(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_micro_batches_share_the_cast_of_a_weight(schedule: str) -> None:
    fd.init()
    model = Model(Plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    keys: dict[str, Any] = {"pipeline": 2, "micro_batches": 4, "schedule": schedule}
    fd.distribute(model, optimizer, fd.Plan(precision="bf16", **keys))
    tokens = batch_of(0, 0)
    for step in range(3):
        with _Casts() as casts:
            fd.step(model, loss_of, tokens, tokens)
        optimizer.step()
        optimizer.zero_grad()
        if step:
            here = sum(each.numel() == 2 * WIDTH**2 for each in model.parameters())
            assert len(casts.storages) == here > 0, "one a weight, and not one a micro-batch"


def test_a_block_that_is_computed_again_leaves_no_casts() -> None:
    """Autocast keeps them until the whole model has run, for weights that are used again."""
    fd.init()
    cases: list[tuple[Any, int]] = [(("blocks.0", "blocks.1"), 2), ("none", 6)]
    for keys, left in cases:
        model = Model(Plain)
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(precision="bf16", recompute=keys))
        with _Casts() as casts:
            alive: list[int] = []
            model.head.register_forward_pre_hook(lambda *_, casts=casts, alive=alive: alive.append(casts.alive()))
            loss_of(model(batch_of(0, 0)), batch_of(0, 0)).backward()
        assert alive == [left], keys
