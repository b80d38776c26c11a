"""Trainings of models with repeated blocks, beside one process on the joined batch: for ZeRO stage 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.spec import Plan
from farandole.train.verify.verify import fingerprint
from tests.ranks.reference import own

WORDS, WIDTH, SAMPLES = 24, 10, 24


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 14), nn.Tanh(), nn.Linear(14, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.layers(self.norm(x))
        return found


class Words(nn.Module):
    """Words in, the next word out."""

    def __init__(self, *, is_tied: bool = False, unused: bool = False, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.words.weight
            self.blocks[2].layers[0].weight = self.blocks[0].layers[0].weight  # type: ignore[index, union-attr]
        if unused:
            self.blocks[1].aside = nn.Linear(3, 3)
            self.aside = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


@dataclass(frozen=True)
class Case:
    """What is special about a training."""

    name: str = "plain"
    plan: tuple[tuple[str, Any], ...] = ()
    is_tied: bool = False
    unused: bool = False
    frozen: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    micro: int = 1
    """Backward passes a step."""
    clip: float | None = None

    def model(self) -> Words:
        model = Words(is_tied=self.is_tied, unused=self.unused).to(self.dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen) if self.frozen else True)
        return model


CASES = [
    Case(),
    Case("accumulation", plan=(("accumulate", 2),), micro=2),
    Case("clipping", plan=(("clip_norm", 0.3),), clip=0.3),
    Case("frozen", frozen=("blocks.1", "words", "blocks.2.norm")),
    Case("tied", is_tied=True),
    Case("unused", unused=True),
    Case("bf16", dtype=torch.bfloat16),
    Case("all", plan=(("accumulate", 2), ("clip_norm", 0.3)), micro=2, clip=0.3, is_tied=True, unused=True),
]
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


def batches(steps: int, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return joined batches of words and next words."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(WORDS, (SAMPLES, 4), generator=generator) for _ in "xy") for _ in range(steps)]  # type: ignore[misc]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with whole tensors."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def require_close(mine: nn.Module, reference: nn.Module, what: str, rtol: float) -> None:
    """Parameters are those of one process, and the same bits on all ranks.

    Where bfloat16 rounds a gradient of about 0 to the other side, Adam goes a learning rate the other way: there
    tensors are compared as a whole.
    """
    expected, found = reference.state_dict(), full(mine)
    assert list(found) == list(expected), f"{what}: other names"
    for name, value in found.items():
        if value.dtype == torch.float32:
            wanted = expected[name]
            error = float((value - wanted).abs().sub(rtol * wanted.abs()).max())
            assert error <= rtol / 10, f"{what}: {name} is {error:.3g} beyond rounding"
        else:
            error = (value - expected[name]).float().norm() / expected[name].float().norm()
            assert error < rtol, f"{what}: {name} is {error:.3g} away"
    prints = all_gather_json(fd.world(), "test/full", {n: fingerprint(t) for n, t in found.items()})
    assert all(each == prints[0] for each in prints), f"{what}: ranks differ"


def check(case: Case, make: Make, shard_within: str, steps: int = 5) -> None:
    """Train by the plan and in one process, and compare losses, gradients' places and parameters."""
    what = f"{case.name}, {shard_within}"
    reference, model = case.model(), case.model()
    plain, optimizer = make(reference.parameters()), make(model.parameters())
    plan = Plan.from_mapping({"zero": 3, "shard_within": shard_within, **dict(case.plan)}, where="test")
    fd.distribute(model, optimizer, plan)
    rtol = 1e-5 if case.dtype == torch.float32 else 5e-2
    for x, y in batches(steps):
        plain.zero_grad(), optimizer.zero_grad()
        expected = mine = 0.0
        for xs, ys in zip(x.chunk(case.micro), y.chunk(case.micro), strict=True):
            loss = loss_of(reference, xs, ys) / case.micro
            loss.backward()
            expected += loss.item()
            loss = loss_of(model, own(xs), own(ys)) / case.micro
            loss.backward()
            mine += float(fd.mean(loss.detach()))
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), case.clip)
        plain.step(), optimizer.step()
        assert abs(mine - expected) <= rtol * abs(expected), f"{what}: loss {mine}, expected {expected}"
        have = {name for name, each in model.named_parameters() if each.grad is not None}
        should = {name for name, each in reference.named_parameters() if each.grad is not None}
        assert have == should, f"{what}: gradients of {have ^ should}"
    require_close(model, reference, what, rtol)
