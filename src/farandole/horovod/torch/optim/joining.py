"""What a rank does between its own ``join()`` and that of the last rank, for gradients that lie in buckets.

Named operations are answered with zeros by the negotiation. Buckets are not named: a rank that has joined keeps
taking part in the others' exchanges, with zeros, and must be told when there will be no more.

[Note: the last one says so] The engine tells a rank that joins whether it is the last; see
[Note: the place of a join] there. Another rank takes part in one exchange after the other, and between two of
them looks into the store whether the end was announced. The last one announces, for each path, the number of an
exchange that is still to come, and takes part in it, with zeros, too: the others have begun it or will find the
announcement before they do. Ranks that train pay nothing for this.

[Note: paths that are not connected] A path connects in its first exchange, and only ranks that train know which
path that will be. So its name is announced before it connects. A rank that has joined connects what was named, and
nothing else; the last one says nothing of paths that it has not connected: no rank has.
"""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ....comm.device.accelerator import set_device
from ....comm.world.comm_errors import translated
from ....comm.world.store_sync import all_gather_json
from ....comm.world.world import World, world
from ....core.vocabulary.errors import CommError, ConfigError, Mismatch, Stalled
from ....core.vocabulary.text import name_ranks
from ...common.basics import basics
from ...common.exceptions import from_comm_error
from ...common.operations import operation_names, set_number
from ...common.process_sets import ProcessSet, global_process_set
from ...named_ops.operations import JoinTicket, Request
from ..ops.handles import handles, synchronize

_LONGEST_NAP_SECONDS = 0.02
_JOINS = "join gradients"
_CONNECTIONS = "gradients that connect"
_ALIKE = "make, use and drop distributed optimizers on all ranks alike"


class Served(Protocol):
    """Gradients that all ranks must exchange together."""

    world: World

    @property
    def name(self) -> str:
        """What it is called, the same on all ranks, connected or not."""

    @property
    def is_connected(self) -> bool:
        """Whether it has begun its first exchange."""

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


@dataclass
class _Connected:
    """How many paths have connected; the same on all ranks of a world."""

    count: int = 0


def serve_while_joined(path: Served) -> None:
    """Let `path` be served by `Joining` for as long as it lives."""
    _served.add(path)


def announce_connection(path: Served) -> None:
    """Say that `path` connects now. See [Note: paths that are not connected].

    Raises `Mismatch`, on all ranks, when one that has joined has no such path.
    """
    here = path.world
    if here.store is not None:
        with translated(here, "join"):
            here.store.set(_connection_key(here), path.name)
        _agree_on_connection(here, path.name)


def _connection_key(here: World) -> str:
    """Return where the name of the next path that connects is."""
    return f"{_CONNECTIONS}/{_connected(here).count}"


def _connected(here: World) -> _Connected:
    return here.session.keep(_Connected, _Connected)


def _agree_on_connection(here: World, name: str | None) -> None:
    _connected(here).count += 1
    names = all_gather_json(here, "connecting gradients", name)
    without = [rank for rank, each in enumerate(names) if each is None]
    if without:
        raise Mismatch(
            f"{name_ranks(without)} joined without the distributed optimizer that the others use now",
            rank=here.rank,
            operation="connecting gradients",
            remedy=_ALIKE,
        )


class _End(NamedTuple):
    """What the last rank that joins announces."""

    connections: int
    """How many paths had connected."""
    last_exchanges: dict[str, int]
    """By path."""


