"""The link, fitted to the buckets of a run, and the predicted step with another codec or bucket size.

[Note: predicting from records] The buckets of a typical step are replayed by core's step model (`replay`), over
a link whose bandwidth and latency are fitted to how long the buckets took; zero is the end of computing, so what
lies after it is exposed. A prediction changes only bytes, rounds or the division into buckets. Time measured
beyond the replay is assumed to stay; where less was measured, gains shrink in proportion.

[Note: medians and means] A bucket's facts are medians over steps, so that the fit describes a usual exchange.
Exposed, hidden and busy seconds are costs, which add up over steps: these are means. Before the fit the medians
are stretched to the mean exchange without the longest tenth (`_as_long_together`).

[Note: which exchange of a step] Two models of one loop exchange one after the other, and a loss that goes through
both starts an exchange that nothing waits for. One stands for all: the last that is waited for about as long as
any, among those that have the wire to themselves where there are such.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...core.link import LinkModel, fit_link
from ...core.step_model import BucketLoad, rebucket, replay_buckets
from ...core.vocabulary.events import BucketTimes
from ...core.vocabulary.text import name_ranks
from ...core.vocabulary.units import format_bits_per_second, format_bytes, format_seconds
from ..figures.figures import mean
from ..figures.step_parts import WireTime, wires_of
from ..records.rows import ExchangeRow, StepRow
from ..records.timeline_reader import HostTraffic, links_between_hosts
from .finding import SHOWN_RANKS, Finding, Fix, Gain, confidence, doctor_line, format_cost
from .step_table import StepTable

_USUAL_SHARE = 0.9
_ALIKE = 2.0
"""Times the smallest bucket, up to which a fit cannot tell bytes from rounds."""
_LARGE_BYTES = 2**18
"""A bucket of so many bytes takes longer for them on any link between hosts."""
_LONG_SECONDS, _SLOW_BYTES_PER_SECOND = 2e-3, 1e6
"""No local network takes so long for a round; a link that carries as much as this is more likely."""
_OFTEN = 0.5
"""Share of steps in which two buckets are on the wire together, from which they are taken as one."""


@dataclass(frozen=True)
class LinkObservation:
    """A typical exchange."""

    link: LinkModel
    buckets: Sequence[BucketLoad]
    """The network in a typical step: medians over steps. Times are seconds after the end of computing."""
    exposed_seconds: float
    """Measured, mean."""
    hidden_seconds: float
    """On the wire behind computing: measured, mean. See [Note: when a bucket is on the wire]."""
    busy_seconds: float
    """How long something is on the wire: measured, mean. What a rank waits may be more: for a core, too."""
    uneven_seconds: float
    """By how much a mean exchange is on the wire longer than the middle one: what a few long ones cost."""

    @property
    def sent_bytes(self) -> float:
        """Bytes of one exchange, sent by one rank."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    @property
    def bucket_bytes(self) -> float:
        """Bytes of a usual bucket."""
        return statistics.median([bucket.nbytes for bucket in self.buckets])

    def exposed_with_codec(self, ratio: float, codec_seconds_per_byte: float = 0.0) -> float:
        """Return the exposed time with `ratio` times the bytes, made by a codec before each bucket leaves."""
        return self._exposed_with([bucket.coded(ratio, codec_seconds_per_byte) for bucket in self.buckets])

    def exposed_with_bucket_bytes(self, bucket_bytes: float) -> float:
        """Return the exposed time with buckets of another size."""
        return self._exposed_with(rebucket(self.buckets, bucket_bytes))

    def _exposed_with(self, buckets: Sequence[BucketLoad]) -> float:
        base, other = (max(0.0, replay_buckets(each, self.link).end_seconds) for each in (self.buckets, buckets))
        trust = min(1.0, self.exposed_seconds / base) if base > 0 else 1.0
        return self.exposed_seconds - trust * (base - other)


