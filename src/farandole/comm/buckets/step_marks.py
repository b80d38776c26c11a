"""Whether all ranks exchange gradients of the same step: a few numbers beside a bucket's presence flags.

[Note: one step off] A rank whose loss once did not reach the model exchanges nothing in that step. Its next
exchange would meet the others' old one, and from then on step k of one rank be added to step k + 1 of another.
So how many steps the rank's optimizers have made travels along, as bits: for each one number that is 1 where
the bit is set and one that is 1 where it is not. After the sum, of any type and however rounded, ranks differ
where both are more than 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.rank_lists import name_ranks
from ..world.store_sync import all_gather_json
from ..world.world import World

_BITS = 4
MARKS = 2 * _BITS
"""Numbers that travel."""


@cache
def _pattern(steps: int) -> torch.Tensor:
    bits = [float(steps >> i & 1) for i in range(_BITS)]
    return torch.tensor([each for bit in bits for each in (bit, 1.0 - bit)], dtype=torch.float32)


def write_marks(marks: torch.Tensor, steps: int | None) -> None:
    """Write how many steps this rank has made; None: a rank that makes none, and agrees with all."""
    if steps is None:
        marks.zero_()
    else:
        marks.copy_(_pattern(steps % 2**_BITS))


def differ(marks: torch.Tensor) -> bool:
    """Return whether ranks have made different numbers of steps, given the sum."""
    said = (marks.real if marks.is_complex() else marks).tolist()
    return any(said[i] > 0 and said[i + 1] > 0 for i in range(0, MARKS, 2))


def refuse_difference_of_steps(world: World, steps: int, exchanges: int) -> None:
    """Raise `Mismatch` that names the ranks; to be called by all of them."""
    said: Sequence[int] = all_gather_json(world, "comparing optimizer steps", steps)
    parties = [
        f"{made} on {name_ranks([rank for rank, other in enumerate(said) if other == made])}"
        for made in sorted(set(said))
    ]
    raise Mismatch(
        f"gradients of different steps met in exchange {exchanges + 1}: optimizer steps made before it are "
        + ", ".join(parties),
        rank=world.rank,
        operation="all-reduce",
        remedy="in every step, the backward pass of every rank must reach the model (add 0 * model(x).sum() to a "
        "loss that does not), or no rank makes the step",
    )
