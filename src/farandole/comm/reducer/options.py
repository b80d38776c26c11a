"""How a front end configures its reducer: when ranks connect, what the result is, what travels along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...core.vocabulary.errors import CommError


class ExtraTensors(Protocol):
    """Something small that travels with every exchange, launched before the first bucket."""

    def prepare(self) -> bool:
        """Agree with all ranks on what will travel, and return whether anything will.

        Called once, in the first pass.
        """

    def pack(self, weight: float) -> torch.Tensor:
        """Return the tensor to sum over the ranks in place, of the same shape on all ranks in every exchange.

        `weight`: this rank's share of the samples.
        """

    def unpack(self) -> None:
        """Take the sum."""


def _unchanged(problem: CommError) -> Exception:
    return problem


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class ReducerOptions:
    """What differs between front ends; see `DEFAULT_OPTIONS`."""

    model: str = "this model"
    """What notices call it, such as the class of the model."""
    lazy_init: bool = False
    """Connect to the other ranks in the first exchange, not in the constructor."""
    before_connecting: Callable[[], None] = _nothing
    """Called before the first message to the other ranks."""
    reduce_op: Literal["mean", "sum"] = "mean"
    """What gradients become over the ranks."""
    is_compared: bool = False
    """Whether the parameters are known to be the same on all ranks."""
    include_frozen: bool = False
    """Exchange all parameters that required a gradient in the constructor, frozen since or not."""
    on_second_gradient: Callable[[str], Exception | None] | None = None
    """Makes the error for a parameter's second gradient between two calls of `begin_step`; None: it is fine."""
    mesh: DeviceMesh | None = None
    """All ranks, to which the rows of gradients are divided; None: every rank gets all of them."""
    map_error: Callable[[CommError], Exception] = _unchanged
    """What is raised in a backward pass for a failure of communication."""


DEFAULT_OPTIONS = ReducerOptions()
"""What `fd.distribute` needs."""
