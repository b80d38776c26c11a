"""What a front end tells its engine: how gradients are to meet, and what travels with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ...core.vocabulary.errors import CommError


class ExtraTensors(Protocol):
    """Something small that travels with every exchange, launched before the first bucket."""

    def settle(self) -> None:
        """Agree with all ranks on what will travel; called once, in the first pass."""

    def load(self, weight: float) -> torch.Tensor | None:
        """Return the tensor to sum over the ranks in place, or None when there is nothing to send.

        Its size must be the same on all ranks in every exchange.
        """

    def land(self) -> None:
        """Take the sum."""


def _as_it_is(problem: CommError) -> Exception:
    return problem


def _say_nothing() -> None:
    return None


@dataclass(frozen=True)
class ReducerOptions:
    """How a front end wants its engine to behave; see `DEFAULT_OPTIONS`."""

    connect_late: bool = False
    """Talk to the other ranks in the first exchange, not in the constructor."""
    before_connecting: Callable[[], None] = _say_nothing
    """Called before the first word to the other ranks."""
    add_up: bool = False
    """Gradients become the sum over the ranks, not the mean."""
    keep_members: bool = False
    """Who required a gradient in the constructor takes part from the first exchange on, frozen or not."""
    too_many: Callable[[str], Exception | None] | None = None
    """Makes the error for a parameter's second gradient between two calls of `begin_step`; None: it is fine."""
    translate: Callable[[CommError], Exception] = _as_it_is
    """What is raised in a backward pass for a failure of communication."""


DEFAULT_OPTIONS = ReducerOptions()
"""What `fd.distribute` needs."""
