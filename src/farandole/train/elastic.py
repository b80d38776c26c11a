"""A worker of an elastic job: its control connection, and the change of generations.

`fd.init` uses it when the job is elastic; a training loop needs no more than to call `fd.shutdown` and
`fd.init` again after a failure. The launcher's side is in ``launch/elastic``.

[Note: progress] How much of the job a worker's state holds, counted in commits. All ranks of a generation count
alike: from the number that rank 0 brought along. After a failure the launcher makes a worker with the highest
number rank 0, and the others copy its state; so what any survivor has committed is never lost.

A call that is refused has an answer, so the way there and back is good. No answer within a few seconds means
a link that is cut, a host that is away, or no route.
"""

from __future__ import annotations

import atexit
import errno
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..comm.world.connect import connect_again
from ..comm.world.rendezvous import own_address
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import escape, has_world, world
from ..core.env import ElasticSettings, read_elastic_settings
from ..core.framing import FrameError
from ..core.rank_variables import adopt_rank_variables
from ..core.vocabulary.errors import CommError, ConfigError, LaunchError, Mismatch
from ..launch.elastic.control import (
    NO_STATE,
    NONCE_BYTES,
    Frame,
    frame_signer,
    frame_verifier,
    make_hello,
    make_nonce,
    session_keys,
    sign,
    verify,
)
from ..launch.job.placement import ReservedPort

if TYPE_CHECKING:
    from ..comm.world.world import World


# The worker's end of the control channel: one connection, one thread that listens.

_CONNECT_SECONDS = 30.0


class ControlConnection:
    """Frames to and from the launcher. `handle` is called in the listening thread, with None at the end."""

    def __init__(self, settings: ElasticSettings, handle: Callable[[Frame | None], None]) -> None:
        """Call the launcher; raise `LaunchError` when it does not answer, or is not the one that started us."""
        self._handle = handle
        where = f"{settings.address}:{settings.port}"
        try:
            self._socket = socket.create_connection((settings.address, settings.port), _CONNECT_SECONDS)
        except OSError as problem:
            raise LaunchError(f"the launcher at {where} does not answer: {problem}") from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs = self._receive_exactly(NONCE_BYTES)
            mine = make_nonce()
            self._socket.sendall(make_hello(settings.key, settings.worker, theirs, mine))
            up, down = session_keys(settings.key, theirs, mine)
            self._signer, self._verifier = frame_signer(up), frame_verifier(down)
            first = self._first_frames()
        except (OSError, FrameError) as problem:
            self._socket.close()
            raise LaunchError(f"the launcher at {where} is not ours: {problem or 'it hung up'}") from None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, args=(first,), name="farandole launcher", daemon=True)
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Send a frame; a launcher that is gone is noticed by the listening thread."""
        with self._lock, suppress(OSError):
            self._socket.sendall(sign(self._signer, frame))

    def forget(self) -> None:
        """In a forked child: close our copy; the connection itself is the parent's."""
        self._closed = True
        self._socket.close()

    def close(self) -> None:
        """Hang up, and wait for the thread (unless it is the one that calls)."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._socket.close()

    def _first_frames(self) -> list[Frame]:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not (frames := verify(self._verifier, self._receive_some())):
            if time.monotonic() > deadline:
                raise OSError("it sent no welcome")
        self._socket.settimeout(None)
        return frames

    def _receive_some(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise OSError("it hung up")
        return data

    def _receive_exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise OSError("it hung up")
            data += piece
        return data

    def _listen(self, frames: list[Frame]) -> None:
        try:
            while True:
                for frame in frames:
                    self._handle(frame)
                frames = verify(self._verifier, self._receive_some())
        except (OSError, FrameError):
            if not self._closed:
                self._handle(None)


# This process as a worker of an elastic job: its generation, and the way to the next one.

# Tests which hosts are reachable: a connection attempt to each, which needs no listener.
REACH_SECONDS = 2.5
"""The kernel sends a lost call again after 1 s."""
MOST_CALLS = 64
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK)
_ANSWERED = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def unreachable(ways: Sequence[tuple[str, int]], seconds: float = REACH_SECONDS) -> list[str]:
    """Return the addresses, of (address, port), that do not answer in time; of many, a sample is called."""
    called = list(ways) if len(ways) <= MOST_CALLS else random.sample(list(ways), MOST_CALLS)
    missed = []
    with selectors.DefaultSelector() as selector:
        for address, port in called:
            call = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            call.setblocking(False)
            code = call.connect_ex((address, port))
            if code in _UNDER_WAY:
                selector.register(call, selectors.EVENT_WRITE, address)
                continue
            call.close()
            if code not in _ANSWERED:
                missed.append(address)
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                call = _socket_of(key)
                if call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _ANSWERED:
                    missed.append(key.data)
                selector.unregister(call)
                call.close()
        for key in list(selector.get_map().values()):
            missed.append(key.data)
            with suppress(OSError):
                _socket_of(key).close()
    return missed


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket), "only calls are watched"
    return key.fileobj


SILENCE_SECONDS = 60.0
"""A launcher that says nothing for so long, while we wait for it, is not there any more."""
_TOLD_SECONDS = 3.0
"""After a failure to connect: for the launcher to say that a rank is gone."""
_ESCAPE_SECONDS = (0.02, 0.5)
"""How often the sockets of a generation that has ended are shut again, first and at last."""


@dataclass(frozen=True)
class SyncAgreement:
    """What the ranks of a generation agreed on before they train."""

    needed: bool
    """Whether any rank needs the state of rank 0."""
    progress: int
    """Commits in rank 0's state."""


