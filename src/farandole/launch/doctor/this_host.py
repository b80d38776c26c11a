"""What this host can say of itself, None for what it cannot learn."""

from __future__ import annotations

import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.env import read_ssh_connection, set_variables
from ...core.host.installed import package_version, working_directory_commit
from ...core.host.interfaces import Address, own_addresses, towards
from ...core.host.open_sockets import congestion_control
from ...core.vocabulary.errors import LaunchError
from ...version import VERSION
from .facts import (
    HostFacts,
    HostNetwork,
    Interface,
    Resources,
    ask_command,
    read_cores,
    read_gpus,
    read_limits,
    read_memory,
    read_shared_memory,
)

LOOKUP_SECONDS = 3.0
_SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NO_CARDS = {
    "veth", "bridge", "tun", "dummy", "ipvlan", "ipvtap", "macvlan", "macvtap", "bond", "team", "vlan"
}  # fmt: skip
"""Kinds of links whose speed is made up, or that of something else."""
_NO_SPEED = (0, 0xFFFF)
_IP_SECONDS = 2.0


def read_this_host() -> HostFacts:
    """Return everything that needs no other host."""
    network = HostNetwork(
        interfaces=tuple(read_interfaces()),
        environment=set_variables(_SOCKET_INTERFACES),
        infiniband=_names(Path("/sys/class/infiniband")),
        congestion_control=congestion_control() or "",
    )
    resources: dict[str, Any] = {
        **read_memory(), **read_shared_memory(), **read_limits(), **read_cores(), **read_gpus(),
    }  # fmt: skip
    return HostFacts(
        name="",
        hostname=socket.gethostname(),
        address=read_ssh_connection()[1],
        python=platform.python_version(),
        executable=sys.executable,
        torch=package_version("torch"),
        farandole=VERSION,
        commit=working_directory_commit() or "",
        network=network,
        resources=Resources(**resources),
    )


def read_interfaces() -> list[Interface]:
    """Return all network interfaces, those without an address too.

    Nothing is read from /sys: what is mounted there may belong to another network namespace (containers, emulated
    hosts). Sockets and /proc/net tell of the namespace of this process.
    """
    import psutil  # not above: commands that look at no host start in milliseconds

    addresses: list[Address] = []
    states: Mapping[str, Any] = {}
    with suppress(OSError):
        addresses = own_addresses()
    with suppress(OSError):
        states = psutil.net_if_stats()
    duplexes = {psutil.NIC_DUPLEX_HALF: "half", psutil.NIC_DUPLEX_FULL: "full"}
    kinds = _kinds_of_links()
    found = []
    for _, name in socket.if_nameindex():
        state, kind = states.get(name), kinds.get(name)
        card = None if kind is None or kind in _NO_CARDS else state
        found.append(
            Interface(
                name,
                tuple(each.address for each in addresses if each.interface == name),
                is_up=state and state.isup,
                is_virtual=kind == "bridge" or Address(name, "", "").is_virtual,
                mtu_bytes=state and state.mtu,
                speed_megabits=card.speed if card and card.speed not in _NO_SPEED else None,
                duplex=duplexes.get(card.duplex, "") if card else "",
            )
        )
    return found


def _kinds_of_links() -> dict[str, str]:
    """Return the kind of each link as `ip` has it, "" for a card; nothing where there is no ip that tells."""
    text = ask_command("ip", ["-json", "-details", "link"], _IP_SECONDS)
    with suppress(ValueError):
        links = [link for link in json.loads(text or "[]") if "ifname" in link]
        return {link["ifname"]: link.get("linkinfo", {}).get("info_kind", "") for link in links}
    return {}


def read_routes(peers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return by which address and interface each peer, a name and an address, is reached."""
    found = {name: {"peer_address": address} for name, address in peers.items()}
    for name, address in peers.items():
        with suppress(LaunchError, OSError, ValueError):
            own = towards([address])
            found[name] |= {"own_address": own.address, "interface": own.interface}
    return found


def look_up(names: Sequence[str], seconds: float = LOOKUP_SECONDS) -> dict[str, list[str] | None]:
    """Return the addresses of each name: none for an unknown name, None after a time-out.

    A name server that does not answer would hold a lookup for half a minute.
    """
    found: dict[str, list[str] | None] = dict.fromkeys(names)
    # Daemon threads: one that hangs in the resolver does not keep the process from ending.
    threads = [threading.Thread(target=_look_up, args=(name, found), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def _look_up(name: str, found: dict[str, list[str] | None]) -> None:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found[name] = []
    else:
        found[name] = sorted({str(address[0]) for *_, address in answers})


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in directory.iterdir() if path.is_dir()))
    except OSError:
        return ()
