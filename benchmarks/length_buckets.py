"""What batches of about equal length save: padding, and the wait for the slowest rank, counted and not timed.

python benchmarks/length_buckets.py [--ranks 4] [--batch-size 16] [--longest 1024]

The text is that of `farandole demo`, the source of Python's standard library. Its samples are the paragraphs
(lines between empty lines), a token is a byte, and longer ones are cut. One epoch is divided over the ranks in
three ways: shuffled, with `fd.shard(lengths=...)`, and with `max_tokens=` of as many padded tokens as a random
batch has on average. A rank's work in a step is its samples times the longest of them. The slowest rank's work
over that of the mean rank is of sums over all steps: how much longer the epoch is than with equal ranks, if time
goes by padded tokens. Nothing is random: the same Python gives the same figures.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from farandole.bench.data import LEFT_OUT
from farandole.core.vocabulary.text import format_table
from farandole.train.data.length_buckets import Arranged, Cut, LengthBuckets
from farandole.train.data.partition import Partition
from shared import read_options

LEAST_BYTES = 16
"""Shorter paragraphs are no samples."""


class Work(NamedTuple):
    """One epoch, in padded tokens."""

    steps: int
    of_all: int
    of_slowest: int
    """Summed over the steps."""


def main() -> None:
    """Print the table."""
    arguments = read_options(
        __doc__, ranks=4, batch_size=(16, "of one rank"), longest=(1024, "tokens of a sample")
    )
    ranks, batch = arguments.ranks, arguments.batch_size
    lengths = read_lengths(arguments.longest)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    tokens = int(lengths.sum())
    mean = tokens / len(lengths)
    print(f"{len(lengths)} samples, {tokens} tokens, {mean:.0f} on average, at most {arguments.longest}")
    random = count(Arranged(order, None), lengths, ranks, batch * ranks)
    budget = max(random.of_all // random.steps // ranks, arguments.longest)

    def with_buckets(cut: Cut) -> Work:
        return count(LengthBuckets(lengths, cut).arrange(order, 0), lengths, ranks, cut.multiple)

    epochs = {
        "shuffled": random,
        "lengths=": with_buckets(Cut(batch * ranks, 0)),
        f"max_tokens={budget}": with_buckets(Cut(ranks, budget)),
    }
    rows = []
    for name, work in epochs.items():
        padding, ratio = 1 - tokens / work.of_all, work.of_slowest * ranks / work.of_all
        cells = f"{work.steps}", f"{padding:.1%}", f"{ratio:.3f}", f"{work.of_slowest}"
        rows.append([name, *cells, f"{work.of_slowest / random.of_slowest:.1%}"])
    print(format_table(["", "steps", "padding", "slowest/mean", "slowest rank, tokens", "of shuffled"], rows))


def read_lengths(longest: int) -> torch.Tensor:
    """Return the lengths of the paragraphs of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts[:-1]))
    pieces = [len(piece) for path in paths for piece in path.read_bytes().split(b"\n\n")]
    return torch.tensor([min(piece, longest) for piece in pieces if piece >= LEAST_BYTES])


def count(arranged: Arranged, lengths: torch.Tensor, ranks: int, whole: int) -> Work:
    """Count one epoch as `fd.shard` divides it."""
    order, sizes = arranged
    total, slowest, steps, begin = 0, 0, 0, 0
    division = [Partition(rank, ranks, whole) for rank in range(ranks)]
    for size in sizes or [min(whole, len(order) - first) for first in range(0, len(order), whole)]:
        parts = [partition.cut(begin, size) for partition in division]
        work = [len(part) * int(lengths[order[part.start : part.stop]].max()) for part in parts if part]
        total, slowest, steps, begin = total + sum(work), slowest + max(work), steps + 1, begin + size
    return Work(steps, total, slowest)


if __name__ == "__main__":
    main()
