"""``codec = "auto"`` for named operations: which travel exactly, when a choice is made, and what it gives to each.

Operations that were given the same `Request.chosen_with` are one exchange, that of an optimizer or a tape. A round
of it ends when one of its names comes again. The first rounds are exact, and tell when each operation leaves; then
the link and the codecs are measured once, and each operation gets a codec for good.

[Note: the same codec on all ranks] All ranks of a circle start its operations in one order, so they count the same
rounds. The job of one operation measures and chooses, on the conductor's thread. A rank may start others before
that is over. But a name comes again only when its operation before is done, which was behind the choice. So each
name travels exactly once more, and takes its codec from the next time on: there is nothing to agree on.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from ...comm.autotune.autotuner import FALLBACK, CodecChoice, choose
from ...comm.autotune.probe import PROBE_TAG, largest_of_all, measure_codecs, probe_bytes, probe_link
from ...comm.transport.rank_group import HostGroups, RankGroup
from ...comm.transport.transport import Transport
from ...core.bucket_plan import BucketPlan
from ...core.env import is_verbose
from ...core.link import LinkModel, ring_factor
from ...core.step_model import CANDIDATES, CodecSpeed, Gradient, StepProfile, predict_step
from ...core.vocabulary.codec_spec import NONE, CodecSpec, low_rank_pays
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_bits_per_second, format_seconds
from .operations import Operation

# Choose codecs for buckets that are there already: what the autotuner does, where nothing else can be changed.
#
# [Note: one message] All ranks compute the same choice from the same numbers: the largest that some rank measured.


_TAG = PROBE_TAG + 48
_WORTH_LOSING = 0.9
"""A step must become shorter than this for a lossy codec: what is chosen once is not corrected later."""
_EACH_ALONE = 1
"""Bytes of a bucket in the step model: what is larger is alone, and so is each of these."""


class GivenBucket(NamedTuple):
    """One bucket of float32 that may have a codec."""

    name: str
    shape: tuple[int, ...]
    ready_seconds: float
    """When it left, after the last exchange was over, on this rank; without waits for others of the exchange."""


class MeasuredChoice(NamedTuple):
    """What was chosen, and by what."""

    choice: CodecChoice
    uncompressed_seconds: float
    """Predicted for a step without codecs."""
    link: LinkModel


def choose_for_buckets(
    transport: Transport,
    across: RankGroup,
    inside: RankGroup | None,
    everyone: RankGroup,
    buckets: Sequence[GivenBucket],
) -> MeasuredChoice:
    """Measure the link and the codecs, and choose a codec for each bucket: the same on all ranks.

    Called by all ranks of `everyone` at once, by the thread that may use `transport`.

    Args:
        transport: what messages travel by.
        across: the ranks that exchange by a codec.
        inside: those of this host, which are summed before that; None: none are.
        everyone: all ranks that take part.
        buckets: of equal names and shapes on all ranks.
    """
    most = sum(_bytes_of(bucket) for bucket in buckets)
    # A short one says how long a good one is: see `Autotuner`.
    short = probe_link(transport, across, everyone, probe_bytes(None, most))
    link = probe_link(transport, across, everyone, probe_bytes(short, most))
    shards, intra_host_seconds, intra_host_round_seconds = 1, 0.0, 0.0
    if inside is not None:
        host = probe_link(transport, inside, everyone, probe_bytes(None, most))
        shards = inside.seat.size
        intra_host_seconds = ring_factor(shards) / host.bytes_per_second
        intra_host_round_seconds = 2 * host.latency_seconds
    names = [
        name
        for name in CANDIDATES
        if not CodecSpec.parse(name).is_low_rank or any(_can_be_low_rank(each, shards) for each in buckets)
    ]
    speeds = measure_codecs(tuple(names), across.seat.size)
    shares_core = len(os.sched_getaffinity(0)) <= torch.get_num_threads()
    costs = [speeds[name].seconds_per_byte for name in names]
    ready = [bucket.ready_seconds for bucket in buckets]
    slowest = largest_of_all(transport, everyone, [float(shares_core), *costs, *ready], _TAG)
    costs, ready = slowest[1 : 1 + len(names)], slowest[1 + len(names) :]
    gradients = [_gradient(bucket, moment, shards) for bucket, moment in zip(buckets, ready, strict=True)]
    profile = StepProfile(
        sorted(gradients, key=lambda gradient: gradient.ready_seconds),
        0.0,  # of all computing only the end matters: it is in `backward_seconds`
        max(ready),
        across.seat.size,
        bool(slowest[0]),
        {
            name: CodecSpeed(cost, speeds[name].ratio, speeds[name].rounds)
            for name, cost in zip(names, costs, strict=True)
        },
        shards,
        intra_host_seconds,
        intra_host_round_seconds,
    )
    best = choose(profile, link, lossy=True, sizes=(_EACH_ALONE,))
    plain = predict_step(profile, link, BucketPlan({}, _EACH_ALONE)).seconds
    if best.seconds > _WORTH_LOSING * plain:
        best = choose(profile, link, lossy=False, sizes=(_EACH_ALONE,))
    return MeasuredChoice(best, plain, link)


def _gradient(bucket: GivenBucket, ready_seconds: float, shards: int) -> Gradient:
    rows, columns = _matrix(bucket)
    return Gradient(
        bucket.name,
        _bytes_of(bucket),
        ready_seconds,
        rows,
        columns,
        can_be_coded=True,
        can_be_low_rank=_can_be_low_rank(bucket, shards),
    )


def _can_be_low_rank(bucket: GivenBucket, shards: int) -> bool:
    rank = CodecSpec.parse(CANDIDATES[-1]).rank
    return shards == 1 and len(bucket.shape) > 1 and low_rank_pays(*_matrix(bucket), rank)


def _matrix(bucket: GivenBucket) -> tuple[int, int]:
    rows = bucket.shape[0] if bucket.shape else 1
    return rows, torch.Size(bucket.shape).numel() // max(1, rows)


def _bytes_of(bucket: GivenBucket) -> int:
    return torch.Size(bucket.shape).numel() * torch.float32.itemsize


EXACT_ROUNDS = 3
"""Before the one in which codecs are chosen. Graphs are made in the first, the others are measured."""
Choose: TypeAlias = Callable[[Transport], None]
"""Measures and chooses: to be called by all ranks of an operation, before it travels."""


class AutoCodecs:
    """What is known of all exchanges of this rank. Called with the controller's lock, but for `landed`."""

    def __init__(self, rank: int, hosts: Sequence[int] | None) -> None:
        """`hosts`: the number of each rank's host; None: not to be looked at, by the plan's route."""
        self._rank, self._hosts = rank, hosts
        self._exchanges: dict[_Key, _Exchange] = {}

    def next(self, operation: Operation, groups: HostGroups | None) -> tuple[str, Choose | None]:
        """Return the codec of an operation that starts, and what is to be done before it, if anything."""
        exchange = self._exchange_of(operation)
        if exchange is None:
            return NONE, None
        everyone = RankGroup(operation.present, self._rank)
        return exchange.next(operation, partial(_measure, everyone, groups))

    def landed(self, operation: Operation, done: Callable[..., None], *result: Any) -> None:
        """Note that an operation is back, and pass its result on to `done`."""
        exchange = self._exchanges.get(_key(operation))
        if exchange is not None:
            exchange.landed(operation)
        done(*result)

    def forget(self, process_set: int) -> None:
        """Drop what is known of a removed set."""
        self._exchanges = {key: kept for key, kept in self._exchanges.items() if key[0] != process_set}

    def _exchange_of(self, operation: Operation) -> _Exchange | None:
        """Return the exchange of an operation; None where it crosses no link."""
        present = operation.present
        if len(present) == 1:
            return None
        exchange = self._exchanges.get(_key(operation))
        if exchange is None:
            exchange = _Exchange(operation.signature.chosen_with, speaks=self._rank == present[0])
            self._exchanges[_key(operation)] = exchange
            if self._hosts is not None and len({self._hosts[rank] for rank in present}) == 1:
                exchange.stay_exact("all ranks are on one host")
        return exchange


