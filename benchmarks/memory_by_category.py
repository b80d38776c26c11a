"""Bytes that a rank holds between backward and step, by category: a transformer of 25.5 million parameters, Adam.

    farandole run -np 2 --quiet --set zero=3 -- python benchmarks/memory_by_category.py
    farandole estimate benchmarks/memory_by_category.py:Model --input 1,128:int64 --optimizer adam --np 2

The storages of all tensors of the process are counted, each once: those of parameters, gradients and states, and
what else a training has made, such as buckets. Memory that another rank made, and that is mapped here to exchange
gradients, is that rank's. What autograd keeps is gone by then.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd

WIDTH, WORDS, LENGTH = 512, 256, 128
Training = tuple[nn.Module, torch.optim.Optimizer]


class Model(nn.Module):
    """Torch's own layers, of which tensor parallel divides every matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take words (batch, length), return logits (batch, length, words)."""
        logits: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return logits


def storages(tensors: Iterable[object]) -> dict[int, int]:
    """Return the bytes of the memory of tensors, by address."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    kept = [
        each.untyped_storage() for each in local if isinstance(each, torch.Tensor) and each.device.type == "cpu"
    ]
    return {each.data_ptr(): each.nbytes() for each in kept}


def all_storages() -> dict[int, int]:
    """Return those of all tensors of this process; what a DTensor has is a tensor itself."""
    gc.collect()
    kinds = ((each, type(each)) for each in gc.get_objects())
    return storages(
        each for each, kind in kinds if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor)
    )


def of_other_ranks() -> list[range]:
    """Return the addresses of memory that other ranks of this host made for all."""
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        if each.is_symlink() and "memfd:farandole" in str(each.readlink()):
            own.add(each.stat().st_ino)
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if "memfd:farandole" in line and int(inode) not in own:
            begin, end = (int(each, 16) for each in addresses.split("-"))
            found.append(range(begin, end))
    return found


def train() -> Training:
    """Train two steps, and go on to the end of the third backward pass."""
    fd.seed(0)
    model: nn.Module = Model()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    model, optimizer = fd.distribute(model, optimizer)
    generator = torch.Generator().manual_seed(fd.world().sample_rank)
    for step in range(3):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        tokens = torch.randint(WORDS, (1, LENGTH), generator=generator)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return model, optimizer


def main() -> None:
    torch.set_num_threads(1)
    fd.init()
    train()
    before = all_storages()
    model, optimizer = train()
    after = all_storages()
    found = {
        "weights": storages(model.parameters()),
        "gradients": storages(each.grad for each in model.parameters()),
        "optimizer": storages(value for each in optimizer.state.values() for value in each.values()),
    }
    known = {address for each in found.values() for address in each} | before.keys()
    others = of_other_ranks()
    found["exchange"] = {
        at: size for at, size in after.items() if at not in known and not any(at in each for each in others)
    }
    sizes = {name: sum(each.values()) / 1e6 for name, each in found.items()}
    fd.print(", ".join(f"{name} {size:.1f} MB" for name, size in {**sizes, "total": sum(sizes.values())}.items()))


if __name__ == "__main__":
    main()
