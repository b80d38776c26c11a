"""One exchange of all gradients of an optimizer or a tape, for the records: when each bucket left and was back.

[Note: a round] Gradients of one step travel in several operations, which the engine completes one by one. They
are one round, and one exchange of the records, once all of them are back. Its wait begins when the last bucket
has left: then this rank has computed all gradients. Operations that are waited for where they are called (outside
graphs, and without the kernel in C++) leave one after the other; of those only the whole is known, as one bucket,
and all of its time is a wait.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from ...comm.named_ops.operations import Ticket, Travel
from ...core.vocabulary.codec_spec import AUTO, NONE
from ...core.vocabulary.events import BucketFacts, BucketTimes, Exchange
from .batch_phases import Finished
from .step_watch import quietly, tell


class RoundPart(NamedTuple):
    """One operation of a round."""

    round: Round
    place: int

    def submitted(self) -> None:
        """It is handed to the engine now."""
        self.round.submitted(self.place, time.monotonic())

    def arrived(self, ticket: Ticket) -> None:
        """Its result is there; to be called before those who wait for it go on."""
        quietly(lambda: self.round.arrived(self.place, ticket.travel()))


class Round:
    """What is known of one round, each time that it takes place. See [Note: a round]."""

    def __init__(self, name: str, *, one_by_one: bool, front_end: str) -> None:
        """`name`: of the optimizer or tape; `one_by_one`: whether operations are waited for where they are called.

        `front_end`: one of `events.FRONT_ENDS`.
        """
        self.name = name
        self._one_by_one = one_by_one
        self._front_end = front_end
        self._facts: list[BucketFacts] = []
        self._is_complete = False
        self._launches: dict[int, float] = {}
        self._travels: dict[int, Travel] = {}

    def add(self, nbytes: int, codec: str, parameters: tuple[str, ...]) -> RoundPart:
        """Add an operation: bytes of its gradients (0 of sparse ones), how it travels, and whose they are."""
        self._facts.append(BucketFacts(nbytes, codec, parameters))
        return RoundPart(self, len(self._facts) - 1)

    def all_added(self) -> None:
        """Say that no more is added. Outside graphs the operations have taken place already."""
        self._is_complete = True
        if self._facts:
            quietly(self._begin)

    def submitted(self, place: int, at_seconds: float) -> None:
        """Operation `place` is handed to the engine."""
        if place in self._launches:  # the round before was never complete: an operation of it has failed
            self._launches, self._travels = {}, {}
        self._launches[place] = at_seconds

    def arrived(self, place: int, travel: Travel) -> None:
        """Operation `place` is back."""
        if place not in self._launches:
            return
        self._travels[place] = travel
        self._finish()

    def _begin(self) -> None:
        # A batch is a step only with an exchange, from now on.
        tell(lambda watch: watch.expect_exchanges(), self._front_end)
        self._finish()

    def _finish(self) -> None:
        if not self._is_complete or len(self._travels) < len(self._facts):
            return
        launches, travels = self._launches, self._travels
        self._launches, self._travels = {}, {}
        facts = [_as_travelled(self._facts[place], travels[place]) for place in range(len(self._facts))]
        if self._one_by_one:
            times = _together(facts, launches, travels)
            wait_begin = times[0].launch_seconds
            facts = [_merged(facts)]
        else:
            times = [_times(facts[place], launches[place], travels[place]) for place in range(len(facts))]
            wait_begin = max(launches.values())
        end = max(each.end_seconds for each in times)
        exchange = Exchange(
            tuple(each.launch_seconds for each in times),
            min(wait_begin, end),
            end,
            sum(each.sent_bytes for each in times),
            tuple(times),
        )
        finished = Finished(self.name, tuple(facts), exchange)
        tell(lambda watch: watch.exchanged(finished), self._front_end)


def _as_travelled(facts: BucketFacts, travel: Travel) -> BucketFacts:
    """Return the facts with the codec that the engine chose."""
    return replace(facts, codec=travel.codec or NONE) if facts.codec == AUTO else facts


def _times(facts: BucketFacts, launch: float, travel: Travel) -> BucketTimes:
    begin = max(launch, travel.begin_seconds)
    return BucketTimes(
        facts.nbytes,
        travel.sent_bytes,
        None,  # no more is known than that all of its gradients were ready when it left
        launch,
        launch,
        min(begin, travel.end_seconds),
        travel.end_seconds,
        travel.wait_seconds,
        travel.codec_seconds,
        travel.rounds,
    )


def _together(
    facts: list[BucketFacts], launches: dict[int, float], travels: dict[int, Travel]
) -> list[BucketTimes]:
    """Return the round as one bucket."""
    launch = min(launches.values())
    sums = [sum(values) for values in zip(*((t.sent_bytes, t.wait_seconds, t.codec_seconds, t.rounds)
                                            for t in travels.values()), strict=True)]  # fmt: skip
    begin = max(launch, min(travel.begin_seconds for travel in travels.values()))
    end = max(travel.end_seconds for travel in travels.values())
    return [
        BucketTimes(
            sum(each.nbytes for each in facts), int(sums[0]), None, launch, launch, begin, end, sums[1], sums[2],
            int(sums[3]),
        )
    ]  # fmt: skip


def _merged(facts: list[BucketFacts]) -> BucketFacts:
    codecs = {each.codec for each in facts if each.nbytes}
    parameters = tuple(name for each in facts for name in each.parameters)
    return BucketFacts(sum(each.nbytes for each in facts), min(codecs, default="none"), parameters)
