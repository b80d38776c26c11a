"""A link that is slower than the others: by what the kernels counted, link by link, or by when exchanges end.

[Note: whose link it is] A host with a slow link is at an end of slow links only. Where every host is at an end of
some fast link, one direction is slow: then that direction is named, since either end may be the cause.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from ....core.vocabulary.rank_lists import name_ranks
from ....core.vocabulary.units import format_bits_per_second, format_bytes, format_seconds
from ...read.link_traffic import HostTraffic, links_between_hosts
from ..facts.finding import SHOWN_RANKS, Finding, Fix, Gain, confidence, format_cost
from ..facts.proposals import doctor_line
from ..facts.step_table import StepTable
from .network import LinkObservation

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
