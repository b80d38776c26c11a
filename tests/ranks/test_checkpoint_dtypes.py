"""Checkpoints of several dtypes and odd sizes: every tensor has an aligned place in the writer's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import farandole as fd
from farandole.checkpoint.listing import verify_checkpoint
from farandole.checkpoint.shard_file import ITEM_BYTES
from tests.ranks.pool import ranks


class Odd(nn.Module):
    """BatchNorm of three features, and of every dtype a buffer of three elements, and an empty one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        generator = torch.Generator().manual_seed(seed)
        for dtype, item_bytes in sorted(ITEM_BYTES.items()):
            high = 2 if dtype == "bool" else 256
            content = torch.randint(0, high, (3 * item_bytes,), generator=generator, dtype=torch.uint8)
            self.register_buffer(f"none_of_{dtype}", content.view(getattr(torch, dtype))[:0])
            self.register_buffer(f"of_{dtype}", content.view(getattr(torch, dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x))
        return out


def bits(module: nn.Module) -> dict[str, bytes]:
    return {
        name: each.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if each.numel() else b""
        for name, each in module.state_dict().items()
    }


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(1, 2)
def test_tensors_of_every_dtype_and_odd_sizes_are_saved_and_loaded(tmp_path: Path) -> None:
    here = fd.init()
    model: Any = Odd(1)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
    fd.distribute(model, optimizer)
    train(model, optimizer, 2)
    fd.save(tmp_path / "once", model, optimizer, step=2)
    checkpointer = fd.Checkpointer(tmp_path / "while", model, optimizer)
    assert checkpointer.save(2), "the asynchronous save has begun"
    expected = bits(model)
    train(model, optimizer, 1)
    checkpointer.close()
    for name in ("once", "while"):
        manifest = verify_checkpoint(tmp_path / name, 2)
        assert {each.dtype for each in manifest.tensors.values()} == set(ITEM_BYTES), "every dtype is in it"
        for entry in manifest.tensors.values():
            begins = [piece.begin % ITEM_BYTES[entry.dtype] for piece in entry.pieces]
            assert not any(begins), f"a piece of {entry.dtype} is not aligned"
        again: Any = Odd(2)
        its_optimizer: Any = torch.optim.Adam(again.parameters(), 0.01)
        fd.distribute(again, its_optimizer)
        assert fd.load(tmp_path / name, again, its_optimizer) == 2
        found = bits(again)
        different = [each for each in expected if found[each] != expected[each]]
        assert not different, f"{name} on {here.size} ranks: other bits of {different}"
