"""The network interfaces of this host, asked from the kernel through a socket.

Not through /sys: what is mounted there may belong to another network namespace (containers, emulated hosts).
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct

from ....core.host.interfaces import Address, own_addresses
from .facts import Interface

_SIOCGIFFLAGS, _SIOCGIFMTU, _SIOCETHTOOL = 0x8913, 0x8921, 0x8946
_UP, _RUNNING = 0x1, 0x40
_GET_SETTINGS, _GET_DRIVER = 0x1, 0x3
_SETTINGS = struct.Struct("=III HBB BBBB II HBB III")
"""struct ethtool_cmd of linux/ethtool.h."""
_DRIVER_BYTES = 196
_NO_SPEED = (0, 0xFFFF, 0xFFFFFFFF)
_NO_CARDS = ("veth", "bridge", "tun", "dummy", "ipvlan", "macvlan", "bonding", "team", "802.1Q VLAN Support")
"""Drivers whose speed is made up, or that of something else."""


def read_interfaces() -> list[Interface]:
    """Return all network interfaces, those without an address too."""
    try:
        addresses = own_addresses()
    except OSError:
        addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return [_read(asked, name, addresses) for _, name in socket.if_nameindex()]


def _read(asked: socket.socket, name: str, addresses: list[Address]) -> Interface:
    mine = [each for each in addresses if each.interface == name]
    flags = _ask(asked, _SIOCGIFFLAGS, name, "=H")
    driver = _driver(asked, name)
    speed, duplex = (None, "") if driver in _NO_CARDS else _settings(asked, name)
    return Interface(
        name,
        tuple(each.address for each in mine),
        is_up=None if flags is None else flags & _UP != 0 and flags & _RUNNING != 0,
        is_virtual=driver == "bridge" or Address(name, "", "").is_virtual,
        mtu_bytes=_ask(asked, _SIOCGIFMTU, name, "=i"),
        speed_megabits=speed,
        duplex=duplex,
    )


def _ask(asked: socket.socket, question: int, name: str, kind: str) -> int | None:
    try:
        answer = fcntl.ioctl(asked, question, struct.pack("16s24x", name.encode()[:15]))
    except OSError:
        return None
    return int(struct.unpack_from(kind, answer, 16)[0])


def _driver(asked: socket.socket, name: str) -> str:
    answer = _ask_card(asked, name, _GET_DRIVER, _DRIVER_BYTES)
    return "" if answer is None else answer[4:36].partition(b"\0")[0].decode(errors="replace")


def _settings(asked: socket.socket, name: str) -> tuple[int | None, str]:
    """Return speed in Mbit/s and duplex; None and "" where the card does not say."""
    answer = _ask_card(asked, name, _GET_SETTINGS, _SETTINGS.size)
    if answer is None:
        return None, ""
    values = _SETTINGS.unpack(answer)
    low, duplex, high = values[3], values[4], values[12]
    speed = high << 16 | low
    return (None if speed in _NO_SPEED else speed), {0: "half", 1: "full"}.get(duplex, "")


def _ask_card(asked: socket.socket, name: str, question: int, size: int) -> bytes | None:
    room = array.array("B", struct.pack("=I", question) + bytes(size - 4))
    try:
        fcntl.ioctl(asked, _SIOCETHTOOL, struct.pack("16sP16x", name.encode()[:15], room.buffer_info()[0]))
    except OSError:
        return None
    return room.tobytes()
