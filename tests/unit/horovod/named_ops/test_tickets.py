"""Callbacks of tickets: each is called once, whoever comes first."""

from __future__ import annotations

import threading
import time
from functools import partial

from farandole.horovod.named_ops.operations import PendingTicket


def test_callbacks_before_and_after_the_end() -> None:
    ticket = PendingTicket(lambda: None)
    called: list[str] = []
    ticket.call_when_done(lambda: called.append("before"))
    assert called == []
    ticket.finish(3)
    assert called == ["before"]
    ticket.finish(4)  # ignored
    assert called == ["before"]
    ticket.call_when_done(lambda: called.append("after"))
    assert called == ["before", "after"]
    assert ticket.wait() == 3


def test_a_callback_sees_the_result() -> None:
    ticket = PendingTicket(lambda: None)
    seen: list[tuple[bool, str]] = []
    ticket.call_when_done(lambda: seen.append((ticket.done(), ticket.wait())))
    ticket.finish("result")
    assert seen == [(True, "result")]


def ask(ticket: PendingTicket, called: list[int], start: threading.Barrier) -> None:
    start.wait()
    for number in range(3):
        ticket.call_when_done(partial(called.append, number))


def test_each_callback_is_called_once_when_both_sides_race() -> None:
    for _ in range(300):
        ticket = PendingTicket(lambda: None)
        called: list[int] = []
        start = threading.Barrier(2)

        thread = threading.Thread(target=ask, args=(ticket, called, start))
        thread.start()
        start.wait()
        ticket.finish(None)
        thread.join()
        assert sorted(called) == [0, 1, 2]


def test_it_is_known_since_when_a_thread_sleeps() -> None:
    done, awaited = PendingTicket(lambda: None), PendingTicket(lambda: None)
    done.finish(None)
    done.wait()
    assert done.waits_since_seconds is None
    begin = time.monotonic()
    thread = threading.Thread(target=awaited.wait)
    thread.start()
    while awaited.waits_since_seconds is None:
        time.sleep(0.001)
    awaited.finish(None)
    thread.join()
    assert begin <= awaited.waits_since_seconds <= time.monotonic()
