"""The lines of an events file: what a step's row holds, and its short form on disk (`docs/notes/records.md`).

In memory all times are seconds of the host's clock. On disk a step says when it began, in seconds; what belongs
to it is in whole microseconds after that, which keeps a row of 30 buckets below 2 kB.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.vocabulary.events import (
    DATA,
    EXCHANGE,
    OTHER,
    BucketFacts,
    BucketLayout,
    BucketTimes,
    ClockOffset,
    DevicePhases,
    LinkTraffic,
    Phase,
    Sample,
    Setup,
    Traffic,
)

_LARGEST = 2.0**63
"""Largest number of seconds, microseconds or bytes; a larger one is not a measurement."""
_SAMPLE_FIELDS = tuple(entry.name for entry in dataclasses.fields(Sample))


@dataclass(frozen=True)
class ExchangeRow:
    """One exchange of gradients within a step."""

    launch_seconds: list[float]
    wait_begin_seconds: float
    wait_end_seconds: float
    sent_bytes: int
    buckets: tuple[BucketTimes, ...] = ()
    """Empty in records of version 1, and if the times were not recorded."""
    engine: int = 0
    """Which engine's exchange, where a process has several."""


@dataclass(frozen=True)
class StepRow:
    """One optimizer step of one rank."""

    step: int
    begin_seconds: float
    end_seconds: float
    data_seconds: float
    samples: int
    exchanges: list[ExchangeRow]
    loss: float | None = None
    tokens: int | None = None
    total_steps: int | None = None
    phases: tuple[Phase, ...] = ()
    """As they ended; empty in records of version 1. They may nest, see `step_seconds`."""
    more_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of phases (or waits for exchanges) that were too many to keep one by one, by name."""
    data_cpu_seconds: float | None = None
    """CPU time of the training thread within `data_seconds`. None: not recorded."""
    inner_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time within `phases` in which the rank waited for exchanges inside of them, by degree."""
    inner_phases: Mapping[str, float] = field(default_factory=dict)
    """The same time by the phase that it is in."""
    inner_bytes: int = 0
    """What the rank sent in them."""

    @property
    def sent_bytes(self) -> int:
        """What the rank sent in all exchanges."""
        return self.inner_bytes + sum(exchange.sent_bytes for exchange in self.exchanges)


@dataclass(frozen=True)
class ThinnedRow:
    """Several steps in a row whose own rows were left out to keep the file small: their sums."""

    first_step: int
    last_step: int
    steps: int
    begin_seconds: float
    end_seconds: float
    samples: int
    tokens: int
    sent_bytes: int
    seconds: Mapping[str, float]
    """Time by phase (`step_seconds`); together it is the time of the steps."""
    slowest_step: int
    slowest_seconds: float


# -- to disk -----------------------------------------------------------------------------------


def encode_step(row: StepRow) -> dict[str, Any]:
    """Return a step as it stands in the file."""
    begin = round(row.begin_seconds, 6)
    values: dict[str, Any] = {
        "step": row.step,
        "begin": begin,
        "us": _micros(row.end_seconds, begin),
        "samples": row.samples,
        "phases": [_encode_phase(phase, begin) for phase in row.phases],
        "exchanges": [_encode_exchange(exchange, begin) for exchange in row.exchanges],
    }
    optional = {"loss": row.loss, "tokens": row.tokens, "total_steps": row.total_steps}
    values |= {name: value for name, value in optional.items() if value is not None}
    if row.data_cpu_seconds is not None:
        values["data_cpu"] = round(row.data_cpu_seconds * 1e6)
    if row.inner_seconds:
        values["inner"] = {name: round(seconds * 1e6) for name, seconds in row.inner_seconds.items()}
        values["inner_in"] = {name: round(seconds * 1e6) for name, seconds in row.inner_phases.items()}
        values["inner_sent"] = row.inner_bytes
    if row.more_seconds:
        values["more"] = {name: round(seconds * 1e6) for name, seconds in row.more_seconds.items()}
    return values


def encode_device_phases(event: DevicePhases) -> dict[str, Any]:
    """Return what the accelerator did in a step."""
    begin = round(min((phase.begin_seconds for phase in event.phases), default=0.0), 6)
    return {"device": event.step, "begin": begin, "phases": [_encode_phase(p, begin) for p in event.phases]}


