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
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.env import SECRET, read_job_secret
from ...core.framing import HEADER
from ...core.host.open_sockets import available_congestion_controls
from ...core.vocabulary.errors import CommError, PeerLost, PlanError, Stalled
from ...core.vocabulary.text import name_ranks
from ..world.rendezvous import own_address
from ..world.store_sync import all_gather_json, require_equal
from ..world.world import World

# Incoming connections while ranks connect: all are served at once, each for a bounded time.
#
# A caller that sends nothing (a port scanner, a health check) delays no rank, and is disconnected after a while.

PATIENCE_SECONDS = 5.0
"""Time a peer has to identify itself."""
MOST_CALLERS = 512
"""That have not said it yet."""


class HeardCall(NamedTuple):
    """A caller that has said its hello."""

    hello: bytes
    connection: socket.socket
    question: bytes
    """What it was asked; empty where nothing is."""


@dataclass(eq=False)
class _Caller:
    connection: socket.socket
    question: bytes
    until_seconds: float
    heard: bytearray = field(default_factory=bytearray)


class Callers:
    """Accepts calls on a listener, asks each a random question of so many bytes, and hears a hello from each."""

    def __init__(
        self, listener: socket.socket, hello_bytes: int, *, question_bytes: int = 0, most: int = 0
    ) -> None:
        """`most`: callers that have not said their hello; of more, the first is hung up on. 0: `MOST_CALLERS`."""
        listener.setblocking(False)
        self._listener = listener
        self._hello_bytes, self._question_bytes, self._most = hello_bytes, question_bytes, most or MOST_CALLERS
        self._pending: dict[socket.socket, _Caller] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to hear."""
        return self._selector.fileno()

    @property
    def has_pending(self) -> bool:
        """Whether a caller has not said its hello yet."""
        return bool(self._pending)

    def hear(self, seconds: float) -> list[HeardCall]:
        """Wait for at most `seconds`; return calls whose hellos are complete: their connections are the caller's.

        Raises `OSError` when the listener cannot accept any more.
        """
        complete: list[HeardCall] = []
        ready = [key.fileobj for key, _ in self._selector.select(max(0.0, seconds))]
        for each in ready:
            if each in self._pending:
                complete += self._listen(self._pending[each])
        now = time.monotonic()
        for caller in [each for each in self._pending.values() if each.until_seconds < now]:
            self._hang_up(caller)
        try:
            if self._listener in ready:
                self._accept()
        except OSError:
            if not complete:  # else the next time: what is complete is not to be lost
                raise
        return complete

    def close(self) -> None:
        """Hang up on all that have not said their hello."""
        for caller in list(self._pending.values()):
            self._hang_up(caller)
        self._selector.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # all are in, or it hung up before we answered
                return
            connection.setblocking(False)
            question = secrets.token_bytes(self._question_bytes)
            try:
                connection.send(question)  # a fresh connection takes so much at once
            except OSError:
                connection.close()
                continue
            if len(self._pending) >= self._most:
                self._hang_up(next(iter(self._pending.values())))
            self._pending[connection] = _Caller(connection, question, time.monotonic() + PATIENCE_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ)

    def _listen(self, caller: _Caller) -> Sequence[HeardCall]:
        try:
            part = caller.connection.recv(self._hello_bytes - len(caller.heard))
        except BlockingIOError:
            return ()
        except OSError:
            part = b""
        if not part:
            self._hang_up(caller)
            return ()
        caller.heard += part
        if len(caller.heard) < self._hello_bytes:
            return ()
        self._forget(caller)
        return (HeardCall(bytes(caller.heard), caller.connection, caller.question),)

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._pending[caller.connection]

    def _hang_up(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()


# One connection of a transport: its send queue, and the frame that is being received.
#
# A frame is a tag, a length and bytes. One call sends several of them, and SO_RCVLOWAT lets the kernel collect a
# frame before it wakes us.

_COLLECT_BYTES = 128 * 1024
"""The kernel wakes us for this many bytes, or the end of the frame."""
_SMALL_BYTES = 4096
_VIEWS_A_CALL = 16


def send_views(connection: socket.socket, queue: deque[memoryview]) -> int:
    """Give the kernel what it takes of `queue`; return how many bytes. Raises `OSError` when it is lost."""
    moved = 0
    try:
        while queue:
            sent = connection.sendmsg([queue[i] for i in range(min(_VIEWS_A_CALL, len(queue)))])
            moved += sent
            while queue and sent >= len(queue[0]):  # an empty one goes with what is before it
                sent -= len(queue.popleft())
            if sent:
                queue[0] = queue[0][sent:]
    except BlockingIOError:
        pass
    return moved


@dataclass(eq=False, slots=True)
class Connection:
    """A connection to `rank`, whose socket never blocks."""

    rank: int
    socket: socket.socket
    tag: int = -1
    """Tag of the frame that is being received, or was last."""
    is_early: bool = False
    """Early frame: no receive was posted when it began, so it is buffered."""
    lost: str = ""
    """Why nothing travels over it any more; empty: it does."""
    asks_to_write: bool = False
    """Whether the kernel is asked to tell when it takes more."""
    _outgoing: deque[memoryview] = field(default_factory=deque)
    _header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    _header_filled: int = 0
    _target: memoryview | None = None
    _filled: int = 0
    _wakes_at_bytes: int = 1

    @property
    def has_more_to_send(self) -> bool:
        """Whether something is queued that the kernel has not taken yet."""
        return bool(self._outgoing)

    def queue(self, tag: int, frame: memoryview) -> None:
        """Have a frame sent after all that is queued."""
        self._outgoing.append(memoryview(HEADER.pack(tag, len(frame))))
        self._outgoing.append(frame)

    def drop_queue(self) -> None:
        """Send nothing of what is queued."""
        self._outgoing.clear()

    def drop_frames_not_begun(self) -> None:
        """Leave what ends the frame of which a part was sent. Headers and contents alternate in the queue."""
        queued = self._outgoing
        is_header_begun = len(queued) % 2 == 0 and len(queued) > 0 and len(queued[0]) < HEADER.size
        begun = 2 if is_header_begun else len(queued) % 2
        while len(queued) > begun:
            queued.pop()

    def send_what_fits(self) -> int:
        """Give the kernel what it takes; return how many bytes. Raises `OSError` when the connection is lost."""
        return send_views(self.socket, self._outgoing)

    def receive_what_is_there(self, begin: Callable[[int], memoryview], end: Callable[[memoryview], bool]) -> int:
        """Take what the kernel has; return how many bytes. Raises `OSError` when the connection is lost.

        When a frame begins, `begin` is given its length and returns where to put it; `tag` says whose it is. When
        it is there, `end` is given it and says whether to go on.
        """
        moved = 0
        try:
            while True:
                if self._target is None:
                    count = self.socket.recv_into(memoryview(self._header)[self._header_filled :])
                    self._header_filled += count
                    if count and self._header_filled == HEADER.size:
                        self._header_filled = self._filled = 0
                        self.tag, length = HEADER.unpack(self._header)
                        self._target = begin(length)
                else:
                    count = self.socket.recv_into(self._target[self._filled :])
                    self._filled += count
                moved += count
                if count == 0:
                    raise ConnectionResetError("it closed its connection")
                if self._target is not None and self._filled == len(self._target):
                    frame, self._target = self._target, None
                    self._collect(1)
                    if not end(frame):
                        return moved
        except BlockingIOError:
            if self._target is not None:
                self._collect(min(_COLLECT_BYTES, len(self._target) - self._filled))
        return moved

    def _collect(self, wanted: int) -> None:
        """Have the kernel wake us only when `wanted` bytes are there; small frames are not worth the call."""
        wanted = wanted if wanted > _SMALL_BYTES else 1
        if wanted != self._wakes_at_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._wakes_at_bytes = wanted


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
    listener, door, everyone = open_door(world, "connecting ranks", lanes * world.size, control)
    with listener:
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
            tune(connection)
    return found


def open_door(
    world: World, topic: str, backlog: int, control: str = ""
) -> tuple[socket.socket, Door, list[dict[str, str]]]:
    """Listen; return the listener, its door, and what all ranks say of theirs. To be called by all ranks.

    `control`: as `connect_all`. Raises `Mismatch` on all ranks where they have different secrets.
    """
    address = own_address(world.address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=max(16, backlog))
    try:
        secret = read_job_secret()
        door = Door(secret, secrets.token_hex(16))
        mine = {"address": address, "port": listener.getsockname()[1], "question": door.question}
        mine |= {"host": world.host, "fingerprint": Door.fingerprint(secret)}
        mine["refused"] = _choose(listener, control)  # what it accepts inherits it
        everyone = all_gather_json(world, topic, mine)
        require_same_secret(world, topic, [said["fingerprint"] for said in everyone])
    except BaseException:
        listener.close()
        raise
    return listener, door, everyone


def require_same_secret(world: World, topic: str, fingerprints: Sequence[str]) -> None:
    """Raise `Mismatch` where ranks have different secrets. `fingerprints`: as all ranks have gathered them."""
    remedy = f"give all ranks the same {SECRET}, or none"
    require_equal(world, topic, "the fingerprint of the job's secret", fingerprints, remedy=remedy)


def tune(connection: socket.socket) -> None:
    """Let a connection never block, and send at once what it is given."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
            for hello, connection, _ in heard:
                told, rank, lane = HELLO.unpack(hello)
                if (rank, lane) not in waiting or not hmac.compare_digest(told, door.hello(rank, lane)):
                    connection.close()
                    continue
                waiting.discard((rank, lane))
                accepted[rank, lane] = stack.enter_context(connection)
    return accepted
