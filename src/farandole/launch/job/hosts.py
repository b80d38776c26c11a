"""The hosts of a job, and how each of them is reached: decided once, and then the host's type says it.

`LocalHost` is this machine, `EmulatedHost` one that ``farandole emulate`` made of it, `SshHost` is elsewhere.

One reader takes the host files of Horovod and DeepSpeed (``node1 slots=4``), of Open MPI
(``node1 slots=2 max-slots=4``, a bare ``node1`` is one slot, comments, blank lines) and ``node1:4``.
A reader does not ask whether a host exists.

>>> parse_hosts("node1:2,node2:4")
[HostSlots(name='node1', slots=2, port=None, chosen=()), HostSlots(name='node2', slots=4, port=None, chosen=())]
"""

from __future__ import annotations

import ctypes
import dataclasses
import ipaddress
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ...core import env
from ...core.vocabulary.errors import ConfigError, LaunchError
from ...core.vocabulary.text import did_you_mean, quoted

# Lists of hosts as people write them: ``-H``, host files, ``--include`` and ``--exclude``. Pure parsing.

MOST_SLOTS = 4096
MOST_PORT = 65535
MOST_FILE_CHARACTERS = 1 << 22
"""Largest host file: enough for any cluster, and a bound for /dev/zero."""
# A name never begins with a hyphen: ssh would take it for an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LINE_FORMAT = "expected a line such as: node1 slots=4"
_LINE_KEYS = ("slots", "max-slots", "port")


@dataclass(frozen=True)
class HostSlots:
    """One host of a list: its name or address, and how many ranks it takes."""

    name: str
    slots: int
    port: int | None = None
    """Port of its ssh server; None: the usual one."""
    chosen: tuple[int, ...] = ()
    """Numbers of the slots to use, where ``--include`` or ``--exclude`` chose some; empty: all of them."""


def parse_hosts(text: str) -> list[HostSlots]:
    """Parse ``host:slots,host:slots`` of -H; a host named twice gets the sum, as with mpirun.

    Raises `ConfigError` naming the piece that is wrong.
    """
    found: dict[str, HostSlots] = {}
    for piece in text.split(","):
        name, slots = _split_slots(piece.strip(), "-H")
        if not name or slots is None:
            raise ConfigError(
                "Invalid host input, please make sure it has format as : worker-0:2,worker-1:2.",
                remedy=f"-H {quoted(text)}: {quoted(piece.strip())} is no host:slots (IPv6: [fe80::1]:2)",
            )
        number = _number(slots, f"-H {quoted(piece.strip())}: slots", MOST_SLOTS)
        before = found[name].slots if name in found else 0
        found[name] = HostSlots(name, _at_most(before + number, f"-H: slots of {name}"))
    return list(found.values())