class _TimedBucket(NamedTuple):
    load: BucketLoad
    seconds: float
    """What it took, once its turn had come."""


def network_of(table: StepTable, exposed_seconds: float) -> LinkObservation | None:
    """Return the typical exchange of a run; None where the buckets' times were not taken."""
    columns: dict[int, list[_TimedBucket]] = {}
    shared: dict[int, list[bool]] = {}
    hidden: list[float] = []
    lengths: list[float] = []
    steps = [(rows, wires_of(rows, one_clock=table.one_clock)) for rows in zip(*table.rows, strict=True)]
    place = _typical(steps)
    count = _usual_count(table, place)
    if count == 0:
        return None
    for rows, wires in steps:
        wire = wires[place] if len(wires) >= -place else None
        if wire is None or len(wire.spans) != count or any(len(row.exchanges) != len(wires) for row in rows):
            continue
        exchanges = [row.exchanges[place] for row in rows]
        own = [exchange.buckets for exchange in exchanges]
        for number, is_shared in enumerate(wire.shares_wire):
            shared.setdefault(number, []).append(is_shared)
        for number, turn_seconds in enumerate(wire.serialized_seconds):
            columns.setdefault(number, []).append(
                _bucket(own, number, [e.wait_begin_seconds for e in exchanges], max(1e-7, turn_seconds))
            )
        lengths.append(wire.busy_seconds)
        hidden.append(wire.hidden_seconds)
    if not columns:
        return None
    usual = [_median(columns[number]) for number in range(count)]
    buckets = [bucket.load for bucket in usual]
    seconds = _as_long_together([bucket.seconds for bucket in usual], _usual_mean(lengths))
    link = fit_link([b.sent_bytes for b in buckets], [b.rounds for b in buckets], seconds)
    sharing = [statistics.mean(shared[number]) > _OFTEN for number in range(count)]
    if link is not None and _hides_bytes(link, buckets, seconds):
        link = fit_link(*_points(buckets, seconds, sharing))
    if link is None:
        return None
    uneven = max(0.0, mean(lengths) - statistics.median(lengths))
    return LinkObservation(link, buckets, exposed_seconds, mean(hidden), mean(lengths), uneven)


def _hides_bytes(link: LinkModel, buckets: Sequence[BucketLoad], seconds: Sequence[float]) -> bool:
    """Return whether a fit takes buckets to cost rounds and hardly any bytes, where these must have cost some."""
    rounds = sum(bucket.rounds for bucket in buckets) * link.latency_seconds
    is_large = max(bucket.sent_bytes for bucket in buckets) > _LARGE_BYTES
    carried = sum(bucket.sent_bytes for bucket in buckets) / sum(seconds)
    is_long = link.latency_seconds > _LONG_SECONDS and carried > _SLOW_BYTES_PER_SECOND
    return (is_large or is_long) and rounds > 0.5 * sum(seconds)


def _points(
    buckets: Sequence[BucketLoad], seconds: Sequence[float], sharing: Sequence[bool]
) -> tuple[list[float], list[float], list[float]]:
    """Return bytes, rounds and seconds to fit a link to: those of buckets that share the wire are one point.

    A bucket that leaves while the one before it travels takes as long as both together, whatever its own bytes.
    And buckets of like size do not tell what bytes cost beside rounds.
    """
    sizes = [bucket.sent_bytes for bucket in buckets]
    if max(sizes) <= _ALIKE * min(sizes):
        sharing = [True] * len(buckets)
    sent: list[float] = []
    rounds: list[float] = []
    taken: list[float] = []
    for bucket, turn, is_shared in zip(buckets, seconds, sharing, strict=True):
        if is_shared and sent:
            sent[-1] += bucket.sent_bytes
            rounds[-1] = max(rounds[-1], bucket.rounds)
            taken[-1] += turn
        else:
            sent.append(bucket.sent_bytes)
            rounds.append(bucket.rounds)
            taken.append(turn)
    return sent, rounds, taken


