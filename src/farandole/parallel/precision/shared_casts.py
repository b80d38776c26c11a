"""Which casts of weights autocast keeps, and for how long.

Autocast keeps the cast of a weight until its outermost context ends, so that a weight used twice is cast once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_sharing: list[str] = []
"""The devices of the `shared_casts` that are open."""


@contextmanager
def shared_casts(device: str) -> Iterator[None]:
    """Let passes under autocast that begin inside use one cast of each weight: micro-batches of one step.

    Their graphs keep it until backward, and without this each would keep a copy of its own. No weight may change
    inside. The context is that of the caller: whether autocast is on stays as it is.
    """
    _sharing.append(device)
    try:
        is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=torch.is_autocast_cache_enabled()):
            yield
    finally:
        _sharing.pop()


@contextmanager
def own_casts() -> Iterator[None]:
    """Let casts that are made inside end with it, though autocast goes on.

    Where they are shared, none is kept at all, because torch drops all or none: a weight is cast at each use then.
    """
    before = torch.is_autocast_cache_enabled()
    if _sharing:
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        if not _sharing:
            torch.clear_autocast_cache()
