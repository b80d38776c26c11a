"""TCP connections between every two ranks, made through the store.

Each rank listens on one address, says in the store where, and connects to all ranks below it. A
connection begins with a code that answers the listener's question, a random text in the store; what follows is
clear text, as the backend's traffic is.

[Note: who gets in] The code is made with the secret of the job (`read_job_secret`), which a launcher that starts
all ranks gives only to them: a stranger that reads the store learns nothing that opens a connection. If
the job has no secret (torchrun, or one launcher per node), any process that reaches the store can make the code as
well: then it only keeps out accidental connections.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from ...core.environ.env import SECRET, read_job_secret
from ...core.host.congestion import available_congestion_controls
from ...core.vocabulary.errors import CommError, PeerLost, PlanError, Stalled
from ...core.vocabulary.rank_lists import name_ranks
from ..world.host_address import own_address
from ..world.store_sync import all_gather_json, require_equal
from ..world.world import World
from .callers import Callers

HELLO = struct.Struct("<32sII")
"""Code, rank, lane."""
_LOOK_SECONDS = 0.2
"""How often a rank that waits for calls looks whether it should go on."""


@dataclass(frozen=True)
class Door:
    """A listener's question, and the codes that answer it. See [Note: who gets in]."""

    secret: bytes
    question: str

    def hello(self, rank: int, lane: int) -> bytes:
        """Return the code of a caller."""
        return hmac.digest(self.secret, f"connect {self.question} {rank} {lane}".encode(), "sha256")

    @staticmethod
    def fingerprint(secret: bytes) -> str:
        """Return what ranks compare of their secrets; empty without one."""
        return hmac.digest(secret, b"fingerprint", "sha256").hex()[:16] if secret else ""


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
        secret = read_job_secret()
        door = Door(secret, secrets.token_hex(16))
        mine = {"address": address, "port": listener.getsockname()[1], "question": door.question}
        mine |= {"host": world.host, "fingerprint": Door.fingerprint(secret)}
        mine["refused"] = _choose(listener, control)  # what it accepts inherits it
        everyone = all_gather_json(world, "connecting ranks", mine)
        require_equal(
            world,
            "connecting ranks",
            "the fingerprint of the job's secret",
            [said["fingerprint"] for said in everyone],
            remedy=f"give all ranks the same {SECRET}, or none",
        )
        _refuse(control, everyone)
        found: list[list[socket.socket]] = [[] for _ in range(world.size)]
        deadline = time.monotonic() + timeout_seconds
        with ExitStack() as closing_all:
            for rank in range(world.rank):
                for lane in range(lanes):
                    connection = call_rank(world, rank, everyone[rank], lane, deadline, control=control)
                    found[rank].append(closing_all.enter_context(connection))
            waiting = {(rank, lane) for rank in range(world.rank + 1, world.size) for lane in range(lanes)}
            accepted = _answer(world, listener, door, waiting, deadline=deadline, stack=closing_all)
            closing_all.pop_all()
        for (rank, _), connection in sorted(accepted.items()):
            found[rank].append(connection)
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


def call_rank(
    world: World, rank: int, peer: dict[str, str], lane: int, deadline: float, *, control: str = ""
) -> socket.socket:
    """Return a connection to the listener of `rank`, which said of itself what `peer` holds; raise `CommError`."""
    where = (peer["address"], int(peer["port"]))
    try:
        connection = _open(where, max(0.1, deadline - time.monotonic()), control)
        code = Door(read_job_secret(), peer["question"]).hello(world.rank, lane)
        connection.sendall(HELLO.pack(code, world.rank, lane))
    except OSError as problem:
        raise CommError(
            f"cannot reach rank {rank} on {peer['host']} at {where[0]}:{where[1]}: {problem}",
            rank=world.job_rank,
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
    door: Door,
    waiting: set[tuple[int, int]],
    *,
    deadline: float,
    stack: ExitStack,
) -> dict[tuple[int, int], socket.socket]:
    """Accept the calls of all those in `waiting`, (rank, lane), onto `stack`; hang up on strangers."""
    accepted: dict[tuple[int, int], socket.socket] = {}
    with closing(Callers(listener, HELLO.size)) as callers:
        while waiting:
            if world.sockets.shut_down:
                raise PeerLost(
                    "the generation has ended while its ranks connected",
                    rank=world.job_rank,
                    operation="connecting",
                )
            if time.monotonic() > deadline:
                missing = sorted({world.job_ranks[rank] for rank, _ in waiting})
                raise Stalled(
                    f"{name_ranks(missing)} did not connect",
                    rank=world.job_rank,
                    operation="connecting",
                    remedy="are they running, and is the port reachable from their hosts?",
                )
            try:
                heard = callers.hear(max(0.01, min(_LOOK_SECONDS, deadline - time.monotonic())))
            except OSError as problem:
                raise CommError(
                    f"cannot be reached: {problem}", rank=world.job_rank, operation="connecting"
                ) from None
            for hello, connection in heard:
                told, rank, lane = HELLO.unpack(hello)
                if (rank, lane) not in waiting or not hmac.compare_digest(told, door.hello(rank, lane)):
                    connection.close()
                    continue
                waiting.discard((rank, lane))
                accepted[rank, lane] = stack.enter_context(connection)
    return accepted
