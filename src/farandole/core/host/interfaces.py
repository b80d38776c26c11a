"""Which network interface of this host leads to the others: the kernel's own choice of route, asked without tools.

A bridge of containers, a tunnel's end or the loopback interface is never taken where the peers are elsewhere.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..vocabulary.errors import LaunchError

_SIOCGIFCONF, _SIOCGIFNETMASK = 0x8912, 0x891B
_RECORD_BYTES = 40
_VIRTUAL = re.compile(r"lo|docker\d*|br-.+|veth.*|virbr.*|cni.*|flannel.*|cali.*|podman.*|lxc.*|kube-.*")


@dataclass(frozen=True)
class Address:
    """One address of one interface of this host."""

    interface: str
    address: str
    network: str
    """The network it is in, as ``10.0.0.0/24``."""

    @property
    def is_virtual(self) -> bool:
        """Whether other hosts can hardly be behind it."""
        return _VIRTUAL.fullmatch(self.interface) is not None


def own_addresses() -> list[Address]:
    """Return the addresses of this host's interfaces that are up."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        room = array.array("B", bytes(256 * _RECORD_BYTES))
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
        records = room.tobytes()[: struct.unpack("iL", answer)[0]]
        for start in range(0, len(records), _RECORD_BYTES):
            label = records[start : start + 16].partition(b"\0")[0]
            address = socket.inet_ntoa(records[start + 20 : start + 24])
            try:
                mask = fcntl.ioctl(asked, _SIOCGIFNETMASK, struct.pack("16s24x", label))[20:24]
            except OSError:
                mask = b"\xff" * 4
            network = ipaddress.ip_network(f"{address}/{socket.inet_ntoa(mask)}", strict=False)
            found.append(Address(label.decode().partition(":")[0], address, str(network)))
    return found + _own_ipv6_addresses()


def _own_ipv6_addresses() -> list[Address]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        digits, _, prefix, _, _, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        network = ipaddress.ip_network(f"{address}/{int(prefix, 16)}", strict=False)
        found.append(Address(name, str(address), str(network)))
    return found


def choose(peers: Sequence[str], own: Sequence[Address], local_address_towards: str | None) -> Address | None:
    """Return the address to be met at by `peers`; None when no interface leads to them.

    `local_address_towards` is what the kernel would send from.
    """
    routed = next((each for each in own if each.address == local_address_towards), None)
    if routed is None:
        return None
    mine = {each.address for each in own}
    elsewhere = [peer for peer in peers if peer not in mine and not ipaddress.ip_address(peer).is_loopback]
    if not elsewhere or not routed.is_virtual:
        return routed
    for each in own:
        network = ipaddress.ip_network(each.network)
        if not each.is_virtual and any(ipaddress.ip_address(peer) in network for peer in elsewhere):
            return each
    return next((each for each in own if not each.is_virtual and ":" not in each.address), None)


def towards(peers: Sequence[str]) -> Address:
    """Return which of this host's addresses the peers meet; raise `LaunchError` when no route leads to them."""
    own = own_addresses()
    for peer in peers:
        chosen = choose(peers, own, _local_address(peer))
        if chosen is not None:
            return chosen
    have = ", ".join(f"{each.interface} {each.address}" for each in own)
    raise LaunchError(f"no interface leads to {', '.join(peers)}; this host has {have or 'none'}")


def interface_of_node(meeting_point: str, others: Sequence[str] = (), *, is_first: bool) -> str:
    """Return the interface by which a node of several reaches the rest; "" where nothing says so.

    `meeting_point` is a name or an address of the first node, `others` are some of the other nodes. On the first
    node its own name may mean a loopback address (Debian's ``127.0.1.1``), at which the others would find no
    process of the job: without `others` nothing is chosen then.
    """
    names = [*others, meeting_point] if is_first else [meeting_point]
    addresses = [address for name in names for address in _resolved(name)]
    elsewhere = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if not addresses or (is_first and not others and not elsewhere):
        return ""
    try:
        return towards(elsewhere or addresses).interface
    except LaunchError:
        return ""


def _resolved(name: str) -> list[str]:
    """Return the addresses of a host; an empty list when it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def _local_address(peer: str) -> str | None:
    """Return the address from which the kernel would send to `peer`. Nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
