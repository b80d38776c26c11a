"""Agreement before bytes move.

[Note: agree first] A collective whose ranks disagree on sizes, types or order ends in an abort of one
process and a silently wrong sum in another (measured, gloo). So whatever ranks must have in common is
compared through the key-value store first: small texts, no tensor, and an error that names both values
on every rank.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...core.host.open_sockets import open_sockets
from ...core.vocabulary.errors import CommError, Mismatch, PlanError, Stalled
from ...core.vocabulary.text import name_ranks
from .comm_errors import refuse_if_ended, translate_error, translated
from .forks import replace_sockets
from .rendezvous import LATE_SECONDS
from .world import World

# Messages between ranks from a thread in the background, through the world's store.
#
# A wait of one thread would block the store's connection for the others, which may be what the wait is for: so a
# thread in the background has a connection of its own (`Store.clone`).

_PART_BYTES = 1 << 20
"""A store refuses values of several megabytes."""
_POLL_SECONDS = 0.5


class BackgroundStore:
    """One connection to the store, for one thread. The world has several ranks."""

    def __init__(self, world: World) -> None:
        assert world.store is not None, "a world of one has nobody to write to"
        self._world, self._groups = world, world.groups
        with translated(world, "opening a connection to the store"):
            store: Any = world.store  # torch's stubs do not know `clone`
            before = open_sockets()
            self._store: dist.Store = store.clone()
        self._sockets = open_sockets() - before
        world.session.call_in_forked_child(self.forget)

    def post(self, key: str, text: str) -> None:
        """Publish `text` under a key that is used once."""
        parts = [text[at : at + _PART_BYTES] for at in range(0, len(text), _PART_BYTES)] or [""]
        with translated(self._world, key):
            for index, part in enumerate(parts):
                self._store.set(f"{key}/{index}", part)
            self._store.set(f"{key}/count", str(len(parts)))

    def take(self, key: str, what: str, timeout_seconds: float) -> str:
        """Return what was published under `key`, and remove it if `keep` is not set.

        Raises `Stalled`, naming `what`, when it does not come in time or the world is closed, and `CommError`.
        """
        end = time.monotonic() + timeout_seconds
        with translated(self._world, key):
            while not self._store.check([f"{key}/count"]):
                is_over = self._world.closed or self._world.groups is not self._groups  # ranks were lost
                if time.monotonic() > end or is_over:
                    raise Stalled(
                        f"{what} did not come within {timeout_seconds:g} s",
                        rank=self._world.job_rank,
                        operation=key,
                    )
                self._wait(f"{key}/count")
            count = int(self._store.get(f"{key}/count"))
            return "".join(self._store.get(f"{key}/{index}").decode() for index in range(count))

    def remove(self, key: str) -> None:
        """Remove what was published under `key`."""
        with translated(self._world, key):
            count = int(self._store.get(f"{key}/count"))
            for name in (*range(count), "count"):
                self._store.delete_key(f"{key}/{name}")

    def forget(self) -> None:
        """In a forked child: hold no connection of the rank's."""
        replace_sockets(self._sockets)

    def _wait(self, key: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=_POLL_SECONDS))
        except (dist.DistStoreError, dist.DistNetworkError) as problem:
            if isinstance(problem, dist.DistNetworkError):
                raise


_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.001, 0.25
Fact = tuple[str, Any]
"""What is compared: a label for messages, and a JSON value."""


def all_gather_json(
    world: World,
    topic: str,
    mine: Any,
    *,
    may_be_refused: bool = False,
    tell_late: Callable[[list[int]], None] | None = None,
    remedy: str = "",
) -> list[Any]:
    """Return what every rank said under `topic`, by rank. `mine` is a JSON value.

    Must be called by all ranks. Raises `Stalled` naming the ranks that did not within the time-out, and, with
    `may_be_refused`, the `PlanError` by which another rank has refused its forward pass meanwhile. `tell_late` is
    given the ranks that have not come after `LATE_SECONDS`, once; `remedy` is what an error advises then.
    """
    refuse_if_ended(world, topic)
    if world.store is None:
        return [mine]
    prefix = world.topic(topic)
    keys = [f"{prefix}/{rank}" for rank in range(world.size)]
    try:
        world.store.set(keys[world.rank], json.dumps(mine))
        for waited in _naps(world) if may_be_refused or tell_late else ():
            if world.store.check(keys):
                break
            if tell_late is not None and waited > LATE_SECONDS:
                tell_late([rank for rank, key in enumerate(keys) if not world.store.check([key])])
                tell_late = None
        world.store.wait(keys, timedelta(seconds=world.timeout_seconds))
        said = [json.loads(value) for value in world.store.multi_get(keys)]
    except RuntimeError as problem:
        raise nobody_answered(world, world.store, topic, keys, problem, remedy=remedy) from None
    name, _, count = prefix.rpartition("/")
    if count != "0":
        # All have spoken this time, so all have read what was said the last time.
        with suppress(RuntimeError):  # a store that is gone is noticed by who needs it
            world.store.delete_key(f"{name}/{int(count) - 1}/{world.rank}")
    return said