_Key: TypeAlias = tuple[int, tuple[int, ...], str]
"""A process set, those of its ranks that take part, and the exchange's name."""


def _key(operation: Operation) -> _Key:
    signature = operation.signature
    return signature.process_set, operation.present, signature.chosen_with


class _Sent(NamedTuple):
    """One operation of a round."""

    shape: tuple[int, ...]
    submitted_seconds: float


class _Exchange:
    """The operations of one optimizer or tape, among the same ranks."""

    def __init__(self, name: str, *, speaks: bool) -> None:
        self._name, self._speaks = name, speaks
        self._rounds = 0
        self._round: dict[str, _Sent] = {}
        self._known: dict[str, tuple[int, ...]] = {}
        """Shapes of all operations, in the order in which all ranks start them."""
        self._began_seconds: float | None = None
        """When the round before was over; None in the first one."""
        self._slept: list[tuple[float, float]] = []
        """When operations of this round landed, and how long a thread had slept for each."""
        self._landed_seconds = 0.0
        self._ready: dict[str, float] = {}
        """The shorter one of the rounds that were measured: see `GivenBucket`."""
        self._passed: set[str] | None = None
        """Names that were started with the choice, or behind it; None before."""
        self._codecs: dict[str, str] | None = None
        self._late = NONE
        """The codec of operations that were not there when codecs were chosen."""

    def stay_exact(self, why: str) -> None:
        """Choose nothing."""
        self._passed, self._codecs = set(), {}
        if self._speaks:
            write_notice(f"codec auto, {self._name}: {NONE} ({why})")

    def next(self, operation: Operation, measure: Measure) -> tuple[str, Choose | None]:
        """See `AutoCodecs`."""
        name, shape = operation.signature.name, operation.signature.shape
        if self._passed is not None:
            if name not in self._passed:
                self._passed.add(name)  # see [Note: the same codec on all ranks]
                return NONE, None
            assert self._codecs is not None, "a name comes again behind the choice"
            return (self._codecs.get(name, self._late) if self._known.get(name) == shape else self._late), None
        if name in self._round:
            self._end_round()
            if self._rounds == EXACT_ROUNDS:
                self._passed = {name}
                return NONE, partial(self._choose, measure)
        self._round[name] = _Sent(shape, operation.submitted_seconds)
        self._known[name] = shape
        return NONE, None

    def landed(self, operation: Operation) -> None:
        """Note that an operation is back. Called from the conductor's thread."""
        if self._passed is not None:
            return
        now, since = time.monotonic(), operation.ticket.waits_since_seconds
        self._landed_seconds = now
        if since is not None:
            self._slept.append((now, now - since))

    def _end_round(self) -> None:
        if self._began_seconds is not None:
            ready = {name: self._ready_seconds(sent) for name, sent in self._round.items()}
            if not self._ready or max(ready.values()) < max(self._ready.values()):
                self._ready = ready
        self._rounds += 1
        self._began_seconds = self._landed_seconds
        self._round, self._slept = {}, []

    def _ready_seconds(self, sent: _Sent) -> float:
        """Return when an operation would have left if its rank had never waited for those before it."""
        assert self._began_seconds is not None, "asked for a round that was measured"
        slept = sum(seconds for landed, seconds in self._slept if landed <= sent.submitted_seconds)
        return max(0.0, sent.submitted_seconds - self._began_seconds - slept)

    def _choose(self, measure: Measure, transport: Transport) -> None:
        """Measure, and choose. Called from the conductor's thread."""
        last = max(self._ready.values())
        buckets = [
            GivenBucket(name, shape, self._ready.get(name, last)) for name, shape in list(self._known.items())
        ]
        found = measure(transport, buckets)
        main = found.choice.main_codec
        self._late = FALLBACK if CodecSpec.parse(main).is_low_rank else main
        self._codecs = dict(found.choice.codecs)
        if self._speaks:
            write_notice(f"codec auto, {self._name}: {_explain(found)}")


Measure: TypeAlias = Callable[[Transport, Sequence[GivenBucket]], MeasuredChoice]


def _measure(
    everyone: RankGroup, groups: HostGroups | None, transport: Transport, buckets: Sequence[GivenBucket]
) -> MeasuredChoice:
    across, inside = (everyone, None) if groups is None else (groups.across, groups.inside)
    return choose_for_buckets(transport, across, inside, everyone, buckets)


def _explain(found: MeasuredChoice) -> str:
    choice, link = found.choice, found.link
    why = f"predicted {format_seconds(choice.seconds)} a step"
    what = NONE
    counts = Counter(codec for codec in choice.codecs.values() if codec != NONE)
    if counts:
        each = ", ".join(f"{codec} for {count}" for codec, count in counts.most_common())
        what = f"{each} of {len(choice.codecs)} buckets"
        why += f", uncompressed {format_seconds(found.uncompressed_seconds)}"
    if not is_verbose():
        return f"{what} ({why})"
    rate = format_bits_per_second(8 * link.bytes_per_second)
    return f"{what}: {why}; link {rate} a rank, {format_seconds(link.latency_seconds)} a round"
