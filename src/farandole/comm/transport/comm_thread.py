"""The conductor: one thread a rank that drives codecs, so that their rounds overlap backward.

A `BucketWork` is a bucket: several items (its segments), each a generator. While one item's message is on the
wire the next is encoded.

[Note: the same waits in the same order] Ranks reach a bucket at different times. If a rank could block on
a message of a bucket that another rank has not begun, while that one blocks on an older bucket, both would
wait for ever. So the order of *waits* is fixed: jobs in the order of submission, which all ranks agree on,
and within a job first in, first out over a window of fixed width. *Sends* may run ahead: items of the next
jobs are begun as soon as there is room, but never waited for before their turn. By induction over the
common sequence of waits no rank waits for ever.

[Note: barriers receive too] A job that is added up inside hosts waits at their barriers for ranks that may still
be sending, to ranks of other hosts that wait at a barrier as well. So a rank that waits there goes on serving its
connections (`serve_now`): two hosts' ranks that send crosswise would else wait for each other, each for one that
does not read.

[Note: who waits is woken] A job ends, with a result or an error, whatever fails: also when those who are told of
the failure fail themselves, and when it is submitted to a conductor that has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from ...core.vocabulary.errors import Stalled
from ..messages import Message, check
from .rank_group import PieceExchange, RankGroup, Within
from .transport import PendingMessage, Transport

_LEAVE_SECONDS = 5.0
"""For the last messages when the world closes."""
WINDOW = 4
"""Items in flight."""
_ROUND_TAGS = 8
ITEM_TAGS = 1024
"""Items a job may have."""
_JOB_TAGS = 2**20

_log = logging.getLogger("farandole")
_Result = TypeVar("_Result")
Conversation = Generator[Message | PieceExchange | Within, torch.Tensor, Any]


@dataclass(frozen=True)
class SegmentWork:
    """Something that talks to the other ranks of a circle, and what to do with its result."""

    begin: Callable[[], Conversation]
    finish: Callable[[Any], None]
    circle: RankGroup


@dataclass(eq=False)
class BucketWork:
    """A bucket on its way. `wait` returns when its result has landed."""

    items: Sequence[SegmentWork]
    number: int
    prepare: Callable[[], object] | None = None
    """Done in the job's turn, before its first item begins; may wait for other ranks."""
    complete: Callable[[], object] | None = None
    """Done after its last item has finished; may wait for other ranks."""
    failed: Callable[[BaseException], object] | None = None
    """Called instead of `complete` with the error that stopped it."""
    sent_bytes: int = 0
    begin_seconds: float = 0.0
    """When its turn came; 0.0 before."""
    end_seconds: float = 0.0
    """When its result had landed; 0.0 before."""
    wait_seconds: float = 0.0
    """Part of the time between: waiting for other ranks."""
    codec_seconds: float = 0.0
    """Part of the time between: encoding, decoding, adding, and passing messages to the kernel."""
    rounds: int = 0
    """Messages of one item that were waited for one after the other; the most of all items."""
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None
    _begun: deque[_GeneratorRunner] = field(default_factory=deque)
    _next: int = 0

    def wait(self) -> None:
        """Wait for the end; raise what stopped it."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def _end(self, problem: BaseException | None) -> None:
        self._error = problem
        self._done.set()


class CommThread:
    """Drives jobs in the order of submission. One a gradient engine."""

    def __init__(self, transport: Transport | None, on_failure: Callable[[], object] | None = None) -> None:
        """`transport` may be None when no job has items; it belongs to this conductor's thread from now on.

        A job that fails ends the conductor: the other ranks are told, and `on_failure` is called, by the thread.
        """
        self._transport = transport
        self._on_failure = on_failure
        self._waiting: deque[BucketWork] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._submitted = 0
        self._broken: BaseException | None = None
        self._sending = False
        self._thread = threading.Thread(target=self._serve, name="farandole-conductor", daemon=True)
        if transport is not None:
            transport.belong_to(self._thread)
        self._thread.start()

    @property
    def transport(self) -> Transport:
        """What messages travel by; for the conductor's thread to use: others ask by `run`."""
        assert self._transport is not None, "this conductor has no messages"
        return self._transport

    @property
    def has_transport(self) -> bool:
        """Whether its jobs may have items."""
        return self._transport is not None

    def submit(
        self,
        items: Sequence[SegmentWork],
        prepare: Callable[[], object] | None = None,
        complete: Callable[[], object] | None = None,
        *,
        failed: Callable[[BaseException], object] | None = None,
        number: int | None = None,
    ) -> BucketWork:
        """Queue a job. All ranks must submit the same jobs in the same order.

        Where the ranks of a world do not all take part in all jobs, each job has a `number` that grows in an order
        common to all ranks.
        """
        if len(items) > ITEM_TAGS:
            raise ValueError(f"a job of {len(items)} items, at most {ITEM_TAGS} are possible")
        with self._changed:
            job = BucketWork(items, self._submitted if number is None else number, prepare, complete, failed)
            self._submitted += 1
            if self._closing:
                _refuse(job)
                return job
            self._waiting.append(job)
            self._notify()
        return job

    def run(self, call: Callable[[Transport], _Result]) -> _Result:
        """Let the thread do `call` with the transport, when all jobs before it are over, and return its result.

        To be called by all ranks in the same order among their jobs. What it raises ends the conductor.
        """
        results: list[_Result] = []
        self.submit([], prepare=lambda: results.append(call(self.transport))).wait()
        return results[0]

    def serve_now(self) -> bool:
        """Move what messages can be moved without waiting, if the calling thread is the one that may."""
        if self._transport is None or threading.current_thread() is not self._thread:
            return False
        return self._transport.serve_now()

    def close(self) -> None:
        """End the thread; jobs not begun fail."""
        with self._changed:
            self._closing = True
            self._notify()
        is_mine = threading.current_thread() is self._thread
        if not is_mine:
            self._thread.join(timeout=_LEAVE_SECONDS)
        if self._transport is None:
            return
        if self._thread.is_alive() and not is_mine:
            self._transport.abort()  # its waits for other ranks end with an error
            self._thread.join(timeout=_LEAVE_SECONDS)
            if self._thread.is_alive():
                _log.warning("a conductor did not end within %g s: its connections stay", 2 * _LEAVE_SECONDS)
                return
        elif not is_mine:
            self._transport.belong_to(threading.current_thread())
            if self._broken is None:
                self._transport.drain(_LEAVE_SECONDS)
        self._transport.close()

    def _notify(self) -> None:
        self._changed.notify()
        if self._sending and self._transport is not None:
            self._transport.wake()

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._rest()
                if self._closing:
                    for job in self._waiting:
                        _refuse(job)
                    return
                job = self._waiting[0]
            stopped = None
            try:
                if self._broken is not None:
                    raise self._broken
                with torch.no_grad():
                    self._conduct(job)
            except BaseException as problem:
                stopped = problem
                self._break(problem)
                if job.failed is not None:
                    _whatever_happens(partial(job.failed, problem))
            with self._changed:
                self._waiting.popleft()
            job._end(stopped)
            # It knows the gradients, and through them their engine, which may be dropped while we wait.
            del job

    def _rest(self) -> None:
        """Wait for a job, sending meanwhile what the kernel has not taken yet. Called with the lock held."""
        transport = self._transport
        if transport is None or not transport.has_more_to_send or self._broken is not None:
            self._changed.wait()
            return
        self._sending = True
        self._changed.release()
        try:
            transport.drain(transport.timeout_seconds)
        except Exception as problem:  # the thread must live to tell it
            self._break(problem)
        finally:
            self._changed.acquire()
            self._sending = False

    def _break(self, problem: BaseException) -> None:
        """Fail from now on, and let the other ranks know at once: this process may live on for long."""
        if self._broken is not None:
            return
        self._broken = problem
        if self._transport is not None:
            words = " ".join(f"{type(problem).__name__}: {problem}".split())
            _whatever_happens(partial(self._transport.leave, words))
        if self._on_failure is not None:
            _whatever_happens(self._on_failure)

    def _conduct(self, job: BucketWork) -> None:
        active = job._begun
        job.begin_seconds = job.begin_seconds or time.monotonic()
        if job.prepare is not None:
            self._send_everything()
            job.prepare()
        self._begin_items(job)
        while active:
            self._run_ahead(len(active))
            talk = active.popleft()
            begin = time.monotonic()
            answer = talk.wait()
            job.wait_seconds += time.monotonic() - begin
            if talk.advance(answer):
                active.append(talk)
            self._begin_items(job)
        if job.complete is not None:
            self._send_everything()
            job.complete()
        job.end_seconds = time.monotonic()

    def _send_everything(self) -> None:
        """Send what is queued, before waiting for ranks that may wait for those who wait for it."""
        transport = self._transport
        if transport is None:
            return
        deadline, moved = time.monotonic() + transport.timeout_seconds, transport.moved_bytes
        while transport.has_more_to_send:
            transport.drain(1.0)
            if moved != transport.moved_bytes:
                deadline, moved = time.monotonic() + transport.timeout_seconds, transport.moved_bytes
            elif time.monotonic() > deadline:
                raise Stalled(
                    f"some ranks took nothing of what was sent to them for {transport.timeout_seconds:g} s",
                    rank=transport.rank,
                    operation="exchange",
                    remedy="another rank is stuck",
                )

    def _begin_items(self, job: BucketWork, room: int = WINDOW) -> None:
        while len(job._begun) < room and job._next < len(job.items):
            assert self._transport is not None, "items need a transport"
            job.begin_seconds = job.begin_seconds or time.monotonic()
            talk = _GeneratorRunner(self._transport, job, job._next)
            job._next += 1
            if talk.advance(None):
                job._begun.append(talk)

    def _runs_ahead(self, job: BucketWork) -> bool:
        """Return whether items of a job may begin before its turn."""
        return job.prepare is None

    def _run_ahead(self, in_flight: int) -> None:
        """Begin items of the next jobs while the current one leaves room. Never waits."""
        with self._changed:
            later = list(self._waiting)[1:]
        for job in later:
            if in_flight >= WINDOW or not self._runs_ahead(job):
                return
            before = len(job._begun)
            self._begin_items(job, min(WINDOW, before + WINDOW - in_flight))
            in_flight += len(job._begun) - before
            if job._next < len(job.items):
                return


