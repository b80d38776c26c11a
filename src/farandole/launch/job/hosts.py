"""The hosts of a job, and how each of them is reached: decided once, and then the host's type says it.

`LocalHost` is this machine, `EmulatedHost` one that ``farandole emulate`` made of it, `SshHost` is elsewhere.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...core.vocabulary.errors import ConfigError
from .emulated_hosts import HostNamespaces, read_namespaces
from .host_list import HostSlots

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LocalHost(HostSlots):
    """This machine, whatever name the list has for it."""


@dataclass(frozen=True)
class SshHost(HostSlots):
    """A host that is reached over ssh, or by the command that takes its place."""


@dataclass(frozen=True)
class EmulatedHost(HostSlots):
    """A host that ``farandole emulate`` made of this machine."""

    namespaces: HostNamespaces = field(kw_only=True)


Host = LocalHost | EmulatedHost | SshHost


@dataclass(frozen=True)
class HostFinder:
    """Says of a host of a list how it is reached. One is made for each command."""

    emulated: tuple[HostNamespaces, ...] = ()
    always_ssh: bool = False
    """Whether even this machine is reached over ssh: a command that takes its place was named."""

    @classmethod
    def of_this_process(cls, *, always_ssh: bool = False) -> HostFinder:
        """Return the finder that knows the emulation that this process is inside of, if it is."""
        return cls(tuple(read_namespaces()), always_ssh)

    def find(self, host: HostSlots) -> Host:
        """Return the host as it is reached; an emulation knows hosts by name and by address.

        Raises `ConfigError` for a host that is not of the emulation.
        """
        values = {name: getattr(host, name) for name in ("name", "slots", "port", "chosen")}
        if not self.emulated:
            elsewhere = self.always_ssh or not _is_this_machine(host.name)
            return SshHost(**values) if elsewhere else LocalHost(**values)
        known = {name: each for each in self.emulated for name in (each.address, each.name)}
        namespaces = known.get(host.name)
        if namespaces is None and _is_this_machine(host.name):
            namespaces = known.get(socket.gethostname())
        if namespaces is None:
            raise ConfigError(
                f"host {host.name} is not one of the emulated hosts",
                remedy=f"they are {', '.join(each.name for each in self.emulated)}",
            )
        return EmulatedHost(**values, namespaces=namespaces)

    def find_all(self, hosts: Iterable[HostSlots]) -> list[Host]:
        """Return `hosts` as they are reached; of an empty list all hosts of the emulation, if there is one."""
        listed = list(hosts) or [HostSlots(each.name, each.slots) for each in self.emulated]
        return [self.find(host) for host in listed]

    @property
    def own_address(self) -> str:
        """The address by which hosts of the emulation reach this one; outside one the loopback address."""
        name = socket.gethostname()
        return next((host.address for host in self.emulated if host.name == name), LOOPBACK)


def need_ssh(hosts: Iterable[Host]) -> bool:
    """Return whether the ranks of `hosts` are started by agents: one of the hosts is reached over ssh."""
    return any(isinstance(host, SshHost) for host in hosts)


def rendezvous_address(hosts: Sequence[Host]) -> str:
    """Return where rank 0's host is reached by the others, of hosts that are all on this machine."""
    first = hosts[0] if hosts else None
    return first.namespaces.address if isinstance(first, EmulatedHost) else LOOPBACK


def _is_this_machine(name: str) -> bool:
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