def encode_layout(event: BucketLayout) -> dict[str, Any]:
    """Return what is in the buckets."""
    values: dict[str, Any] = {
        "route": event.route,
        "buckets": [[facts.nbytes, facts.codec, list(facts.parameters)] for facts in event.buckets],
    }
    if event.engine:
        values["engine"] = event.engine
    return values


def encode_sample(event: Sample) -> dict[str, Any]:
    """Return a sample: its fields in the order of `Sample`, without the unknown ones at the end."""
    values = [getattr(event, name) for name in _SAMPLE_FIELDS]
    values = [round(value, 4) if isinstance(value, float) else value for value in values]
    while values and values[-1] is None:
        values.pop()
    return {"sample": values}


def encode_setup(event: Setup) -> dict[str, Any]:
    """Return facts about the training."""
    return {"setup": dict(event.values)}


def encode_traffic(event: Traffic) -> dict[str, Any]:
    """Return what went to other hosts, each way with its own and the other address."""
    ways = [[w.own_address, w.peer_address, w.sent_bytes, round(w.busy_seconds * 1e6)] for w in event.links]
    return {"traffic": [round(event.at_seconds, 6), round(event.span_seconds, 6)], "ways": ways}


def encode_clock(event: ClockOffset) -> dict[str, Any]:
    """Return an offset between clocks; to 0.1 microseconds, as it may be of seconds since different boots."""
    return {"clock": [round(event.at_seconds, 6), round(event.offset_seconds, 7), round(event.error_seconds, 7)]}


def encode_thinned(row: ThinnedRow) -> dict[str, Any]:
    """Return the sums of steps left out."""
    return {
        "thinned": [row.first_step, row.last_step, row.steps],
        "begin": round(row.begin_seconds, 6),
        "end": round(row.end_seconds, 6),
        "samples": row.samples,
        "tokens": row.tokens,
        "sent": row.sent_bytes,
        "us": {name: round(seconds * 1e6) for name, seconds in row.seconds.items()},
        "slowest": [row.slowest_step, round(row.slowest_seconds * 1e6)],
    }


def _micros(at: float, begin: float) -> int:
    return round((at - begin) * 1e6)


def _encode_phase(phase: Phase, begin: float) -> list[Any]:
    return [phase.name, _micros(phase.begin_seconds, begin), _micros(phase.end_seconds, begin)]


def _encode_exchange(row: ExchangeRow, begin: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "wait": [_micros(row.wait_begin_seconds, begin), _micros(row.wait_end_seconds, begin)],
        "sent": row.sent_bytes,
    }
    if row.engine:
        values["engine"] = row.engine
    if row.buckets:
        values["buckets"] = [_encode_bucket(bucket, begin) for bucket in row.buckets]
    else:
        values["launch"] = [_micros(at, begin) for at in row.launch_seconds]
    return values


def _encode_bucket(bucket: BucketTimes, begin: float) -> list[int | None]:
    first, last = bucket.first_ready_seconds, bucket.last_ready_seconds
    return [
        bucket.nbytes,
        bucket.sent_bytes,
        None if first is None else _micros(first, begin),
        None if last is None else _micros(last, begin),
        _micros(bucket.launch_seconds, begin),
        _micros(bucket.begin_seconds, begin),
        _micros(bucket.end_seconds, begin),
        round(bucket.wait_seconds * 1e6),
        round(bucket.codec_seconds * 1e6),
        bucket.rounds,
    ]


# -- from disk: each raises ValueError, TypeError, KeyError, IndexError or AttributeError ------------


def decode_step_1(values: dict[str, Any]) -> StepRow:
    """Return a step of version 1."""
    exchanges = [ExchangeRow(**exchange) for exchange in values.pop("exchanges")]
    row = StepRow(exchanges=exchanges, **values)
    numbers = [row.begin_seconds, row.end_seconds, row.data_seconds, row.samples, row.step]
    numbers += [
        number for e in exchanges for number in (*e.launch_seconds, e.wait_begin_seconds, e.wait_end_seconds)
    ]
    for number in numbers:
        _number(number)
    _loss(row.loss)
    if row.tokens is not None:
        _count(row.tokens)
    return row