def _as_long_together(seconds: Sequence[float], total: float) -> list[float]:
    """Return the buckets' times stretched alike, so that together they take `total`.

    When there are many short buckets, each takes far longer in some steps than in the middle one, another one each
    time: the sum of the middle times is then much less than any step's.
    """
    together = sum(seconds)
    return [each * total / together for each in seconds]


def _usual_count(table: StepTable, place: int) -> int:
    counts = [
        len(row.exchanges[place].buckets) for own in table.rows for row in own if len(row.exchanges) >= -place
    ]
    return statistics.mode(counts) if counts else 0


def _typical(steps: Sequence[tuple[Sequence[StepRow], Sequence[WireTime | None]]]) -> int:
    """Return the place of the exchange that stands for a step's, from the end: -1 is the last.

    See [Note: which exchange of a step].
    """
    counts = [len(row.exchanges) for rows, _ in steps for row in rows]
    usual = statistics.mode(counts) if counts else 0
    alike = [each for each in steps if all(len(row.exchanges) == usual for row in each[0])]
    if usual < 2 or not alike:
        return -1
    places = range(-usual, 0)
    waited = {
        place: mean([max(_waited(row.exchanges[place]) for row in rows) for rows, _ in alike]) for place in places
    }
    alone = [place for place in places if mean([_is_alone(wires, place) for _, wires in alike]) > _OFTEN]
    usually = mean(list(waited.values()))
    candidates = alone if any(waited[place] > 0.5 * usually for place in alone) else list(places)
    longest = max(waited[place] for place in candidates)
    return max(place for place in candidates if waited[place] >= 0.5 * longest)


def _waited(exchange: ExchangeRow) -> float:
    return exchange.wait_end_seconds - exchange.wait_begin_seconds


def _is_alone(wires: Sequence[WireTime | None], place: int) -> bool:
    """Return whether nothing of another exchange is on the wire with one."""
    hulls = [wire and (min(begin for begin, _ in wire.spans), max(end for _, end in wire.spans)) for wire in wires]
    own = hulls[place]
    others = [hull for number, hull in enumerate(hulls, start=-len(hulls)) if number != place]
    return own is not None and all(o is None or o[1] <= own[0] or o[0] >= own[1] for o in others)


def _bucket(
    by_rank: Sequence[Sequence[BucketTimes]], number: int, ends: Sequence[float], seconds: float
) -> _TimedBucket:
    # The rank that was last to be ready is the nearest to the end of its computing.
    ready = [buckets[number].launch_seconds - end for buckets, end in zip(by_rank, ends, strict=True)]
    last = max(range(len(by_rank)), key=lambda rank: ready[rank])
    chosen = by_rank[last][number]
    first = chosen.first_ready_seconds if chosen.first_ready_seconds is not None else chosen.launch_seconds
    sent = statistics.median([buckets[number].sent_bytes for buckets in by_rank])
    load = BucketLoad(
        chosen.nbytes, sent, chosen.rounds, ready_seconds=min(0.0, ready[last]),
        first_ready_seconds=min(0.0, first - ends[last]),
    )  # fmt: skip
    return _TimedBucket(load, seconds)


def _median(values: Sequence[_TimedBucket]) -> _TimedBucket:
    *columns, _ = zip(*(bucket.load for bucket in values), strict=True)  # the last, `is_serial`, is no number
    load = BucketLoad._make([*(float(statistics.median(column)) for column in columns), False])
    return _TimedBucket(load, statistics.median([bucket.seconds for bucket in values]))


def _usual_mean(values: Sequence[float]) -> float:
    """Return the mean without the longest tenth: a stall now and then is no property of the link."""
    usual = sorted(values)[: max(1, math.floor(_USUAL_SHARE * len(values)))]
    return mean(usual)


# A link that is slower than the others: by what the kernels counted, link by link, or by when exchanges end.
#
# [Note: whose link it is] A host with a slow link is at an end of slow links only. Where every host is at an end
# of some fast link, one direction is slow: then that direction is named, since either end may be the cause.