def read_hostfile(path: Path, *, bare_slots: int = 1) -> list[HostSlots]:
    """Read a host file; raise `ConfigError` naming the file and the line that is wrong."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_FILE_CHARACTERS + 1)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"cannot read host file {path}: {problem}",
            remedy="expected a text file of lines such as: node1 slots=4",
        ) from None
    if len(text) > MOST_FILE_CHARACTERS:
        raise ConfigError(
            f"host file {path} is longer than {MOST_FILE_CHARACTERS} characters",
            remedy="is it a list of hosts? expected lines such as: node1 slots=4",
        )
    return parse_hostfile(text, where=str(path), bare_slots=bare_slots)


def parse_hostfile(text: str, *, where: str, bare_slots: int = 1) -> list[HostSlots]:
    """Parse the lines of a host file.

    A bare name counts `bare_slots` each time it appears (a machine file); a host whose slots are given may
    appear once only: a second line is more often a slip than a wish, and DeepSpeed refuses it too.
    """
    found: dict[str, HostSlots] = {}
    first_line: dict[str, tuple[int, bool]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        # Not a pattern of blanks: on a long line of nothing else it would look at every pair of them.
        bare = "=".join(part.strip() for part in line.partition("#")[0].split("=")).split()
        if not bare:
            continue
        host, counted = _parse_line(bare, f"{where}, line {number}", bare_slots)
        if host.name in found:
            before, counted_before = first_line[host.name]
            if counted or counted_before:
                raise ConfigError(
                    f"{where}, line {number}: host {host.name} is on line {before} already",
                    remedy="write each host once, with all its slots",
                )
            both = found[host.name].slots + host.slots
            host = replace(host, slots=_at_most(both, f"{where}: slots of {host.name}"))
        found[host.name] = host
        first_line.setdefault(host.name, (number, counted))
    if not found:
        raise ConfigError(f"{where} names no host", remedy=_LINE_FORMAT)
    return list(found.values())


def select_hosts(hosts: Iterable[HostSlots], *, include: str | None, exclude: str | None) -> list[HostSlots]:
    """Keep some hosts or slots, in DeepSpeed's notation: ``node1@node2:0,2`` is all of node1, two slots of node2.

    Hosts keep the order of the list. Raises `ConfigError` for both at once, for a host or a slot
    that is not in the list, and when nothing is left.
    """
    hosts = list(hosts)
    if include is not None and exclude is not None:
        raise ConfigError("--include and --exclude were both given", remedy="say what to keep, or what to leave")
    if include is None and exclude is None:
        return hosts
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    assert text is not None, "one of both was given"
    named = _parse_selection(text, {host.name: host for host in hosts}, option)
    kept = []
    for host in hosts:
        all_slots = set(range(host.slots))
        slots = named.get(host.name, set()) if option == "--include" else all_slots - named.get(host.name, set())
        if slots == all_slots:
            kept.append(host)
        elif slots:
            kept.append(replace(host, slots=len(slots), chosen=tuple(sorted(slots))))
    if not kept:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(f"{option} {quoted(text)} leaves no host", remedy=f"the list has {names}")
    return kept


def _parse_selection(text: str, hosts: dict[str, HostSlots], option: str) -> dict[str, set[int]]:
    named: dict[str, set[int]] = {}
    for piece in text.split("@"):
        name, numbers = _split_slots(piece.strip(), option)
        if name not in hosts:
            raise ConfigError(
                f"{option} {quoted(text)}: no host {quoted(name)} in the list", remedy=did_you_mean(name, hosts)
            )
        if name in named:
            raise ConfigError(f"{option} {quoted(text)}: host {name} is named twice", remedy=f"{name}:0,1")
        if numbers is None:
            named[name] = set(range(hosts[name].slots))
            continue
        chosen = {
            _number(each.strip(), f"{option} {quoted(piece)}: slot", MOST_SLOTS, 0) for each in numbers.split(",")
        }
        if max(chosen) >= hosts[name].slots:
            raise ConfigError(
                f"{option} {quoted(piece)}: slot {max(chosen)} of a host with {hosts[name].slots}",
                remedy=f"slots of {name} are 0 to {hosts[name].slots - 1}",
            )
        named[name] = chosen
    return named


def _parse_line(words: list[str], where: str, bare_slots: int) -> tuple[HostSlots, bool]:
    """Return the host of one line, and whether the line says how many slots it has."""
    name, slots_text = (words[0], None) if is_ipv6(words[0]) else _split_slots(words[0], where)
    if not name:
        user, _, host = words[0].rpartition("@")
        own = f"write {host}, and the user in ~/.ssh/config: Host {host} / User {user}"
        remedy = own if _NAME.fullmatch(user) and _NAME.fullmatch(host) else _LINE_FORMAT
        raise ConfigError(f"{where}: {quoted(words[0])} is no name of a host", remedy=remedy)
    values: dict[str, int] = {}
    if slots_text is not None:
        values["slots"] = _number(slots_text, f"{where}: slots", MOST_SLOTS)
    for word in words[1:]:
        key, equals, text = word.partition("=")
        key = key.replace("_", "-")
        if not equals:
            raise ConfigError(f"{where}: {quoted(word)} after the host's name", remedy=_LINE_FORMAT)
        if key not in _LINE_KEYS:
            raise ConfigError(f"{where}: unknown key {quoted(key)}", remedy=did_you_mean(key, _LINE_KEYS))
        if key in values:
            raise ConfigError(f"{where}: {key} is given twice", remedy=_LINE_FORMAT)
        values[key] = _number(text, f"{where}: {key}", MOST_PORT if key == "port" else MOST_SLOTS)
    most = values.get("max-slots", MOST_SLOTS)
    slots = values.get("slots", min(bare_slots, most))
    if slots > most:
        raise ConfigError(f"{where}: slots={slots} is more than max-slots={most}", remedy="raise max-slots")
    return HostSlots(name, slots, values.get("port")), "slots" in values or "max-slots" in values


def _split_slots(text: str, where: str) -> tuple[str, str | None]:
    """Split ``name:rest`` or ``[address]:rest``; an impossible name is empty, a missing rest None."""
    if text.startswith("["):
        address, bracket, rest = text[1:].partition("]")
        if not bracket or not is_ipv6(address):
            raise ConfigError(
                f"{where}: {quoted(text)} is no IPv6 address", remedy="expected for example [fe80::1]:2"
            )
        if rest and not rest.startswith(":"):
            raise ConfigError(
                f"{where}: {quoted(rest)} after {quoted(address)}", remedy="expected for example [fe80::1]:2"
            )
        return address, rest[1:] if rest else None
    name, colon, rest = text.partition(":")
    return (name if _NAME.fullmatch(name) else ""), (rest if colon else None)


def is_ipv6(text: str) -> bool:
    """Return whether a text is an IPv6 address, perhaps with a zone, and nothing that a shell would read."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return re.fullmatch(r"[0-9A-Za-z:.%_-]+", text) is not None


