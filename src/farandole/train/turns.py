"""`fd.barrier` and `fd.main_first`: ranks that wait for each other outside the training step.

[Note: bounded waits] Ranks meet at the store, by the name of the call, and not in a collective of the backend:
so a rank that is missing is named, a rank that makes another call is not mixed up with this one, and the time-out
can be chosen for each call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from ..comm.world.comm_errors import refuse_if_ended, translate_error
from ..comm.world.store_sync import all_gather_json, require_same
from ..comm.world.world import World, world
from ..core.vocabulary.errors import ConfigError, PeerLost, Stalled

_BARRIER, _MAIN_FIRST = "fd.barrier", "fd.main_first"
_HEARD_SECONDS = 5.0
"""How long a rank whose body failed stays for the others to read why: the store may live in its process."""


def barrier() -> None:
    """Wait until all ranks have called this. Call it on all ranks.

    It waits for the processes, not for work that is queued on an accelerator.

    Raises:
        Stalled: a rank did not come within the time-out of `init`; the message names the rank.
    """
    all_gather_json(world(), _BARRIER, None)


@contextmanager
def main_first(*, local: bool = False, timeout_seconds: float | None = None) -> Iterator[None]:
    """Let rank 0 run the body first and the other ranks after it: a download, or the building of a cache.

    Enter it on all ranks. Ranks do not wait for each other at the end. A body that raises on the first rank is not
    run by the others.

    Args:
        local: on every host, local rank 0 goes first: for a cache on the host's own disk.
        timeout_seconds: how long the others wait for the first; by default the time-out of `init`.

    Raises:
        ConfigError: `timeout_seconds` is not above 0.
        PeerLost: on the waiting ranks, when the body failed on the first one; names its exception.
        Stalled: a rank did not enter, or the first rank did not finish in time.
        Mismatch: the ranks disagree on `local`; raised on every rank.
    """
    here = world()
    seconds = here.timeout_seconds if timeout_seconds is None else timeout_seconds
    if not seconds > 0:
        raise ConfigError(f"main_first: timeout_seconds is {timeout_seconds}, expected a number above 0")
    if here.size == 1:
        yield
        return
    require_same(here, _MAIN_FIRST, [("local", bool(local))])
    key = f"{here.topic(_MAIN_FIRST)}/{here.node_rank if local else 0}"
    if (here.local_rank if local else here.rank) != 0:
        _wait_for_first(here, key, seconds, local=local)
        yield
        return
    failure = "it ended without a result"
    try:
        yield
        failure = ""
    except BaseException as problem:
        failure = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
        raise
    finally:
        _tell(here, key, failure, local=local)


def _tell(here: World, key: str, failure: str, *, local: bool) -> None:
    """Let the others go on, or fail."""
    if not failure:
        refuse_if_ended(here, _MAIN_FIRST)
    assert here.store is not None, "a world of several ranks has a store"
    answer = json.dumps([here.rank, failure])
    try:
        here.store.set(key, answer)
        if failure:
            _stay_until_heard(here, key, local=local)
    except RuntimeError as problem:
        if not failure:  # else the body's own exception is the one to see
            raise translate_error(problem, here, _MAIN_FIRST) from None


def _stay_until_heard(here: World, key: str, *, local: bool) -> None:
    waiting = here.local_size - 1 if local else here.size - 1
    end = time.monotonic() + _HEARD_SECONDS
    assert here.store is not None, "a world of several ranks has a store"
    with suppress(RuntimeError):
        while here.store.add(f"{key}/heard", 0) < waiting and time.monotonic() < end:
            time.sleep(0.02)


def _wait_for_first(here: World, key: str, seconds: float, *, local: bool) -> None:
    refuse_if_ended(here, _MAIN_FIRST)
    assert here.store is not None, "a world of several ranks has a store"
    try:
        here.store.wait([key], timedelta(seconds=seconds))
        rank, failure = json.loads(here.store.get(key))
        if failure:
            here.store.add(f"{key}/heard", 1)
    except RuntimeError as problem:
        is_late = False
        with suppress(RuntimeError):  # a store that is gone is the failure
            is_late = not here.sockets.shut_down and not here.store.check([key])
        if not is_late:
            raise translate_error(problem, here, _MAIN_FIRST) from None
        first = f"local rank 0 of {here.host}" if local else "rank 0"
        raise Stalled(
            f"{first} did not finish its turn within {seconds:g} s",
            rank=here.rank,
            operation=_MAIN_FIRST,
            remedy="give main_first a longer timeout_seconds",
        ) from None
    if failure:
        raise PeerLost(
            f"rank {rank}, which went first, failed in it: {failure}",
            rank=here.rank,
            operation=_MAIN_FIRST,
            remedy=f"look at the error of rank {rank}",
        )
