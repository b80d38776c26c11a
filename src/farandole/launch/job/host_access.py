"""How the hosts of a job are reached: this machine, hosts that ``farandole emulate`` made of it, or ssh."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError
from .emulated_hosts import EmulatedHost
from .host_list import HostSlots

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostAccess:
    """What starts the ranks of each host, and where rank 0's host is met by the others."""

    address: str = LOOPBACK
    emulated: Mapping[str, EmulatedHost] | None = None
    """By name in the list, the namespaces of each host; None: no host is emulated."""
    over_ssh: bool = False
    """Whether there are hosts elsewhere: all are reached as `launch.ssh` does."""

    def host(self, name: str) -> EmulatedHost | None:
        """Return where to start the ranks of a host of the list; None: right here."""
        return None if self.emulated is None else self.emulated[name]


def backend_for(hosts: Sequence[HostSlots], emulated: Sequence[EmulatedHost] = ()) -> HostAccess:
    """Return how to reach `hosts`, a list as written; `emulated` are the namespaces there are.

    Hosts that are all this machine (under one name or several) start here; hosts of an emulation by
    name or address start in their namespaces; without an emulation, other hosts are reached over ssh.
    Raises `ConfigError` for a host that is not of the emulation.
    """
    if not hosts:
        return HostAccess()
    if all(is_this_machine(host.name) for host in hosts) and not emulated:
        return HostAccess()
    if not emulated:
        return HostAccess(over_ssh=True)
    known = {name: host for host in emulated for name in (host.address, host.name)}
    found: dict[str, EmulatedHost] = {}
    for wanted in hosts:
        host = known.get(wanted.name)
        if host is None and is_this_machine(wanted.name):
            host = known.get(socket.gethostname())
        if host is None:
            raise ConfigError(
                f"host {wanted.name} is not one of the emulated hosts",
                remedy=f"they are {', '.join(host.name for host in emulated)}",
            )
        found[wanted.name] = host
    return HostAccess(found[hosts[0].name].address, found)


def is_this_machine(name: str) -> bool:
    """Return whether `name` is this machine, without asking a name server.

    A name with a domain counts when its first part is this machine's name and this machine's own name
    does not say otherwise.
    """
    try:
        return _has_address(str(ipaddress.ip_address(name)))
    except ValueError:
        pass
    name, mine = name.lower().rstrip("."), socket.gethostname().lower()
    if name in ("localhost", "localhost.localdomain", mine):
        return True
    short, _, domain = name.partition(".")
    my_short, _, my_domain = mine.partition(".")
    return short == my_short and (not domain or not my_domain)


def _has_address(address: str) -> bool:
    """An address is ours when a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return address in (LOOPBACK, "::1")
    return not ipaddress.ip_address(address).is_unspecified
