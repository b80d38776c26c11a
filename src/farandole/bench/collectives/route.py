"""What a route is, for ``farandole bench collectives``: a way for ranks to reduce and gather a tensor.

A route makes, for the world it is in, one callable for each operation it knows. That callable takes the whole
tensor, float32 and one-dimensional, its length a multiple of the number of ranks, and returns the tensor with
the result:

- all_reduce: the sum over the ranks, in place or where the route has it;
- reduce_scatter: this rank's part of the sum (the input may be overwritten);
- all_gather: the whole, of which this rank's part was given in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measure.intervals import NotMeasurable

if TYPE_CHECKING:
    import torch

    from ...comm.world.world import World

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
Run = Callable[["torch.Tensor"], "torch.Tensor"]
Make = Callable[["World"], Run]


@dataclass(frozen=True)
class CollectiveRoute:
    """A way to exchange. None: it has no such operation."""

    what: str
    all_reduce: Make
    reduce_scatter: Make | None = None
    all_gather: Make | None = None

    def make(self, operation: str, world: World) -> Run:
        """Return the callable of `operation`; raise `NotMeasurable` when there is none here."""
        make: Make | None = getattr(self, operation)
        if make is None:
            raise NotMeasurable(f"has no {operation}")
        return make(world)
