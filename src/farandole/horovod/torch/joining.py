"""What a rank does between its own ``join()`` and that of the last rank, for gradients that lie in buckets.

Named operations are answered with zeros by the negotiation. Buckets are not named: a rank that has joined keeps
taking part in the others' exchanges, with zeros, and must be told when there will be no more.

[Note: the last one says so] The engine tells a rank that joins whether it is the last; see
[Note: the place of a join] there. Whoever is not takes part in one exchange after the other, and between two of
them looks into the store whether the end was announced. The last one announces, for each path, the number of an
exchange that is still to come, and takes part in it, with zeros, too: the others have begun it or will find the
announcement before they do. Ranks that train pay nothing for this.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from ...comm.world import World, world
from ...core.errors import CommError


class Served(Protocol):
    """Gradients that all ranks must exchange together."""

    world: World

    @property
    def number(self) -> int | None:
        """Which path of its world it is, the same on all ranks; None before its first exchange."""

    @property
    def is_open(self) -> bool:
        """Whether gradients still meet."""

    @property
    def exchanges_done(self) -> int:
        """How many exchanges all ranks took part in."""

    def exchange_nothing(self) -> None:
        """Take part in the next exchange with zeros."""

    def reset(self) -> None:
        """Forget what is pending."""


_served: weakref.WeakSet[Served] = weakref.WeakSet()


def serve_while_joined(path: Served) -> None:
    """Let `path` be served by `Joining` for as long as it lives."""
    _served.add(path)


class Joining:
    """One rank's way out."""

    def __init__(self, is_last: bool) -> None:
        """To be made once for each join of all ranks. `is_last`: all others have joined."""
        self.world = world()
        self._prefix = self.world.topic("join gradients")
        self._is_last = is_last

    def serve(self) -> None:
        """Answer the other ranks' exchanges of gradients with zeros until all have joined.

        Raises `CommError` when a rank is lost, and when two optimizers have not exchanged anything yet: nobody
        could tell which is meant.
        """
        if self.world.store is None:
            return
        if len(_served):
            gc.collect()  # a model that is gone on one rank must not be waited for by another
        paths = [path for path in _served if path.world is self.world and path.is_open]
        fresh = sum(path.number is None for path in paths)
        if fresh > 1:
            raise CommError(
                f"{fresh} distributed optimizers have not made a step yet",
                rank=self.world.rank,
                operation="join",
                remedy="join after every optimizer has made its first step on this rank",
            )
        if self._is_last:
            _announce_the_end(self.world, self._prefix, paths)
        else:
            _serve_all(self.world, self._prefix, paths)
        for path in paths:
            path.reset()


def _announce_the_end(here: World, prefix: str, paths: Sequence[Served]) -> None:
    assert here.store is not None, "several ranks"
    here.store.set(f"{prefix}/end", json.dumps({_name(path): path.exchanges_done + 1 for path in paths}))
    for path in paths:
        path.exchange_nothing()


def _serve_all(here: World, prefix: str, paths: Sequence[Served]) -> None:
    if len(paths) <= 1:
        for path in paths:
            _serve(here, prefix, path)
        return
    # The others use their optimizers in an order that this rank does not know.
    with ThreadPoolExecutor(len(paths), thread_name_prefix="farandole-join") as threads:
        for future in [threads.submit(_serve, here, prefix, path) for path in paths]:
            future.result()


def _serve(here: World, prefix: str, path: Served) -> None:
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    while path.exchanges_done < _end(here, prefix, path):
        path.exchange_nothing()


def _end(here: World, prefix: str, path: Served) -> int:
    """Return up to which exchange to take part: one more while nobody has announced the end."""
    assert here.store is not None, "several ranks"
    if not here.store.check([f"{prefix}/end"]):
        return path.exchanges_done + 1
    end = json.loads(here.store.get(f"{prefix}/end")).get(_name(path))
    if end is None:
        raise CommError(
            f"distributed optimizer {_name(path)} is alive on this rank but not on the last rank that joined",
            rank=here.rank,
            operation="join",
            remedy="make and drop distributed optimizers on all ranks alike",
        )
    return int(end)


def _name(path: Served) -> str:
    """Return what a path is called on all ranks; a new one is the only one."""
    return "new" if path.number is None else str(path.number)