def _number(text: str, where: str, most: int, least: int = 1) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and least <= int(text) <= most):
        raise ConfigError(f"{where} = {quoted(text)}: expected a whole number from {least} to {most}")
    return int(text)


def _at_most(slots: int, where: str) -> int:
    if slots > MOST_SLOTS:
        raise ConfigError(f"{where} = {slots}: expected at most {MOST_SLOTS}")
    return slots


# The hosts that a job may use, as their emulation describes them.
#
# ``farandole emulate`` makes hosts of namespaces and passes their description on in a file, whose name is in the
# environment; ``farandole run`` places its ranks on them. A rank of such a host enters the host's namespaces
# between fork and exec.

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
HOST_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET
_NAMESPACES = ("mnt", "uts", "net")
T = TypeVar("T")


@dataclass(frozen=True)
class HostNamespaces:
    """One host: how the others reach it, and how many ranks it takes."""

    name: str
    address: str
    slots: int
    interface: str
    keeper: int
    """Process that keeps the host's namespaces alive."""


def write_hosts(path: Path, hosts: Sequence[HostNamespaces]) -> None:
    """Write the description that `read_namespaces` reads."""
    path.write_text(json.dumps([dataclasses.asdict(host) for host in hosts]))


def read_namespaces() -> list[HostNamespaces]:
    """Return the hosts this process was given; an empty list when it was given none."""
    name = env.read_hosts_file()
    if name is None:
        return []
    try:
        return [_read_host(values) for values in json.loads(Path(name).read_text())]
    except (OSError, ValueError, TypeError) as problem:
        raise ConfigError(
            f"{env.HOSTS_FILE}={name} cannot be read: {problem}", remedy="it is set by farandole emulate"
        ) from None


def _read_host(values: Any) -> HostNamespaces:
    wanted = {
        field.name: int if field.name in ("slots", "keeper") else str
        for field in dataclasses.fields(HostNamespaces)
    }
    if not isinstance(values, dict) or values.keys() != wanted.keys():
        raise TypeError(f"expected a host with {', '.join(wanted)}, got {values!r}")
    for name, kind in wanted.items():
        if type(values[name]) is not kind:
            raise TypeError(f"{name}: expected {kind.__name__}, got {values[name]!r}")
    return HostNamespaces(**values)


def entering(host: HostNamespaces) -> Callable[[], None]:
    """Return what makes a forked child a process of `host`. To be made before the fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    doors = [f"/proc/{host.keeper}/ns/{name}" for name in _NAMESPACES]
    if not all(map(os.path.exists, doors)):
        raise LaunchError(f"host {host.name} is gone", remedy="is farandole emulate still running?")
    here = str(Path.cwd())

    def enter() -> None:
        opened = [os.open(door, os.O_RDONLY | os.O_CLOEXEC) for door in doors]
        for door in opened:
            if libc.setns(door, 0):
                os._exit(126)
        os.chdir(here)  # entering a mount namespace leaves us at its root

    return enter


def in_network_of(host: HostNamespaces, make: Callable[[], T]) -> T:
    """Return what `make` makes in the network of `host`, for example a socket; it stays there.

    A thread of its own enters the namespace and ends; this one never leaves ours. Raises what `make` raises.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    made: Future[T] = Future()

    def enter_and_make() -> None:
        try:
            door = os.open(f"/proc/{host.keeper}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if libc.setns(door, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter the network of {host.name}")
            finally:
                os.close(door)
            made.set_result(make())
        except BaseException as problem:
            made.set_exception(problem)

    thread = threading.Thread(target=enter_and_make)
    thread.start()
    thread.join()
    return made.result()


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