def _naps(world: World) -> Iterator[float]:
    """Sleep between looks, and say how long it took so far, until the time-out; raise a refusal.

    See [Note: a refusal of some] in `comm_errors`.

    A wait of the store itself, for a short time, ends with a warning of torch's on the terminal.
    """
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < world.timeout_seconds:
        yield waited
        if (refusal := world.find_refusal()) is not None:
            raise refusal
        time.sleep(min(_LONGEST_NAP_SECONDS, max(_SHORTEST_NAP_SECONDS, waited / 4)))
    raise RuntimeError(f"timed out after {world.timeout_seconds:g} s")


def decide_on_first(world: World, topic: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
    """Return to every rank what rank 0's `decide` makes of what all ranks said, by rank. JSON values.

    Must be called by all ranks. Where `decide` raises, rank 0 raises that, and the others a `CommError`. Raises
    `Stalled` as `all_gather_json` does.
    """
    refuse_if_ended(world, topic)
    if world.store is None:
        return decide([mine])
    prefix = world.topic(topic)
    keys = [f"{prefix}/{rank}" for rank in range(world.size)]
    answer = f"{prefix}/answer"
    wait = timedelta(seconds=world.timeout_seconds)
    try:
        if world.rank:
            world.store.set(keys[world.rank], json.dumps(mine))
            world.store.wait([answer], wait)
            said = json.loads(world.store.get(answer))
        else:
            world.store.wait(keys[1:], wait)
            others = [json.loads(value) for value in world.store.multi_get(keys[1:])]
            said = {"failed": "rank 0 could not decide"}
            try:
                said = {"decided": decide([mine, *others])}
            finally:
                world.store.set(answer, json.dumps(said))
    except RuntimeError as problem:
        raise nobody_answered(world, world.store, topic, [answer] if world.rank else keys, problem) from None
    name, _, count = prefix.rpartition("/")
    if count != "0":
        with suppress(RuntimeError):  # all have spoken this time, so all have read what was said the last time
            last = f"{name}/{int(count) - 1}"
            world.store.delete_key(f"{last}/{world.rank}" if world.rank else f"{last}/answer")
    if "failed" in said:
        raise CommError(said["failed"], rank=world.rank, operation=topic)
    return said["decided"]


def require_same(world: World, operation: str, facts: Sequence[Fact], *, remedy: str = "") -> None:
    """Raise `Mismatch`, on every rank, naming the first of `facts` that is not the same on all ranks.

    Costs one small message a rank when all agree: digests are compared first.
    """
    if world.size == 1:
        return
    text = json.dumps(facts)
    digests = all_gather_json(world, f"{operation}/digest", hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = [
        [(str(label), value) for label, value in said]
        for said in all_gather_json(world, f"{operation}/facts", facts)
    ]
    if len({len(said) for said in everyone}) > 1:
        shortest = min(len(said) for said in everyone)
        if all(said[:shortest] == everyone[0][:shortest] for said in everyone):
            extra = [said[shortest][0] if len(said) > shortest else "nothing" for said in everyone]
            require_equal(world, operation, f"what follows {shortest} equal entries", extra, remedy=remedy)
    for row in zip(*everyone, strict=False):
        labels = [label for label, _ in row]
        require_equal(world, operation, "name", labels, remedy=remedy)
        require_equal(world, operation, labels[0], [value for _, value in row], remedy=remedy)
    raise AssertionError(f"{operation}: digests differ but no fact does")


def require_equal(world: World, operation: str, what: str, values: Sequence[Any], *, remedy: str = "") -> None:
    """Raise `Mismatch` when `values`, one a rank, are not all equal; the smaller party is named last."""
    texts = [json.dumps(value) for value in values]
    if len(set(texts)) == 1:
        return
    parties = [
        (text, [rank for rank, other in zip(world.job_ranks, texts, strict=True) if other == text])
        for text, _ in sorted(Counter(texts).items(), key=lambda item: (-item[1], texts.index(item[0])))
    ]
    said = ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in parties[:4])
    raise Mismatch(
        f"{what} is {said}", rank=world.job_rank, operation=operation, remedy=remedy or "make all ranks the same"
    )


def nobody_answered(
    world: World, store: dist.Store, topic: str, keys: Sequence[str], problem: RuntimeError, *, remedy: str = ""
) -> CommError | PlanError:
    """Return the error of a wait for `keys`, one a rank from rank 0 on, that ended in `problem`."""
    missing: list[int] = []
    if not world.sockets.shut_down:
        with suppress(RuntimeError):  # the store is gone: that is the failure
            missing = [rank for rank, key in zip(world.job_ranks, keys, strict=False) if not store.check([key])]
    if not missing:
        return translate_error(problem, world, topic)
    return Stalled(
        f"{name_ranks(missing)} did not get here within {world.timeout_seconds:g} s",
        rank=world.job_rank,
        operation=topic,
        remedy=remedy
        or _links(world, missing) + "every rank must make the same farandole calls in the same order",
    )


def _links(world: World, missing: Sequence[int]) -> str:
    """Return what to look at first where ranks of other hosts are missing."""
    hosts = world.groups.hosts
    away = sorted({hosts[rank] for rank in missing if rank < len(hosts)} - {world.host})
    if not away:
        return ""
    return (
        f"is the network between {world.host} and {' and '.join(away)} cut, or does a process stand still there "
        "(farandole doctor checks the links)? If not: "
    )
