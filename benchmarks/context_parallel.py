"""Attention over a long sequence on two ranks beside one rank alone: time and what forward keeps for backward.

    farandole run -np 2 --quiet -- python benchmarks/context_parallel.py

Causal attention of 8,192 tokens (width 256, 4 heads, float32), forward and backward, one thread a rank, as the
loop has it: `fd.context_shard`, loss, backward. ``ring`` and ``heads`` are the values of the plan's key
`context_kind`. They take turns sample by sample; a sample's time is that of the slowest rank. Before and after
them rank 0 alone computes the whole, while the other waits in the kernel. Memory is what the attention function
and its exchanges keep for backward (queries, keys, values, output, logarithms of sums), on the rank with most;
``block`` adds the projections around it. torch's own `context_parallel` has no kernel on the CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import farandole as fd
from shared import alone, median_ms, paired, read_options, report, slowest_in_turns


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        query, key, value = self.before(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with self.around():
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.after(seen.transpose(1, 2).flatten(2))
        return out


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return output.square().mean()


class Kept:
    """Counts the storages that are kept for backward, but those of `parameters`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._kept: list[torch.Tensor] = []

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which what is kept is counted."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)  # its address is its own until it is counted
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self._kept}
        return sum(nbytes for pointer, nbytes in found.items() if pointer not in self._known)


def kept_bytes(run: Callable[[], torch.Tensor], model: Attention) -> dict[str, int]:
    """Return what one forward pass keeps: of the attention alone, and of the block."""
    attention, block = Kept([]), Kept(model.parameters())
    model.around = attention.hooks
    run().backward()
    model.around = nullcontext
    with block.hooks():
        loss = run()
    loss.backward()
    return {"attention": attention.nbytes, "block": block.nbytes}


def main() -> None:
    arguments = read_options(__doc__, tokens=8192, width=256, heads=4, samples=12)
    torch.set_num_threads(1)
    world: Any = fd.init()
    x = torch.randn(1, arguments.tokens, arguments.width, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    whole = Attention(arguments.width, arguments.heads)

    def loss_of_whole() -> torch.Tensor:
        return mean_square(whole(x))

    def divided(kind: Literal["heads", "ring"]) -> Callable[[], torch.Tensor]:
        torch.manual_seed(0)
        model = Attention(arguments.width, arguments.heads)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        models[kind] = model
        model, optimizer = fd.distribute(model, optimizer, fd.Plan(context=world.size, context_kind=kind))

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            return mean_square(model(fd.context_shard(x)))

        return loss

    models: dict[str, Attention] = {}
    kinds: tuple[Literal["heads", "ring"], ...] = ("heads", "ring")
    losses = {kind: divided(kind) for kind in kinds}
    steps = {kind: (lambda loss=loss: loss().backward()) for kind, loss in losses.items()}
    for step in steps.values():
        step()  # compares the divided model with the whole one
    kept = {kind: kept_bytes(loss, models[kind]) for kind, loss in losses.items()}
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, kept)
    own = kept_bytes(loss_of_whole, whole)
    shares = {
        kind: {what: round(max(each[kind][what] for each in gathered) / nbytes, 3) for what, nbytes in own.items()}
        for kind in kept
    }

    def step_of_whole() -> None:
        whole.zero_grad()
        loss_of_whole().backward()

    before = alone(step_of_whole, arguments.samples // 2, world)
    times = slowest_in_turns(steps, arguments.samples)
    after = alone(step_of_whole, arguments.samples // 2, world)
    if world.rank:
        return
    single = statistics.median(before + after)
    found: dict[str, Any] = {
        "tokens": arguments.tokens,
        "one rank, ms": median_ms(before + after),
        "one rank, before and after, ms": [median_ms(each) for each in (before, after)],
        "one rank keeps, MiB": {what: round(nbytes / 2**20, 2) for what, nbytes in own.items()},
    }
    for kind, values in times.items():
        ratio, interval = paired([single] * len(values), values)
        found[kind] = {
            "ms": median_ms(values),
            "speedup": ratio,
            "interval": interval,
            "keeps, of what one rank keeps": shares[kind],
        }
    report(found, indent=1)


if __name__ == "__main__":
    main()