def decode_step(values: dict[str, Any]) -> StepRow:
    """Return a step of version 2."""
    begin = _number(values["begin"])
    phases = _decode_phases(values["phases"], begin)
    more = {_text(name): _number(micros) / 1e6 for name, micros in values.get("more", {}).items()}
    data = sum(phase.end_seconds - phase.begin_seconds for phase in phases if phase.name == DATA)
    return StepRow(
        step=_count(values["step"]),
        begin_seconds=begin,
        end_seconds=begin + _number(values["us"]) / 1e6,
        data_seconds=data + more.get(DATA, 0.0),
        samples=_count(values["samples"]),
        exchanges=[_decode_exchange(exchange, begin) for exchange in values["exchanges"]],
        loss=_loss(values.get("loss")),
        tokens=None if values.get("tokens") is None else _count(values["tokens"]),
        total_steps=None if values.get("total_steps") is None else _count(values["total_steps"]),
        phases=phases,
        more_seconds=more,
        data_cpu_seconds=None if values.get("data_cpu") is None else _number(values["data_cpu"]) / 1e6,
        inner_seconds={_text(name): _number(us) / 1e6 for name, us in values.get("inner", {}).items()},
        inner_phases={_text(name): _number(us) / 1e6 for name, us in values.get("inner_in", {}).items()},
        inner_bytes=_count(values.get("inner_sent", 0)),
    )


def decode_device_phases(values: dict[str, Any]) -> DevicePhases:
    """Return what the accelerator did in a step."""
    return DevicePhases(_count(values["device"]), _decode_phases(values["phases"], _number(values["begin"])))


def decode_layout(values: dict[str, Any]) -> BucketLayout:
    """Return what is in the buckets."""
    buckets = [
        BucketFacts(_count(nbytes), _text(codec), tuple(_text(name) for name in names))
        for nbytes, codec, names in values["buckets"]
    ]
    return BucketLayout(_text(values["route"]), tuple(buckets), _count(values.get("engine", 0)))


def decode_sample(values: dict[str, Any]) -> Sample:
    """Return a sample."""
    numbers = values["sample"]
    for number in numbers:
        if number is not None:
            _number(number)
    _number(numbers[0])
    _number(numbers[1])
    return Sample(**dict(zip(_SAMPLE_FIELDS, numbers, strict=False)))


def decode_setup(values: dict[str, Any]) -> Setup:
    """Return facts about the training."""
    found = values["setup"]
    for value in found.values():
        if value is not None and not isinstance(value, (str, bool)):
            _number(value)
    return Setup({_text(name): value for name, value in found.items()})


def decode_traffic(values: dict[str, Any]) -> Traffic:
    """Return what went to other hosts."""
    ways = tuple(
        LinkTraffic(_text(own), _text(peer), _count(sent), _number(busy) / 1e6)
        for own, peer, sent, busy in values["ways"]
    )
    at, span = values["traffic"]
    return Traffic(_number(at), _number(span), ways)


def decode_clock(values: dict[str, Any]) -> ClockOffset:
    """Return an offset between clocks."""
    at, offset, error = values["clock"]
    return ClockOffset(_number(at), _number(offset), _number(error))


def decode_thinned(values: dict[str, Any]) -> ThinnedRow:
    """Return the sums of steps left out."""
    first, last, steps = (_count(number) for number in values["thinned"])
    slowest, micros = values["slowest"]
    return ThinnedRow(
        first,
        last,
        steps,
        _number(values["begin"]),
        _number(values["end"]),
        _count(values["samples"]),
        _count(values["tokens"]),
        _count(values["sent"]),
        {_text(name): _number(value) / 1e6 for name, value in values["us"].items()},
        _count(slowest),
        _number(micros) / 1e6,
    )


def _decode_phases(values: Sequence[Any], begin: float) -> tuple[Phase, ...]:
    return tuple(Phase(_text(name), begin + _number(b) / 1e6, begin + _number(e) / 1e6) for name, b, e in values)


