"""Interfaces: whether the route to the others takes the right one, and its settings are alike on all hosts."""

from __future__ import annotations

from collections import Counter

from ....core.host.congestion import PACED, USUAL
from ..facts import ClusterFacts, ClusterFinding, Findings, HostFacts, Interface

LEAST_MTU_BYTES = 1280
"""What every network that carries IPv6 must carry (RFC 8200)."""
SLOW_MEGABITS = 100


def check_routes(facts: ClusterFacts) -> Findings:
    """Every peer is reached, and not by a bridge of containers or the loopback."""
    for host in facts.hosts:
        cut_off = [peer for peer, route in host.network.routes.items() if not route.interface]
        if cut_off:
            peer = cut_off[0]
            address = host.network.routes[peer].peer_address
            yield ClusterFinding(
                f"{host.name} has no route to {' and '.join(cut_off)} ({address})",
                "its ranks cannot meet the others",
                f"ip route get {address}; then: ip route add {address} dev {_usable(host)}",
                host=host.name,
            )
        chosen = host.network.interface
        if chosen is not None and chosen.is_virtual:
            yield ClusterFinding(
                f"{host.name} reaches the other hosts by {chosen.name}, "
                f"{'the loopback' if chosen.name == 'lo' else 'a bridge or tunnel of containers'}",
                "the others get an address that only this host knows, and wait for it until the time-out",
                f"name the others by their addresses on the network of {_usable(host)}, or: "
                f"ip addr flush dev {chosen.name}",
                host=host.name,
            )
        if chosen is not None and chosen.is_up is False:
            yield ClusterFinding(
                f"{chosen.name} of {host.name}, which leads to the other hosts, is down",
                "nothing arrives",
                f"ip link set {chosen.name} up",
                host=host.name,
            )


def check_socket_variables(facts: ClusterFacts) -> Findings:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where set, name the interface that leads to the others."""
    for host in facts.hosts:
        names = {each.name for each in host.network.interfaces}
        for variable, text in host.network.environment.items():
            # NCCL takes a list of beginnings, =exact names and ^exclusions; gloo takes one name.
            wanted = text.lstrip("=") if variable.startswith("NCCL") else text
            if text.startswith("^") or "," in wanted or not names:
                continue
            exact = not variable.startswith("NCCL") or text.startswith("=")
            there = [name for name in names if name == wanted or (not exact and name.startswith(wanted))]
            chosen = host.network.interface
            if not there:
                yield ClusterFinding(
                    f"{variable}={text} on {host.name}, which has no such interface",
                    "ranks fail when they connect",
                    f"unset {variable}" if chosen is None else f"export {variable}={chosen.name}",
                    host=host.name,
                )
            elif chosen is not None and chosen.name not in there:
                yield ClusterFinding(
                    f"{variable}={text} on {host.name}, but the route to the other hosts takes {chosen.name}",
                    "ranks listen where the others do not call, or take the slower network",
                    f"unset {variable}",
                    "warning",
                    host.name,
                )


def check_mtu(facts: ClusterFacts) -> Findings:
    """The largest frame is the same on all hosts, and large ones arrive."""
    for link in facts.links:
        if link.stalled:
            yield ClusterFinding(
                f"{link.source} -> {link.target}: small messages arrive, large ones do not",
                "something on the way drops large frames, so jobs connect and then stand still",
                f"ping -M do -s 1472 {link.address}; ip link set dev {_by(facts, link.source)} mtu 1400",
                host=link.source,
            )
    chosen = _chosen(facts)
    known = [each.mtu_bytes for each in chosen.values() if each.mtu_bytes]
    if len(set(known)) > 1:
        usual = _usual(known)
        for name, each in chosen.items():
            if each.mtu_bytes not in (None, usual):
                yield ClusterFinding(
                    f"{name} has an MTU of {each.mtu_bytes} on {each.name}, others have {usual}",
                    "frames too large for the receiver are dropped silently: jobs connect and hang",
                    f"ip link set dev {each.name} mtu {usual}",
                    host=name,
                )
    for name, each in chosen.items():
        if each.mtu_bytes is not None and each.mtu_bytes < LEAST_MTU_BYTES:
            yield ClusterFinding(
                f"{name} has an MTU of {each.mtu_bytes} on {each.name}, below {LEAST_MTU_BYTES}",
                "every frame carries little, and IPv6 does not work at all",
                f"ip link set dev {each.name} mtu 1500",
                "warning",
                name,
            )


def check_link_speeds(facts: ClusterFacts) -> Findings:
    """Cards negotiated what they can, and the same on all hosts."""
    chosen = _chosen(facts)
    fastest = max((each.speed_megabits for each in chosen.values() if each.speed_megabits), default=0)
    for name, each in chosen.items():
        if each.duplex == "half":
            yield ClusterFinding(
                f"{each.name} of {name} runs half duplex",
                "it cannot send and receive at once, and collides: a small part of its speed is left",
                f"ethtool -s {each.name} autoneg on",
                host=name,
            )
        speed = each.speed_megabits
        if speed is None:
            continue
        if speed <= SLOW_MEGABITS:
            yield ClusterFinding(
                f"{each.name} of {name} negotiated {speed} Mbit/s",
                "gigabit cards fall back to this with a bad cable or port; all ranks wait in every step",
                f"change the cable or the port, then: ethtool {each.name} | grep Speed",
                "warning",
                name,
            )
        elif speed < fastest:
            yield ClusterFinding(
                f"{each.name} of {name} has {speed} Mbit/s, the fastest host {fastest}",
                "a collective is as fast as the slowest of its hosts",
                f"ethtool {each.name} | grep -E 'Speed|modes'",
                "warning",
                name,
            )


def check_congestion_control(facts: ClusterFacts) -> Findings:
    """TCP decides its rate by what suits bursts. See [Note: bursts and pacing] in `core.congestion`."""
    if len(facts.hosts) < 2:
        return
    for host in facts.hosts:
        if host.network.congestion_control in PACED:
            yield ClusterFinding(
                f"TCP of {host.name} uses {host.network.congestion_control}",
                "it paces what it sends by a rate learned before a pause; training sends in bursts, and "
                f"some of them then take several times as long as with {USUAL}",
                f"farandole run --set congestion_control={USUAL} -- python train.py   # or: "
                f"sysctl -w net.ipv4.tcp_congestion_control={USUAL}",
                "note",
                host.name,
            )


def _chosen(facts: ClusterFacts) -> dict[str, Interface]:
    return {host.name: each for host in facts.hosts if (each := host.network.interface) is not None}


def _by(facts: ClusterFacts, name: str) -> str:
    chosen = _chosen(facts).get(name)
    return "eth0" if chosen is None else chosen.name


def _usable(host: HostFacts) -> str:
    """Return the interface of a host that others may be behind."""
    real = [
        each.name
        for each in host.network.interfaces
        if each.addresses and not each.is_virtual and each.name != "lo"
    ]
    return real[0] if real else "INTERFACE"


def _usual(values: list[int]) -> int:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))
