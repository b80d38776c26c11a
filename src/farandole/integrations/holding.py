"""Passes that a trainer accumulates: `fd.accumulate`, for those who enter it once for each of several models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.world.world import world
from ..train.accumulate import accumulate


@contextmanager
def holding_passes() -> Iterator[None]:
    """Keep the gradients of backward passes inside on this rank; inside another such context nothing changes."""
    if world().session.holds_passes:
        yield
        return
    with accumulate():
        yield
