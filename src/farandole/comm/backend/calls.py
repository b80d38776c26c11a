"""A call on its way: who carries it out, how it is waited for, and what torch.compile sees of it.

[Note: errors in futures] Futures of torch take errors from C++ only. One whose callback raises is the way to make
one: so a future of ours is the second of two, and what its waiters meet in C++ (DDP's reducer, for one) is a
`RuntimeError` with the name and the text of our error. `wait` raises the error itself.

[Note: callbacks] What a user hangs on a future, such as a communication hook of DDP, may make the next call and
wait for that one's future, in C++, where no code of ours can carry it out. So a thread that calls users' functions
is none of those that serve meanwhile: there is always one that does, as in torch's own backends.

[Note: who carries a call out] A call that is not asynchronous is carried out by the thread that makes it, with all
that is queued before it: to hand it to another thread and wait would take longer than a small exchange. An
asynchronous one is queued for the group's thread; who waits for it before that thread has begun carries it out
itself. So the order is that of the queue, whichever thread works, and one thread works at a time. The group's
thread leaves those who wait at once, as functional collectives do, a moment to come.

The group's thread is needed although others may help: another rank may wait for a call that this rank has begun
and does not wait for. It is started with the first asynchronous call.

[Note: every call ends] A call ends, with a result or an error, whatever fails. It ends when the queue is free
again: what is called at its end, such as a callback of a future, may make the next call.

[Note: interrupted calls] A handler of a signal may raise inside a call that this thread carries out. The call has
that exception, and the group is over; later calls raise an error that tells of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import FarandoleError, Stalled
from ..device.streams import untraced
from ..transport.transport import Transport

# What an asynchronous operation returns: it can be waited for, asked, and turned into a future.


class WorkEnd:
    """Whether an operation is over, and how.

    It does not know the operation's tensors: the thread that tells of the end holds this for a moment longer, and
    who waits looks at once whether a tensor is held elsewhere (`grad_ownership`).
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.source = -1
        self.first_future: torch.futures.Future[Any] | None = None

    def tell(self, error: BaseException | None = None, *, source: int = -1) -> Callable[[], object] | None:
        """Let all that wait go on; called once, by who carries the operation out.

        Returns:
            What calls the callbacks of the futures; None where there are none.
        """
        self.error, self.source = error, source
        with self.lock:
            self.done.set()
            future = self.first_future
        return None if future is None else partial(future.set_result, None)