def _refuse(job: BucketWork) -> None:
    """End a job that was not begun when the conductor was closed."""
    problem = RuntimeError("the conductor was closed")
    if job.failed is not None:
        _whatever_happens(partial(job.failed, problem))
    job._end(problem)


def _whatever_happens(tell: Callable[[], object]) -> None:
    """Call a failure handler. See [Note: who waits is woken]."""
    try:
        tell()
    except BaseException:
        _log.exception("farandole: the handler of a failure failed as well")


class _GeneratorRunner:
    """Runs one item's generator and holds the message it waits for; an all-reduce is a nested generator."""

    def __init__(self, transport: Transport, job: BucketWork, index: int) -> None:
        self._transport = transport
        self._job = job
        self._item = job.items[index]
        self._stack: list[Conversation] = [self._item.begin()]
        self._tag = (job.number % _JOB_TAGS * ITEM_TAGS + index) * _ROUND_TAGS
        self._round = 0
        self._flight: PendingMessage | None = None

    def wait(self) -> torch.Tensor:
        assert self._flight is not None, "something is on its way"
        return self._flight.wait()

    def advance(self, answer: torch.Tensor | None) -> bool:
        """Give the generator its answer; send what it says next, or finish. Return whether it goes on."""
        begin = time.monotonic()
        try:
            return self._advance(answer)
        finally:
            self._job.codec_seconds += time.monotonic() - begin

    def _advance(self, answer: torch.Tensor | None) -> bool:
        while self._stack:
            try:
                message = next(self._stack[-1]) if answer is None else self._stack[-1].send(answer)
            except StopIteration as end:
                self._stack.pop()
                if not self._stack:
                    self._item.finish(end.value)
                    return False
                answer = end.value
                continue
            if isinstance(message, PieceExchange):
                self._flight = self._transport.start_parts(message, self._next_tag(), self._item.circle)
                self._job.sent_bytes += self._flight.sent_bytes
                return True
            circle = self._item.circle
            if isinstance(message, Within):
                circle, message = message.group, message.message
            check(message, circle.seat)
            if message.operation == "all_reduce":
                assert circle is self._item.circle, "its rounds are those of the conversation's own group"
                self._stack.append(self._transport.sum_by(message.tensor, circle.seat))
                answer = None
                continue
            self._flight = self._transport.start(message, self._next_tag(), circle)
            self._job.sent_bytes += self._flight.sent_bytes
            return True
        return False

    def _next_tag(self) -> int:
        tag = self._tag + self._round % _ROUND_TAGS
        self._round += 1
        self._job.rounds = max(self._job.rounds, self._round)
        return tag