_ODD_END_SHARE = 0.2
_TIMES_SLOWER = 2.0
_BUSY_PART = 0.5
"""Fraction of the exposed time: a link that limits an exchange is busy while all wait for it."""
_LEAST_GAIN = 0.5
"""Fraction of the exposed time: if a link like the others would save less, it is not the limit."""
_BURST_BYTES = 2**18
"""So many bytes may leave at once, whatever a link carries in a second: buffers, and the bursts of a shaper."""
_LINKS_SHOWN = 4
_MOST_BYTES_PER_SECOND = 50e9
"""A faster link (400 Gbit/s) is no link but an error of the fit."""


def find_slow_link(
    table: StepTable, network: LinkObservation | None, seconds: float, share: float
) -> Finding | None:
    """Return the link that is slower than the others, if there is one. `seconds`: exposed communication."""
    links = links_between_hosts(table.records.timelines)
    if links:  # where the kernels counted, when an exchange ends says nothing more: a busy core delays it too
        return _by_links(links, table, network, seconds, share) if _has_rates(table) else None
    return _by_ends(table, network, seconds, share)


def link_line(network: LinkObservation) -> str:
    """Return what the buckets say of the link, in words."""
    link, count = network.link, len(network.buckets)
    text = f"{count} bucket{'s' * (count != 1)}, {format_bytes(network.sent_bytes)} sent by a rank; "
    if math.isinf(link.bytes_per_second):
        return f"{text}they take {format_seconds(link.latency_seconds)} a round however many bytes they have"
    if link.bytes_per_second > _MOST_BYTES_PER_SECOND:
        return f"{text}they take so little time that no bandwidth can be told"
    text += f"the link carries {format_bytes(link.bytes_per_second)} a second"
    if link.latency_seconds > 0:
        return f"{text} with {format_seconds(link.latency_seconds)} a round"
    return f"{text} (all buckets alike: their rounds are counted in this)"


def _has_rates(table: StepTable) -> bool:
    """Return whether steps send so much that bytes over time are a rate: less may go in one burst."""
    sent = [sum(each.sent_bytes for each in row.exchanges) for own in table.rows for row in own]
    known = [each for each in sent if each]
    return not known or statistics.median(known) >= _BURST_BYTES


# -- by link ------------------------------------------------------------------------------------


def _by_links(
    links: Sequence[HostTraffic], table: StepTable, network: LinkObservation | None, seconds: float, share: float
) -> Finding | None:
    slow, fast = _parted(sorted(links, key=lambda link: link.bytes_per_second))
    if not slow or max(link.busy_share for link in slow) < _BUSY_PART * share:
        return None
    hosts = tuple(dict.fromkeys(end for link in slow for end in (link.source, link.target)))
    suspects = tuple(host for host in hosts if all(host not in (link.source, link.target) for link in fast))
    named = suspects or hosts
    ranks = tuple(
        rank for rank, records in zip(table.ranks, table.records.timelines, strict=True) if records.host in named
    )
    evidence = [f"while something is on them: {_listed(slow)}; but {_listed(reversed(fast))}"]
    ratio = statistics.median([w.bytes_per_second for w in slow]) / fast[0].bytes_per_second
    rate = format_bits_per_second(8 * fast[0].bytes_per_second)
    gain = Gain(seconds * (1 - ratio), f"the same bytes at {rate}: the exposed time in proportion")
    if network is not None:
        evidence.append(link_line(network))
        if network.link.bytes_per_second <= _MOST_BYTES_PER_SECOND:
            saved = seconds * (1 - network.exposed_with_codec(ratio) / network.exposed_seconds)
            gain = Gain(saved, f"the same bytes at {rate}, replayed")
        if gain.seconds < _LEAST_GAIN * seconds:
            return None
    if suspects:
        whose = f"the link of {name_ranks(ranks, most=SHOWN_RANKS, hosts=suspects)} is slower than the others'"
        what = "a link as fast as the others' (see its card, cable and switch port)"
        paste = f"ethtool INTERFACE | grep -E 'Speed|Duplex'; ip -s link  # on {', '.join(suspects)}"
    else:
        first = slow[0]
        whose = f"the way from {first.source} to {first.target} is slower than the others"
        what = "the same rate both ways (see the cards, cables and switch ports of both ends)"
        paste = doctor_line(table.records, hosts)
    fix = Fix(what, paste, gain)
    title = f"{whose}: {format_cost(seconds, share)}"
    return Finding(
        "slow-link", title, seconds, share, ranks, named, "exchange", tuple(evidence), (fix,),
        confidence(len(table.steps)),
    )  # fmt: skip


