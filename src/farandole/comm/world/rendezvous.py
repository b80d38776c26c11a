"""Where ranks meet: the key-value store of a world, served by rank 0.

[Note: the store outlives the world] The key-value store through which ranks find each other is opened once per
process and address, and kept until all have met elsewhere: a rank that re-initialises quickly could otherwise
reach the server that its slower peer is about to close. Each world has its own prefix. What the world before
has left there is deleted once all ranks have met in the next one: it is not read any more, and a process
that begins a thousand times would hold a thousand worlds' keys.

[Note: a meeting point for each generation] In an elastic job ranks come and go, and with rank 0 the store. So each
generation meets at a port of its own, its store ends with it, and its prefix holds a random text that only its
members were told: a rank that slept through a change cannot disturb those who went on.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from ...core import env
from ...core.env import read_nonce
from ...core.failures import first_line
from ...core.rank_variables import RankVariables, how_to_start_all
from ...core.vocabulary.errors import ConfigError, Stalled
from ...core.vocabulary.text import name_ranks, write_notice
from .comm_errors import SocketAborter
from .forks import keep_for_ever

LATE_SECONDS = 10.0
"""For ranks to come to the meeting before it is said that they have not; the wait goes on."""
_ATTEMPT_SECONDS = 2.0


@dataclass
class _Met:
    """What this process keeps between worlds. See [Note: the store outlives the world]."""

    stores: dict[tuple[str, int], dist.Store] = field(default_factory=dict)
    worlds: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Worlds made so far at each meeting point."""


_met = _Met()


def open_store(place: RankVariables, wait: timedelta, sockets: SocketAborter) -> dist.Store:
    """Return the next world's part of the store at the meeting point of `place`.

    Raises `ConfigError` when there is no meeting point, `Stalled` when no server answers within `wait`.
    """
    if place.address is None or place.port is None:
        raise ConfigError(
            f"{place.source} gave rank {place.rank} of {place.size} but no meeting point",
            remedy="set MASTER_ADDR and MASTER_PORT, or start with: farandole run",
        )
    key = (place.address, place.port)
    if key in _met.stores:
        return fresh_prefix(key, _met.stores[key])
    late = threading.Timer(LATE_SECONDS, tell_late, [place.rank, place.size, [0], wait.total_seconds()])
    late.daemon = True
    try:
        if place.rank and place.local_rank == (place.node_rank == 0):  # one rank of each host says it
            late.start()
        if place.store_is_served:
            store: dist.Store = next(dist.rendezvous("env://", place.rank, place.size, timeout=wait))[0]
        elif place.rank == 0:
            store = _serve(place.address, place.port, place.size, wait, several_hosts=place.node_count > 1)
        elif read_nonce():
            store = _call(place.address, place.port, wait, sockets)
        else:
            store = dist.TCPStore(place.address, place.port, place.size, is_master=False, timeout=wait)
    except (RuntimeError, OSError, ValueError) as problem:
        raise Stalled(
            f"no meeting point at {place.address}:{place.port}: {first_line(problem)}",
            rank=place.rank,
            operation="meeting the other ranks",
            remedy="is rank 0 running, and is the port free and reachable?",
        ) from None
    finally:
        late.cancel()
    _met.stores[key] = store
    return fresh_prefix(key, store)


def tell_late(rank: int, size: int, absent: Sequence[int], timeout_seconds: float) -> None:
    """Say that ranks have not come to the meeting."""
    has = "has" if len(absent) == 1 else "have"
    write_notice(
        f"rank {rank} of {size}: {name_ranks(absent)} {has} not come after {LATE_SECONDS:g} s, and it waits up to "
        f"{timeout_seconds:g} s; if they are not on their way: {how_to_start_all()}"
    )


def _call(address: str, port: int, wait: timedelta, sockets: SocketAborter) -> dist.Store:
    """Reach the store of an elastic generation, in short attempts: its rank 0 may have died."""
    deadline = time.monotonic() + wait.total_seconds()
    attempt = timedelta(seconds=min(_ATTEMPT_SECONDS, wait.total_seconds()))
    while True:
        try:
            store = dist.TCPStore(address, port, None, is_master=False, timeout=attempt, wait_for_workers=False)
        except RuntimeError:
            if sockets.shut_down or time.monotonic() > deadline:
                raise
            continue
        store.set_timeout(wait)
        return store