class GroupWork(dist.Work):
    """An operation of a `ProcessGroup` on its way."""

    def __init__(self, call: str, rank: int, outputs: Sequence[torch.Tensor]) -> None:
        """`rank`: this one's global rank; `outputs`: what the future's value will be."""
        super().__init__()
        self._call, self._rank = call, rank
        self._outputs = list(outputs)
        self.finish: Callable[[], object] | None = None
        """Carries the operation out, if no thread has begun to."""
        self.on_wait: Callable[[], object] = _ignore
        """Called when a user waits, or may: a wait for the future is not seen."""
        self.end = WorkEnd()
        self._future: torch.futures.Future[Any] | None = None

    @untraced
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when the operation is over.

        Args:
            timeout: how long to wait at most; 0: until the group's own time-out ends the operation.

        Raises:
            CommError: what stopped it; `Stalled` when `timeout` is over before.
        """
        seconds = timeout.total_seconds()
        if seconds <= 0 and self.finish is not None and not self.end.done.is_set():
            self.on_wait()
            self.finish()
        if not self.end.done.wait(seconds if seconds > 0 else None):
            raise Stalled(
                f"it was not over within {seconds:g} s, and goes on",
                rank=self._rank,
                operation=self._call,
                remedy="wait again, or for longer",
            )
        if self.end.error is not None:
            raise self.end.error
        return True

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        return self.end.done.is_set()

    def is_success(self) -> bool:
        """Return whether it is over, and well."""
        return self.end.done.is_set() and self.end.error is None

    def exception(self) -> BaseException | None:
        """Return what stopped it; None: nothing has."""
        return self.end.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written, when it is over."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Return who sent what a receive from any rank received: a rank of the group."""
        return self.end.source

    _source_rank = source_rank

    @untraced
    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the written tensors. See [Note: errors in futures]."""
        self.on_wait()
        with self.end.lock:
            if self._future is None:
                first: torch.futures.Future[Any] = torch.futures.Future()
                self._future, self.end.first_future = first.then(self._value), first
                if self.end.done.is_set():
                    first.set_result(None)
            return self._future

    def _value(self, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
        if self.end.error is not None:
            raise self.end.error
        return self._outputs


def _ignore() -> None:
    pass


# The threads that carry out what a group has queued, and the callbacks of its futures.


class Servers:
    """Threads of one queue; each runs `serve` until that returns. See [Note: callbacks]."""

    def __init__(self, name: str, serve: Callable[[], object]) -> None:
        self._name, self._serve = name, serve
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._free = 0
        """How many are in no callback."""

    def start(self) -> None:
        """Start a thread, unless there is one that is in no callback."""
        with self._lock:
            if self._free:
                return
            self._free += 1
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def call_back(self, callback: Callable[[], object]) -> None:
        """Call a user's function, while another thread serves."""
        is_server = threading.current_thread() in self._threads
        if is_server:
            with self._lock:
                self._free -= 1
        try:
            self.start()
            callback()
        finally:
            if is_server:
                with self._lock:
                    self._free += 1

    def join(self, seconds: float) -> None:
        """Wait for the threads, for each at most so long."""
        for thread in self._threads - {threading.current_thread()}:
            thread.join(seconds)


# The collectives of a group, carried out one after the other in the order of calls.

HESITATION_SECONDS = 0.0002
"""How long a thread that has slept leaves new work to who may be about to wait for it."""
_LEAVE_SECONDS = 5.0
"""For the call that is carried out when the group is left."""
_log = logging.getLogger("farandole")


@dataclass(eq=False)
class QueuedCall:
    """A call on its way."""

    perform: Callable[[], object]
    """Done in its turn."""
    end: Callable[[BaseException | None], Callable[[], object] | None]
    """Called afterwards, once, with what stopped it; returns what else is to be called: users' functions."""
    is_over: bool = False

    def perform_once(self) -> None:
        """Do it, and forget it: it knows the tensors, and this may be held longer."""
        perform, self.perform = self.perform, _nothing
        perform()