def _parted(links: Sequence[HostTraffic]) -> tuple[list[HostTraffic], list[HostTraffic]]:
    """Return the slow and the fast links: on both sides of the widest gap; none where there is no wide one."""
    gaps = [
        (later.bytes_per_second / earlier.bytes_per_second, number)
        for number, (earlier, later) in enumerate(itertools.pairwise(links), start=1)
    ]
    widest, at = max(gaps, default=(0.0, 0))
    if widest < _TIMES_SLOWER:
        return [], []
    return list(links[:at]), list(links[at:])


def _listed(links: Iterable[HostTraffic]) -> str:
    texts = [
        f"{link.source} to {link.target} {format_bits_per_second(8 * link.bytes_per_second)}" for link in links
    ]
    more = f" and {len(texts) - _LINKS_SHOWN} more" if len(texts) > _LINKS_SHOWN else ""
    return ", ".join(texts[:_LINKS_SHOWN]) + more


# -- by when exchanges end ---------------------------------------------------------------------


def _by_ends(table: StepTable, network: LinkObservation | None, seconds: float, share: float) -> Finding | None:
    """Find the one host whose exchanges end at another time than those of the others: its link differs."""
    hosts = [records.host for records in table.records.timelines]
    names = list(dict.fromkeys(hosts))
    if network is None or not table.one_clock or len(names) < 3:
        return None
    ends = _end_by_host(table, hosts, names)
    if not ends:
        return None
    skews = {name: ends[name] - statistics.median([ends[o] for o in names if o != name]) for name in names}
    odd = max(skews, key=lambda name: abs(skews[name]))
    rest = [ends[name] for name in names if name != odd]
    skew = abs(skews[odd])
    floor = max(_ODD_END_SHARE * network.exposed_seconds, 3 * table.records.clock_error_seconds)
    if skew < floor or skew < 3 * (max(rest) - min(rest)):
        return None
    ranks = tuple(rank for rank, host in zip(table.ranks, hosts, strict=True) if host == odd)
    when, way = ("after", "receives") if skews[odd] > 0 else ("before", "sends")
    evidence = (
        f"exchanges end there {format_seconds(skew)} {when} the other hosts': it {way} slowly",
        link_line(network),
    )
    fix = Fix("measure this host's link beside the others'", "farandole bench collectives --hosts 2")
    who = name_ranks(ranks, most=SHOWN_RANKS, hosts=(odd,))
    title = f"the link of {who} is slower than the others': {format_cost(seconds, share)}"
    return Finding("slow-link", title, seconds, share, ranks, (odd,), "exchange", evidence, (fix,), "medium")


def _end_by_host(table: StepTable, hosts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Return when exchanges end on each host beside the first to end, median over steps."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for rows in zip(*table.rows, strict=True):
        if not all(row.exchanges for row in rows):
            continue
        last = [row.exchanges[-1].wait_end_seconds for row in rows]
        for name in names:
            own = [end for end, host in zip(last, hosts, strict=True) if host == name]
            found[name].append(statistics.median(own) - min(last))
    return {name: statistics.median(ends) for name, ends in found.items() if ends}