def forget_generation() -> None:
    """See [Note: a meeting point for each generation]."""
    if read_nonce():
        _met.stores.clear()
        _met.worlds.clear()


def forget_meetings() -> None:
    """In a forked child: never use the connections of the parent, and never destroy its stores."""
    keep_for_ever(_met.stores.values())
    _met.stores.clear()
    _met.worlds.clear()


def fresh_prefix(meeting_point: tuple[str, int], store: dist.Store) -> dist.Store:
    """Return the part of the store that belongs to the next world at this meeting point."""
    _met.worlds[meeting_point] += 1
    nonce, number = read_nonce(), _met.worlds[meeting_point]
    name = f"farandole/{nonce}/{number}" if nonce else f"farandole/{number}"
    part: dist.Store = dist.PrefixStore(name, store)
    return part


def forget_world_before(place: RankVariables) -> None:
    """Forget where earlier worlds met, and on rank 0 what the last one left here; for when all have met."""
    key = (str(place.address), int(place.port or 0))
    for other in _met.stores.keys() - {key}:
        del _met.stores[other], _met.worlds[other]
    if place.rank:
        return
    store, before = _met.stores.get(key), _met.worlds[key] - 1
    if read_nonce() or before < 1 or not isinstance(store, dist.TCPStore) or not hasattr(store, "list_keys"):
        return
    for name in store.list_keys():
        if name.startswith(f"farandole/{before}/"):
            store.delete_key(name)


def _serve(address: str, port: int, size: int, wait: timedelta, *, several_hosts: bool) -> dist.Store:
    """Open the store's server on the address that was asked for, not on every interface of the host.

    But for one case: many distributions let a host's own name mean a loopback address, at which the other
    hosts, for which the name means this host, would find no server.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hidden = several_hosts and family == socket.AF_INET and _means_loopback_here(address)
        listener.bind(("" if hidden else address, port))
        listener.listen(max(128, 2 * size))
    except OSError:
        listener.close()
        raise
    served: dist.Store = dist.TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=wait,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return served


def _means_loopback_here(name: str) -> bool:
    """Return whether `name`, when it is no address, leads to a loopback address on this host."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return socket.gethostbyname(name).startswith("127.")
    return False


# Which of this host's addresses the other ranks reach it by.


_SIOCGIFADDR = 0x8915
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EINVAL)
"""Errors of connect without a route; the last one is that of a blackhole route."""
_LOOK_SECONDS = 0.1


def own_address(meeting_point: str | None) -> str:
    """Return the address to listen on.

    That of the interface named for the backend (GLOO_SOCKET_IFNAME), or else the one from which the
    meeting point is reached. Raises `ConfigError` for an interface that does not exist.
    """
    interface = env.read_socket_interface()
    if interface is not None:
        return _address_of(interface)
    if meeting_point is None:
        return "127.0.0.1"
    try:
        return _source_address(meeting_point)
    except OSError:
        return "127.0.0.1"


def has_route(address: str) -> bool:
    """Return whether the kernel knows a way to `address`; nothing is sent."""
    try:
        _source_address(address)
    except OSError as problem:
        return problem.errno not in _NO_ROUTE
    return True


def _source_address(address: str) -> str:
    """Return from which address of this host the kernel would reach `address`; raise OSError if it cannot."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only chooses a route
        source: str = probe.getsockname()[0]
        return source


def wait_for_routes(addresses: Collection[str], seconds: float, *, is_over: Callable[[], bool]) -> None:
    """Return when there is a way to all of `addresses`, after `seconds`, or when the wait `is_over`.

    gloo gives up at the first address that has none, and a host that is starting may have it in a moment.
    """
    deadline = time.monotonic() + seconds
    missing = [address for address in addresses if address and not has_route(address)]
    while missing and time.monotonic() < deadline and not is_over():
        time.sleep(_LOOK_SECONDS)
        missing = [address for address in missing if not has_route(address)]


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface[:15].encode())
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as problem:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={interface}: {problem.strerror}", remedy=f"this host has {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