class ElasticWorker:
    """One a process, made by `member` when first needed."""

    def __init__(self, settings: ElasticSettings) -> None:
        self.worker = settings.worker
        self.generation = 0
        self.assigned_at = float("-inf")
        """When the launcher formed this generation, by its clock; messages on hosts from before are stale."""
        self.progress = NO_STATE
        self.can_prepare = True
        """Whether `init` may return before there is a place, where the plan lets ranks come in."""
        self.asked_at = float("-inf")
        """When the launcher asked last, by its clock, for a generation of other workers."""
        self._settings = settings
        self._changed = threading.Condition()
        self._answer: Frame | None = None
        self._ways: list[tuple[str, int]] = []
        """Addresses and ports of the other hosts of this generation."""
        self._leaving = 0
        """The generation that the launcher said is over."""
        self._lost = False
        self._heard_at = time.monotonic()
        self._listeners: list[Callable[[float, int], None]] = []
        self._line = ControlConnection(settings, self._heard)
        atexit.register(self._line.close)
        if hasattr(os, "register_at_fork"):  # there is one member a process
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child: it is no worker of this job."""
        atexit.unregister(self._line.close)
        self._line.forget()
        self._lost = True
        _held.member, _held.parents_worker = None, self.worker

    # -- generations -----------------------------------------------------------------------------

    def enter(
        self, connect: Callable[[], World], *, alone: Callable[[], World] | None = None,
        in_step: bool = False, lets_in: bool = False,
    ) -> World:  # fmt: skip
        """Wait for a place in the next generation and `connect`; again when it breaks before it is complete.

        `alone`: called instead where others train already, or are enough; it makes a world of one. `in_step`:
        ranks that are left make a step again together. `lets_in`: those that wait can come in.

        Raises RuntimeError when this worker was removed from the job, `LaunchError` when the launcher is
        gone, and what `connect` raises for reasons of its own.
        """
        while True:
            with ReservedPort(own_address(self._settings.address)) as port:
                flags = {"in_step": in_step, "lets_in": lets_in, "can_prepare": alone is not None}
                if self._join(port, flags) == "later" and alone is not None:
                    return alone()
                try:
                    return connect()
                except Mismatch:
                    raise
                except CommError as error:
                    self._tell_of_failure(str(error))
                    if not self.is_told_to_leave():
                        raise

    def regroup_of(self, here: World) -> WorkerRegroup:
        """Return how the ranks of `here` go on with those that are left."""
        return WorkerRegroup(self, here)

    def is_told_to_leave(self) -> bool:
        """Return whether the launcher has said, or says within some seconds, that this generation is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._leaving == self.generation or self._lost, _TOLD_SECONDS)

    def report_failure(self, why: str) -> None:
        """An exchange failed here: tell the launcher, so that every other rank leaves too, and leave."""
        self._tell_of_failure(why)
        escape()

    def _tell_of_failure(self, why: str) -> None:
        """Say that the generation failed here and, unless we are told to leave, which hosts cannot be reached.

        See [Note: links between workers] of the launcher's membership.
        """
        with self._changed:
            generation, ways, is_told = self.generation, self._ways, self._leaving == self.generation
        self._line.send({"type": "failed", "generation": generation, "why": why[:500]})
        if ways and not is_told:
            look = threading.Thread(
                target=self._look_around, args=(generation, ways), name="farandole reach", daemon=True
            )
            look.start()

    def _look_around(self, generation: int, ways: Sequence[tuple[str, int]]) -> None:
        missed = unreachable(ways)
        if missed:
            self._line.send({"type": "missed", "generation": generation, "addresses": missed})

    def _join(self, port: ReservedPort, flags: Mapping[str, bool]) -> str:
        """Ask for a place; return "assignment" where there is one, "later" where it is not needed yet."""
        with self._changed:
            self._answer, self._leaving = None, 0
            self._heard_at = time.monotonic()
        place = {"progress": self.progress, "address": port.address, "port": port.port}
        self._line.send({"type": "ready", **flags, **place})
        answer = self._wait_for_answer()
        if answer["type"] == "removed":
            raise RuntimeError(answer["why"])
        if answer["type"] == "assignment":
            adopt_rank_variables(answer["environment"])
        return str(answer["type"])

    def _wait_for_answer(self) -> Frame:
        with self._changed:
            while self._answer is None:
                if self._lost:
                    raise LaunchError("the launcher of this elastic job is gone")
                if time.monotonic() - self._heard_at > SILENCE_SECONDS:
                    raise LaunchError(f"the launcher of this elastic job said nothing for {SILENCE_SECONDS:g} s")
                self._changed.wait(1.0)
            return self._answer

    # -- state -----------------------------------------------------------------------------------

    def agree_on_sync(self, *, needed: bool) -> SyncAgreement:
        """Learn whether any rank needs the state; to be called by all ranks of a new generation.

        Without it survivors that skip the copy, because only hosts were removed, would wait for ever for those
        that do not.
        """
        if not has_world() or world().size == 1:
            return SyncAgreement(needed, max(self.progress, 0))
        gathered = all_gather_json(
            world(), "elastic state", {"needed": needed or self.progress < 0, "progress": self.progress}
        )
        return SyncAgreement(any(each["needed"] for each in gathered), max(int(gathered[0]["progress"]), 0))

    def has_state(self, progress: int) -> None:
        """This worker's state is that after `progress` commits of the job now."""
        self.progress = progress
        self._line.send({"type": "progress", "progress": progress})

    def committed(self) -> None:
        """One more commit: all ranks of the generation make it together."""
        self.progress = max(self.progress, 0) + 1
        if self.progress == 1:
            self._line.send({"type": "progress", "progress": 1})

    # -- hosts -----------------------------------------------------------------------------------

    def add_listener(self, listener: Callable[[float, int], None]) -> None:
        """Call `listener` with the launcher's time and the kind of change when hosts come or go, in its thread."""
        self._listeners.append(listener)

    # -- the listening thread --------------------------------------------------------------------

    def _heard(self, frame: Frame | None) -> None:
        kind = "lost" if frame is None else frame["type"]
        leaving = 0
        with self._changed:
            self._heard_at = time.monotonic()
            if frame is None:
                self._lost, leaving = True, self.generation
            elif kind in ("assignment", "later", "removed"):
                self._answer = frame
                if kind == "assignment":
                    self.generation, self.assigned_at = int(frame["generation"]), float(frame["at"])
                    self._ways = [(str(address), int(port)) for address, port in frame.get("ways", ())]
            elif kind == "leave":
                leaving = self._leaving = int(frame["generation"])
            self._changed.notify_all()
        if frame is not None and kind == "hosts_updated":
            self.asked_at = float(frame["at"])
            for listener in list(self._listeners):
                listener(float(frame["at"]), int(frame["kind"]))
        if leaving:
            threading.Thread(target=self._escape, args=(leaving,), name="farandole leaving", daemon=True).start()

    def _escape(self, generation: int) -> None:
        """Shut the sockets of a generation until the main thread has left it: it may be connecting still."""
        pause, longest = _ESCAPE_SECONDS
        while self.generation == generation and (self._leaving == generation or self._lost):
            escape()
            with self._changed:
                self._changed.wait(pause)
            pause = min(2 * pause, longest)