class Joining:
    """Implements `hvd.join` for one rank."""

    def __init__(self, ticket: JoinTicket) -> None:
        """To be made once for each join of all ranks."""
        self._world = world()
        self._ticket = ticket
        prefix = self._world.topic(_JOINS)
        self._number = int(prefix.rpartition("/")[2])
        self._end_key = f"{prefix}/end"

    def serve(self) -> None:
        """Answer the other ranks' exchanges of gradients with zeros until all have joined.

        Raises `CommError` when a rank is lost, and when ranks have other optimizers than this one.
        """
        is_last = self._ticket.is_last()
        if self._world.store is None:
            return
        if len(_served):
            gc.collect()  # a model that is gone on one rank must not be waited for by another
        paths = [path for path in _served if path.world is self._world and path.is_open]
        if is_last:
            self._announce_the_end([path for path in paths if path.is_connected])
        else:
            self._serve_all(paths)
        for path in paths:
            path.reset()

    def _announce_the_end(self, paths: Sequence[Served]) -> None:
        assert self._world.store is not None, "several ranks"
        last_exchanges = {path.name: path.exchanges_done + 1 for path in paths}
        with translated(self._world, "join"):
            self._world.store.set(self._end_key, json.dumps([_connected(self._world).count, last_exchanges]))
            if self._number:  # all have joined again, so all have read how the last one ended
                self._world.store.delete_key(f"{_JOINS}/{self._number - 1}/end")
        for path in paths:
            path.exchange_nothing()

    def _serve_all(self, paths: Sequence[Served]) -> None:
        if not paths:
            return
        fresh = {path.name: path for path in paths if not path.is_connected}
        # The others use their optimizers in an order that this rank does not know.
        with ThreadPoolExecutor(len(paths), thread_name_prefix="farandole-join") as threads:
            served = [threads.submit(self._serve, path) for path in paths if path.is_connected]
            while fresh and (name := self._wait_for_connection(served)) is not None:
                if name not in fresh:
                    _agree_on_connection(self._world, None)  # raises, on all ranks
                path = fresh.pop(name)
                path.exchange_nothing()
                served.append(threads.submit(self._serve, path))
            for each in served:
                each.result()

    def _serve(self, path: Served) -> None:
        set_device(self._world.device)
        while path.exchanges_done < self._last_exchange(path):
            path.exchange_nothing()

    def _last_exchange(self, path: Served) -> int:
        """Return up to which exchange to take part: one more while the end was not announced."""
        end = self._announced_end()
        if end is None:
            return path.exchanges_done + 1
        if path.name not in end.last_exchanges:
            raise CommError(
                f"a distributed optimizer ({path.name}) is alive here but not on the last rank that joined",
                rank=self._world.rank,
                operation="join",
                remedy=_ALIKE,
            )
        return end.last_exchanges[path.name]

    def _announced_end(self) -> _End | None:
        store = self._world.store
        assert store is not None, "several ranks"
        with translated(self._world, "join"):
            return _End(*json.loads(store.get(self._end_key))) if store.check([self._end_key]) else None

    def _wait_for_connection(self, served: Sequence[Future[None]]) -> str | None:
        """Return the name of the next path that a rank connects; None when all have joined, or one failed."""
        store = self._world.store
        assert store is not None, "several ranks"
        key = _connection_key(self._world)
        nap_seconds, deadline = 0.001, float("inf")
        while True:
            with translated(self._world, "join"):
                name = store.get(key).decode() if store.check([key]) else None
            end = self._announced_end()  # later: a path may have been named by who trains on after the end
            if end is not None and _connected(self._world).count >= end.connections:
                return None
            if name is not None:
                return name
            if any(each.done() for each in served):
                return None
            if self._ticket.done():  # the last one says the end next
                self._ticket.wait()
                deadline = min(deadline, time.monotonic() + self._world.timeout_seconds)
            if time.monotonic() > deadline:
                raise Stalled(
                    f"the last rank that joined did not say so within {self._world.timeout_seconds:g} s",
                    rank=self._world.rank,
                    operation="join",
                )
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)


# Where ranks wait for each other: join at the end of uneven data, and barriers.


def join(device: int = -1) -> int:
    """Mark this rank as out of data, and wait until all ranks have joined.

    Until then this rank contributes zeros to the allreduces of the others, whose Average still divides by the
    number of all ranks. Other operations raise an error on the other ranks meanwhile.

    Args:
        device: ignored; Horovod has this argument.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: a plan or a state that `join` does not support.
        HorovodInternalError: a rank is gone.
    """
    try:
        ticket = basics.running.engine.join()
        Joining(ticket).serve()  # gradients in buckets; the engine answers operations with names by itself
        last: int = ticket.wait()
    except ConfigError as problem:
        raise ValueError(str(problem)) from problem
    except CommError as problem:
        raise from_comm_error(problem) from problem
    operation_names.all_joined()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of `process_set` have called it. Operations in flight continue."""
    number = set_number(process_set, "Barrier")
    request = Request(operation_names.name("barrier", None, process_set), "barrier", process_set=number)
    synchronize(handles.submit([request], lambda results: None))
