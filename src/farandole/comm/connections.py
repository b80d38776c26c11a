"""TCP connections between every two ranks, made through the store.

Each rank listens on one address, says in the store where, and connects to all ranks below it. A
connection begins with the listener's secret from the store, so that only ranks of this job get in; what
follows is clear text, as the back end's own traffic is.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack

from ..core.congestion import available_congestion_controls
from ..core.errors import CommError, PeerLost, PlanError, Stalled
from .addresses import own_address
from .agree import gather, name_ranks
from .world import World

_HELLO = struct.Struct("<32sII")
"""Secret, rank, lane."""
_LOOK_SECONDS = 0.2
"""How often a rank that waits for calls looks whether it should go on."""
_PATIENCE_SECONDS = 5.0
"""For a caller to say them; one who does not is a stranger."""


def connect_all(
    world: World, lanes: int, timeout_seconds: float, congestion_control: str = ""
) -> list[list[socket.socket]]:
    """Return `lanes` connected sockets for every other rank, by rank (an empty list for this one).

    To be called by all ranks. `congestion_control`: what TCP uses; empty: as each host has it. Raises `Stalled`
    naming the ranks that did not connect in time, and `PlanError`, on all ranks, where a host lacks what is asked.
    """
    with world.sockets.noticed():
        return _connect(world, lanes, timeout_seconds, congestion_control)


def _connect(world: World, lanes: int, timeout_seconds: float, control: str) -> list[list[socket.socket]]:
    address = own_address(world.address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(max(16, lanes * world.size))
        secret = secrets.token_hex(16)
        mine = {"address": address, "port": listener.getsockname()[1], "secret": secret, "host": world.host}
        mine["refused"] = _choose(listener, control)  # what it accepts inherits it
        everyone = gather(world, "connecting ranks", mine)
        _refuse(control, everyone)
        found: list[list[socket.socket]] = [[] for _ in range(world.size)]
        deadline = time.monotonic() + timeout_seconds
        try:
            for rank in range(world.rank):
                peer = everyone[rank]
                found[rank] = [_call(world, rank, peer, lane, deadline, control=control) for lane in range(lanes)]
            waiting = {(rank, lane) for rank in range(world.rank + 1, world.size) for lane in range(lanes)}
            with ExitStack() as closing_all:
                accepted = _answer(world, listener, secret, waiting, deadline=deadline, stack=closing_all)
                closing_all.pop_all()
            for (rank, _), connection in sorted(accepted.items()):
                found[rank].append(connection)
        except BaseException:
            for each in found:
                for connection in each:
                    connection.close()
            raise
    for each in found:
        for connection in each:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _choose(connection: socket.socket, control: str) -> str:
    """Have a socket that is not connected yet send as `control` says; return why it cannot.

    To change it later is of little use: what was paced stays paced.
    """
    if not control:
        return ""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return "this system leaves no choice"
    try:
        connection.setsockopt(socket.IPPROTO_TCP, option, control.encode())
    except OSError as refused:
        known = ", ".join(available_congestion_controls()) or "none that is known"
        return f"{refused.strerror} (this kernel has {known})"
    return ""


def _refuse(control: str, everyone: Sequence[dict[str, str]]) -> None:
    for rank, said in enumerate(everyone):
        if said["refused"]:
            raise PlanError(
                f"plan: congestion_control = {control!r}: rank {rank} on {said['host']} cannot use it: "
                f"{said['refused']}",
                remedy=f"leave it out, or as root on that host: modprobe tcp_{control}; "
                "sysctl net.ipv4.tcp_allowed_congestion_control",
            )


def _call(
    world: World, rank: int, peer: dict[str, str], lane: int, deadline: float, *, control: str
) -> socket.socket:
    where = (peer["address"], int(peer["port"]))
    try:
        connection = _open(where, max(0.1, deadline - time.monotonic()), control)
        connection.sendall(_HELLO.pack(peer["secret"].encode(), world.rank, lane))
    except OSError as problem:
        raise CommError(
            f"cannot reach rank {rank} on {peer['host']} at {where[0]}:{where[1]}: {problem}",
            rank=world.rank,
            operation="connecting",
            remedy="a firewall, or the wrong interface: name it with GLOO_SOCKET_IFNAME",
        ) from None
    return connection


def _open(where: tuple[str, int], timeout_seconds: float, control: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_seconds)
        _choose(made, control)
        made.connect(where)
    except BaseException:
        made.close()
        raise
    return made


def _answer(
    world: World,
    listener: socket.socket,
    secret: str,
    waiting: set[tuple[int, int]],
    *,
    deadline: float,
    stack: ExitStack,
) -> dict[tuple[int, int], socket.socket]:
    """Accept the calls of all those in `waiting`, (rank, lane), onto `stack`; hang up on strangers."""
    accepted: dict[tuple[int, int], socket.socket] = {}
    while waiting:
        listener.settimeout(max(0.01, min(_LOOK_SECONDS, deadline - time.monotonic())))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if world.sockets.shut_down:
                raise PeerLost(
                    "the generation has ended while its ranks connected", rank=world.rank, operation="connecting"
                ) from None
            if time.monotonic() < deadline:
                continue
            missing = sorted({rank for rank, _ in waiting})
            raise Stalled(
                f"{name_ranks(missing)} did not connect",
                rank=world.rank,
                operation="connecting",
                remedy="are they running, and is the port reachable from their hosts?",
            ) from None
        except ConnectionAbortedError:
            continue  # whoever called hung up before we answered
        except OSError as problem:
            raise CommError(f"cannot be reached: {problem}", rank=world.rank, operation="connecting") from None
        told, rank, lane = _hear(connection, deadline)
        if not hmac.compare_digest(told, secret.encode()) or (rank, lane) not in waiting:
            connection.close()
            continue
        waiting.discard((rank, lane))
        accepted[rank, lane] = stack.enter_context(connection)
    return accepted


def _hear(connection: socket.socket, deadline: float) -> tuple[bytes, int, int]:
    """Return the secret, rank and lane that a caller says; an empty secret when it says something else."""
    deadline = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
    hello = b""
    try:
        while len(hello) < _HELLO.size:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(_HELLO.size - len(hello))
            if not part:
                break
            hello += part
    except OSError:  # silent, or gone
        hello = b""
    told, rank, lane = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0, 0)
    return told, rank, lane