class WorkerRegroup:
    """A `Regroup`: by the launcher, which knows who is left."""

    def __init__(self, worker: ElasticWorker, here: World) -> None:
        self._worker, self._here = worker, here

    @property
    def worker(self) -> int:
        """See `Regroup`."""
        return self._worker.worker

    @property
    def is_asked(self) -> bool:
        """See `Regroup`."""
        return self._worker.asked_at >= self._worker.assigned_at  # both in one look of the launcher

    def has_state(self) -> None:
        """See `Regroup`."""
        if self._worker.progress < 1:
            self._worker.has_state(1)

    def leave(self, why: str) -> None:
        """See `Regroup`."""
        self._worker.report_failure(why)

    def enter(self, *, lets_in: bool = False) -> None:
        """See `Regroup`."""
        in_step = not self._here.is_apart
        connect_again(self._here, partial(self._worker.enter, in_step=in_step, lets_in=lets_in))


@dataclass
class _Membership:
    member: ElasticWorker | None = None
    parents_worker: int | None = None
    """In a forked child of a worker: the worker's number."""


_held = _Membership()


def member() -> ElasticWorker | None:
    """Return this process's membership; None when the job is not elastic.

    The first call connects to the launcher and raises `LaunchError` when it is not there.
    """
    if _held.member is None:
        settings = read_elastic_settings()
        if settings is None:
            return None
        if _held.parents_worker == settings.worker:
            raise ConfigError(
                f"this process was forked from worker {settings.worker} of an elastic job, and is none itself",
                remedy="call farandole.init() in the worker alone",
            )
        _held.member = ElasticWorker(settings)
    return _held.member


def generation_is_over() -> bool:
    """Return whether this is an elastic job whose launcher has ended our generation, or does so in a moment."""
    here = member()
    return here is not None and here.is_told_to_leave()