class CallQueue:
    """Carries out the calls of one group. See [Note: who carries a call out]."""

    def __init__(self, transport: Transport | None, on_failure: Callable[[], object] | None = None) -> None:
        """`transport`, if any, belongs to the queue from now on; `on_failure` is called when a call has failed."""
        self._transport = transport
        self._on_failure = on_failure
        self._waiting: deque[QueuedCall] = deque()
        self._lock = threading.Lock()
        self._to_do = threading.Condition(self._lock)
        """Told to the group's thread."""
        self._free = threading.Condition(self._lock)
        """Told to those who wait for another thread to end a call."""
        self._is_busy = self._is_closing = False
        self._broken: BaseException | None = None
        self._servers = Servers("farandole-group", self._serve)

    def submit(self, call: QueuedCall, *, is_async: bool) -> None:
        """Queue a call; return when it is over, unless it is asynchronous."""
        with self._lock:
            is_refused = self._is_closing
            if is_refused:
                call.is_over = True
            else:
                self._waiting.append(call)
            if is_async and not is_refused:
                self._servers.start()
                self._to_do.notify()
        if is_refused:
            self._end(call, _closed())
        elif not is_async:
            self.finish(call)

    def finish(self, call: QueuedCall) -> None:
        """Return when `call` is over, after carrying out what is queued up to it."""
        while True:
            first: QueuedCall | None = None
            try:
                with self._lock:
                    while self._is_busy and not call.is_over:
                        self._free.wait()
                    if call.is_over:
                        return
                    first = self._begin_first()
                self._carry_out(first)
            except BaseException as problem:
                # By a handler of a signal, before or after the call itself: no thread may wait for this one.
                if first is not None and not first.is_over:
                    self._break(problem)
                    self._over(first, problem)
                raise

    def close(self) -> None:
        """Fail what has not begun, wait for what has, and close the transport."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            refused = list(self._waiting)
            self._waiting.clear()
            for call in refused:
                call.is_over = True
            self._to_do.notify_all()
            self._free.notify_all()
        for call in refused:
            self._end(call, _closed())
        is_free = self._wait_until_free()
        if self._transport is None:
            return
        if not is_free:
            self._transport.abort()  # its waits for other ranks end with an error
            if not self._wait_until_free():
                _log.warning("a call did not end within %g s: its connections stay", 2 * _LEAVE_SECONDS)
                return
        self._transport.belong_to(threading.current_thread())
        if is_free and self._broken is None:
            self._transport.drain(_LEAVE_SECONDS)
        self._transport.close()

    def _wait_until_free(self) -> bool:
        with self._lock:
            return self._free.wait_for(lambda: not self._is_busy, _LEAVE_SECONDS)

    def _serve(self) -> None:
        while True:
            with self._lock:
                has_slept = False
                while (self._is_busy or not self._waiting) and not self._is_closing:
                    has_slept = self._to_do.wait()
                if self._is_closing:
                    return
                first = None if has_slept else self._begin_first()
            if first is None:
                time.sleep(HESITATION_SECONDS)
                continue
            self._carry_out(first)
            del first  # it is over

    def _begin_first(self) -> QueuedCall:
        """Take the first call of the queue. Called with the lock held, when nothing is carried out."""
        self._is_busy = True
        return self._waiting.popleft()

    def _carry_out(self, call: QueuedCall) -> None:
        problem: BaseException | None = None
        try:
            if self._broken is not None:
                raise self._broken
            if self._transport is not None:
                self._transport.belong_to(threading.current_thread())
            # The caller's tensors may be those of inference mode, which only that mode may write to.
            with torch.inference_mode():
                call.perform_once()
        except BaseException as reason:
            problem = reason
            self._break(reason)
        self._over(call, problem)

    def _over(self, call: QueuedCall, problem: BaseException | None) -> None:
        """Let the next call begin, and end this one."""
        with self._lock:
            self._is_busy = False
            call.is_over = True
            if self._waiting:
                self._to_do.notify()
            self._free.notify_all()
        self._end(call, problem)

    def _end(self, call: QueuedCall, problem: BaseException | None) -> None:
        try:
            callbacks = call.end(problem)
            if callbacks is not None:
                self._servers.call_back(callbacks)
        except BaseException:
            _log.exception("farandole: a callback at the end of a call failed")

    def _break(self, problem: BaseException) -> None:
        """Fail from now on, and let the other ranks know at once: this process may live on for long."""
        if self._broken is not None:
            return
        self._broken = problem if isinstance(problem, FarandoleError) else _told(problem)
        tellers: list[Callable[[], object]] = []
        if self._transport is not None:
            words, leave = " ".join(f"{type(problem).__name__}: {problem}".split()), self._transport.leave
            tellers.append(lambda: leave(words))
        if self._on_failure is not None:
            tellers.append(self._on_failure)
        for tell in tellers:
            try:
                tell()
            except BaseException:
                _log.exception("farandole: the handler of a failure failed as well")


def _nothing() -> None:
    pass


def _closed() -> RuntimeError:
    return RuntimeError("the group was closed")


def _told(problem: BaseException) -> RuntimeError:
    """Return what later calls raise: to raise a handler's own exception again would say that it ran again."""
    what = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    told = RuntimeError(f"an earlier call of this group was ended by {what}: make a new group")
    told.__cause__ = problem
    return told