def _decode_exchange(values: dict[str, Any], begin: float) -> ExchangeRow:
    wait_begin, wait_end = (begin + _number(at) / 1e6 for at in values["wait"])
    buckets = tuple(_decode_bucket(bucket, begin) for bucket in values.get("buckets", ()))
    launches = [begin + _number(at) / 1e6 for at in values.get("launch", ())]
    launches = launches or [bucket.launch_seconds for bucket in buckets]
    engine = _count(values.get("engine", 0))
    return ExchangeRow(launches, wait_begin, wait_end, _count(values["sent"]), buckets, engine)


def _decode_bucket(values: Sequence[Any], begin: float) -> BucketTimes:
    nbytes, sent, first, last, launch, start, end, wait, codec, rounds = values
    return BucketTimes(
        _count(nbytes),
        _count(sent),
        None if first is None else begin + _number(first) / 1e6,
        None if last is None else begin + _number(last) / 1e6,
        begin + _number(launch) / 1e6,
        begin + _number(start) / 1e6,
        begin + _number(end) / 1e6,
        _number(wait) / 1e6,
        _number(codec) / 1e6,
        _count(rounds),
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
        raise TypeError(f"{str(value)[:40]} is not a number")
    return value


def _loss(value: Any) -> float | None:
    """Return a loss, which may well be infinite or not a number."""
    if value is None or isinstance(value, float):
        return value
    return _count(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise TypeError(f"{str(value)[:40]} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


# Where the time of a step went, by phase.
#
# [Note: the innermost has the time] Phases nest and touch: a garbage collection inside a forward pass, a forward
# pass inside an evaluation. Every instant of a step is counted once, for the phase that began last of those
# that are open; an instant in no phase is `other`. So the parts always add up to the step.


def step_seconds(row: StepRow) -> dict[str, float]:
    """Return seconds by phase; their sum is the step's time.

    The wait for exchanges counts as `EXCHANGE`, what happened in none of the phases as `OTHER`. A step of
    version 1 knows data, exchange and other.
    """
    phases = [*row.phases]
    phases += [Phase(EXCHANGE, e.wait_begin_seconds, e.wait_end_seconds) for e in row.exchanges]
    seconds = divide(phases, row.begin_seconds, row.end_seconds)
    known = {phase.name for phase in row.phases}
    more = dict(row.more_seconds)
    if "data" not in known and "data" not in more and row.data_seconds:
        more["data"] = row.data_seconds
    for name, extra in more.items():
        taken = min(extra, seconds[OTHER])
        seconds[OTHER] -= taken
        seconds[name] = seconds.get(name, 0.0) + taken
    return seconds


def divide(phases: list[Phase], begin: float, end: float) -> dict[str, float]:
    """Divide the time from `begin` to `end` among `phases` and `OTHER`. See [Note: the innermost has the time]."""
    seconds = {OTHER: 0.0}
    waiting = sorted(
        (phase for phase in phases if phase.end_seconds > begin and phase.begin_seconds < end),
        key=lambda phase: (phase.begin_seconds, -phase.end_seconds),
    )
    open_phases: list[tuple[float, int, Phase]] = []  # begun last first
    at = begin
    for number, phase in enumerate(waiting):
        start = max(phase.begin_seconds, begin)
        at = _spend(seconds, open_phases, at, start)
        heapq.heappush(open_phases, (-start, -number, phase))
    _spend(seconds, open_phases, at, max(at, end))
    return seconds


def _spend(
    seconds: dict[str, float], open_phases: list[tuple[float, int, Phase]], at: float, until: float
) -> float:
    """Give the time from `at` to `until` to the innermost open phases."""
    while at < until:
        while open_phases and open_phases[0][2].end_seconds <= at:
            heapq.heappop(open_phases)
        if not open_phases:
            seconds[OTHER] += until - at
            return until
        phase = open_phases[0][2]
        stop = min(phase.end_seconds, until)
        seconds[phase.name] = seconds.get(phase.name, 0.0) + stop - at
        at = stop
    return at


def own_waits(row: StepRow) -> tuple[float, float]:
    """Return how long one rank waited for exchanges, whichever rank was late, and for data."""
    phases = step_seconds(row)
    return phases.get(EXCHANGE, 0.0) + sum(row.inner_phases.values()), phases.get(DATA, 0.0)
