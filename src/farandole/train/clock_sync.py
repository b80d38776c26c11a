"""How this host's clock stands beside rank 0's: round trips through the store, at the ends of agreed steps.

[Note: who asks when] Only the first rank of each clock asks, rank 0 answers, one after the other, at `fd.init` and
then about once a minute. There is no thread, so both must come at the same time: at the end of the same step,
which rank 0 chooses by how long steps take, and tells with its last answer. Who does not come within a second
is asked no more; its last offset stays, with an error that grows with time (`observe.records.clock`).

A round is a few questions: the asker puts a key into the store, rank 0 waits for it and answers with its time. The
shortest round trip counts, so a busy moment spoils one question and not the offset.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..comm.world.session import NEVER
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.host.process_status import machine_name
from ..core.vocabulary.events import ClockOffset
from ..observe.records.clock import Ping, estimate

EVERY_SECONDS = 60.0
QUESTIONS = 8
MEET_SECONDS = 1.0
"""How long one side waits for the other."""
FIRST_MEET_SECONDS = 10.0
"""The same at the begin, where ranks come from the starting of their processes."""


def clock_name() -> str:
    """Return a name of this process's monotonic clock: the same for processes that share one."""
    return machine_name("time")


class ClockSync:
    """One rank's part in comparing the clocks. To be made by all ranks; `after_step` is for every step's end."""

    def __init__(
        self,
        here: World,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        every_seconds: float = EVERY_SECONDS,
        meet_seconds: float = MEET_SECONDS,
    ) -> None:
        """`name` is the name of `clock`: ranks that give the same one share it."""
        self._here = here
        self._clock = clock
        self._every = every_seconds
        self._meet = meet_seconds
        self._prefix = here.topic("clocks")
        names = all_gather_json(here, "clocks of hosts", name or here.host)
        leaders = {other: rank for rank, other in reversed(list(enumerate(names)))}
        self._askers = sorted(rank for rank in leaders.values() if rank != 0)
        self._groups = here.groups
        self._round = 0
        self.next_step: int | None = None
        """The step at whose end clocks are compared next; None: never."""
        self._last = (0, clock())
        if here.rank == 0 or here.rank in self._askers:
            self._meet_others(0, max(meet_seconds, FIRST_MEET_SECONDS))

    def after_step(self, step: int) -> int:
        """Compare the clocks, when it is time; return when it is the next time: never when ranks were lost."""
        if self._here.groups is not self._groups:
            return NEVER
        if self.next_step is not None and step >= self.next_step:
            self._meet_others(step, self._meet)
        return NEVER if self.next_step is None else self.next_step

    def _meet_others(self, step: int, meet_seconds: float) -> None:
        self._round += 1
        self.next_step = None
        store = self._here.store
        if store is None or not self._askers:
            return
        wait = timedelta(seconds=meet_seconds)
        if self._here.rank == 0:
            following = self._following(step)
            self._askers = [rank for rank in self._askers if self._answer(store, rank, following, wait)]
            self.next_step = following if self._askers else None
        else:
            self._ask(store, wait)

    def _following(self, step: int) -> int:
        """Return the step in about a minute, by the pace since the last meeting; before there is one, soon."""
        before, at = self._last
        now = self._clock()
        self._last = (step, now)
        if step == before:
            return step + 10
        pace = max((now - at) / (step - before), 1e-6)
        return step + max(1, min(round(self._every / pace), 10 * (step - before)))

    def _answer(self, store: dist.Store, rank: int, following: int, wait: timedelta) -> bool:
        """Answer one rank's questions; return whether it asked."""
        try:
            for number in range(QUESTIONS):
                asked, answered = self._keys(rank, number)
                store.wait([asked], wait)
                store.set(answered, json.dumps([self._clock(), following]))
                store.delete_key(asked)
        except RuntimeError:
            return False
        return True

    def _ask(self, store: dist.Store, wait: timedelta) -> None:
        pings = []
        following = 0
        with suppress(RuntimeError, ValueError):  # the other side is late or gone: no more comparing
            for number in range(QUESTIONS):
                asked, answered = self._keys(self._here.rank, number)
                begin = self._clock()
                store.set(asked, "")
                # Rank 0 may be with others before me; they need a moment each.
                store.wait([answered], wait if number else wait * len(self._askers))
                end = self._clock()
                at, following = json.loads(store.get(answered))
                store.delete_key(answered)
                pings.append(Ping(begin, at, end))
            offset: ClockOffset = estimate(pings)
            self._here.session.recorder.record(offset)
            self.next_step = following

    def _keys(self, rank: int, number: int) -> tuple[str, str]:
        stem = f"{self._prefix}/{self._round}/{rank}/{number}"
        return f"{stem}/asked", f"{stem}/answered"
