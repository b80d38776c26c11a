"""Between hosts: whether calls get through in both directions, and whether a link is weaker than the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from ....core.vocabulary.units import format_bits_per_second, format_seconds
from ..facts import ClusterFacts, ClusterFinding, Findings, LinkFacts

WEAK_SHARE = 0.5
"""Fraction of the median link's rate; a link below it delays all ranks."""
CARD_SHARE = 0.5
"""Fraction of the negotiated speed."""
LONG_ROUND_TRIP_SECONDS = 0.005
SLOW_BITS_PER_SECOND = 100e6
CONNECTION_MEGABITS = 20_000
"""Above it one connection of this measurement may be the limit, and nothing is said about the card."""


def check_connections(facts: ClusterFacts) -> Findings:
    """A call on a fresh port gets through, in both directions."""
    failed = {(link.source, link.target) for link in facts.links if link.problem}
    for link in facts.links:
        if not link.problem:
            continue
        one_way = (link.target, link.source) not in failed
        what = (
            f"{link.source} cannot call {link.target} on a port of {link.address or 'no address'}: {link.problem}"
        )
        if one_way:
            what += f" ({link.target} can call {link.source})"
        yield ClusterFinding(what, _why(link), _fix(facts, link), host=link.target)


def _why(link: LinkFacts) -> str:
    if link.problem in ("timed out", "refused", "reset"):
        return "ranks listen on ports that the system chooses: a firewall in between stops every job at its start"
    return "ranks of these hosts cannot connect"


def _fix(facts: ClusterFacts, link: LinkFacts) -> str:
    caller = next((host.address for host in facts.hosts if host.name == link.source), "") or link.source
    if link.problem in ("timed out", "refused", "reset"):
        return f"sudo ufw allow from {caller}    (or: sudo firewall-cmd --zone=trusted --add-source={caller})"
    return f"on {link.source}: ping -c 3 {link.address or link.target}; ip route get {link.address or link.target}"


def weakest_link(facts: ClusterFacts) -> LinkFacts | None:
    """Return the link with the lowest rate; None when none was measured."""
    measured = [link for link in facts.links if link.bits_per_second]
    return min(measured, key=lambda link: link.bits_per_second or 0.0, default=None)


def check_rates(facts: ClusterFacts) -> Findings:
    """No link is much weaker than the others or its cards, and messages do not take long."""
    measured = [link for link in facts.links if link.bits_per_second]
    yield from _weak_links(measured)
    yield from _below_card(facts, measured)
    slowest = weakest_link(facts)
    if slowest is not None and (rate := slowest.bits_per_second or 0.0) < SLOW_BITS_PER_SECOND:
        yield ClusterFinding(
            f"the weakest link carries {format_bits_per_second(rate)}",
            "gradients of 10 million parameters take "
            f"{format_seconds(40e6 * 8 / rate)} a step over it when nothing is made small",
            "farandole run --set codec=auto --set lossy=true -- python train.py",
            "note",
        )
    for link in facts.links:
        if link.round_trip_seconds is not None and link.round_trip_seconds > LONG_ROUND_TRIP_SECONDS:
            yield ClusterFinding(
                f"{link.source} -> {link.target}: {format_seconds(link.round_trip_seconds)} there and back",
                "small exchanges cost a round trip each; hosts of one room need less than a millisecond",
                f"ping -c 10 {link.address or link.target}    (wireless? another building? a VPN?)",
                "warning",
                link.source,
            )


def _weak_links(measured: list[LinkFacts]) -> Findings:
    if len(measured) < 2:
        return
    usual = statistics.median(_rate(link) for link in measured)
    best = max(_rate(link) for link in measured)
    if len(measured) == 2:
        usual = best  # of two directions the faster one shows what is possible
    weak = {(link.source, link.target): link for link in measured if _rate(link) < WEAK_SHARE * usual}
    for (source, target), link in weak.items():
        if (target, source) not in weak or source < target:
            yield ClusterFinding(
                f"{_both_ways(link, weak)}, others {format_bits_per_second(usual)}",
                "every exchange of all ranks waits for the weakest link",
                f"on {link.source} and {link.target}: cable, port, `ethtool -S INTERFACE`; "
                "what else uses the link",
                "warning",
            )


def _both_ways(link: LinkFacts, weak: Mapping[tuple[str, str], LinkFacts]) -> str:
    back = weak.get((link.target, link.source))
    if back is None:
        return f"{link.source} -> {link.target} carries {format_bits_per_second(_rate(link))}"
    rates = f"{format_bits_per_second(_rate(link))} and {format_bits_per_second(_rate(back))}"
    return f"{link.source} <-> {link.target} carries {rates}"


def _rate(link: LinkFacts) -> float:
    return link.bits_per_second or 0.0


def _below_card(facts: ClusterFacts, measured: list[LinkFacts]) -> Findings:
    speeds = {
        host.name: each.speed_megabits
        for host in facts.hosts
        if (each := host.network.interface) is not None and each.speed_megabits and not each.is_virtual
    }
    for link in measured:
        if link.source not in speeds or link.target not in speeds:
            continue
        card = min(speeds[link.source] or 0, speeds[link.target] or 0)
        rate = _rate(link)
        if card <= CONNECTION_MEGABITS and rate < CARD_SHARE * card * 1e6:
            yield ClusterFinding(
                f"{link.source} -> {link.target} carries {format_bits_per_second(rate)}, "
                f"its cards negotiated {format_bits_per_second(card * 1e6)}",
                "another user of the network, a slower switch on the way, or errors that cost retransmissions",
                "ethtool -S INTERFACE | grep -iE 'err|drop'; nstat -z TcpRetransSegs",
                "warning",
            )
