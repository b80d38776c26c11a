"""A thread that waits for a small operation reads the control connections itself; nothing is lost by that."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import cast

import pytest
import torch

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import CommError
from farandole.horovod.named_ops.channel import ControlChannel
from farandole.horovod.named_ops.engine import NamedOpsEngine
from farandole.horovod.named_ops.operations import PendingTicket, Request, Ticket
from farandole.horovod.named_ops.stall_inspector import main_thread_place
from tests.ranks.pool import ranks
from tests.ranks.test_negotiate import engine, run, switches

ONE = torch.ones(4)
LOOP = 300


def submit(on: NamedOpsEngine, name: str) -> Ticket:
    return on.submit([Request(name, "allreduce", ONE)])[0]


def engine_and_links(world: World) -> tuple[NamedOpsEngine, ControlChannel]:
    """Return an engine after its first operation, and its control connections, to put faults into."""
    it = NamedOpsEngine(world)
    run(it, "first", "allreduce", ONE)
    links = it._controller.state.links
    assert links is not None
    return it, links


def run_often(on: NamedOpsEngine) -> None:
    for i in range(1000):
        run(on, f"loop/{i}", "allreduce", ONE)


@contextmanager
def alarm_after(seconds: float, handler: object) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)  # type: ignore[arg-type]
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.full("busy")
@pytest.mark.alone
@ranks(2)
def test_a_loop_of_small_operations_wakes_no_other_thread() -> None:
    fd.init()
    with engine() as it:
        run(it, "first", "allreduce", ONE)
        counts = []
        for _ in range(5):
            before = switches()
            for i in range(LOOP):
                assert run(it, f"loop/{i % 3}", "allreduce", ONE).equal(2 * ONE)
            counts.append(switches() - before)
    assert min(counts) < LOOP / 3, "only to look after the links now and then"


@pytest.mark.full("further")
@ranks(2)
def test_what_nobody_waits_for_goes_on_after_a_loop() -> None:
    """The links are lent to the loop for a while; a callback, a question or another operation ends that."""
    world = fd.init()
    with engine() as it:
        for _ in range(30):
            run(it, "loop", "allreduce", ONE)
        if world.rank:
            time.sleep(0.05)  # so that the other rank is told by its control thread
        arrived = threading.Event()
        submit(it, "called back").call_when_done(arrived.set)
        assert arrived.wait(5.0)
        for _ in range(30):
            run(it, "loop", "allreduce", ONE)
        asked = submit(it, "asked")
        while not asked.done():
            time.sleep(0.001)
        for _ in range(30):
            run(it, "loop", "allreduce", ONE)
        quiet = [submit(it, "quiet"), *it.submit([Request("large", "allreduce", torch.ones(70_000))])]
        time.sleep(0.2)
        assert all(ticket.done() for ticket in quiet)


@ranks(2)
def test_many_threads_wait_while_one_of_them_reads() -> None:
    fd.init()
    with engine() as it:
        wrong: list[object] = []

        def loop(name: str, count: int) -> None:
            for i in range(count):
                found = run(it, f"{name}/{i}", "allreduce", torch.full((2,), float(i)))
                if found.tolist() != [2.0 * i] * 2:
                    wrong.append((name, i, found))

        threads = [threading.Thread(target=loop, args=(f"thread {k}", 60)) for k in range(4)]
        for thread in threads:
            thread.start()
        loop("main", 60)
        for thread in threads:
            thread.join()
        assert not wrong


@ranks(2)
def test_a_signal_handler_may_wait_while_its_thread_waits() -> None:
    """And the operation that was interrupted ends too, also when the handler has received its last message."""
    world = fd.init()
    with engine() as it:
        found: list[float] = []

        def handler(number: int, frame: FrameType | None) -> None:
            if world.rank:
                submit(it, "interrupted")
            found.append(run(it, "inner", "allreduce", ONE).sum().item())

        with alarm_after(0.6 if world.rank else 0.3, handler):  # rank 0 sleeps in its wait by then
            if world.rank == 0:
                assert run(it, "interrupted", "allreduce", ONE).equal(2 * ONE)
            while not found:  # on rank 0 too: the other one's alarm may be so much earlier that the wait is over
                time.sleep(0.01)
        assert found == [8.0]
        assert run(it, "after", "allreduce", ONE).equal(2 * ONE)


@ranks(2)
def test_a_signal_handler_that_comes_within_the_engine_is_refused() -> None:
    """In the midst of a message it would read what its own thread has half read."""
    world = fd.init()
    for at in ("_pump_in", "send"):
        it, links = engine_and_links(world)
        said: list[str] = []

        def handler(number: int, frame: FrameType | None, it: NamedOpsEngine = it, said: list[str] = said) -> None:
            earlier = PendingTicket(it._controller.send_now)
            for use in (lambda: submit(it, "inner"), it.join, earlier.wait, it.close):
                with pytest.raises(CommError, match="a signal handler used named operations") as caught:
                    use()
                said.append(str(caught.value))

        inside = getattr(links, at)

        def interrupted(*given: object, inside: object = inside, said: list[str] = said) -> None:
            if threading.current_thread() is threading.main_thread() and not said:
                signal.raise_signal(signal.SIGALRM)
            inside(*given)  # type: ignore[operator]

        setattr(links, at, interrupted)
        with alarm_after(100.0, handler):
            run_often(it)
        assert len(said) == 4
        assert "set a flag" in said[0]
        assert run(it, "after", "allreduce", ONE).equal(2 * ONE), "it may go on"
        it.close()


@ranks(2)
def test_an_interrupt_while_an_operation_is_announced_ends_the_engine_on_all_ranks() -> None:
    world = fd.init()
    it, links = engine_and_links(world)
    if world.rank == 0:
        send = links.send

        def interrupted(*_: object) -> None:
            links.send = send  # type: ignore[method-assign]
            raise KeyboardInterrupt

        links.send = interrupted  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyboardInterrupt):
            submit(it, "second")
        with pytest.raises(CommError, match="interrupted while it announced"):
            run(it, "next", "allreduce", ONE)
    else:
        with pytest.raises(CommError, match=r"rank 0 .*interrupted while it announced an operation"):
            run(it, "second", "allreduce", ONE)
    all_gather_json(world, "test/announced", 0)
    it.close()


@ranks(2)
def test_a_wait_that_is_broken_off_may_be_repeated() -> None:
    world = fd.init()
    with engine() as it:

        def handler(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        if world.rank == 0:
            ticket = submit(it, "late")
            with alarm_after(0.2, handler), pytest.raises(KeyboardInterrupt):
                ticket.wait()
            all_gather_json(world, "test/broken off", 0)
            deadline = time.monotonic() + 10.0
            while not cast(PendingTicket, ticket).is_done:
                assert time.monotonic() < deadline, "it ends although no thread waits or asks"
                time.sleep(0.01)
        else:
            all_gather_json(world, "test/broken off", 0)
            ticket = submit(it, "late")
        assert ticket.wait().equal(2 * ONE)


@ranks(2)
def test_an_interrupt_while_messages_are_read_ends_the_engine_on_all_ranks() -> None:
    """What was read is lost: to go on would be wrong."""
    world = fd.init()
    it, links = engine_and_links(world)
    if world.rank == 0:
        feed, peer = links._pump_in, links.by_rank[1]

        def interrupted(link: object) -> None:
            feed(link)  # type: ignore[arg-type]
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt

        assert peer is not None
        links._pump_in = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run_often(it)
        links._pump_in = feed  # type: ignore[method-assign]
        with pytest.raises(CommError, match="interrupted while it read"):
            run(it, "next", "allreduce", ONE)
    else:
        with pytest.raises(CommError, match=r"rank 0 .*interrupted while it read what others sent"):
            run_often(it)
    all_gather_json(world, "test/interrupted", 0)
    it.close()


@ranks(2)
def test_closing_from_another_thread_ends_a_wait() -> None:
    world = fd.init()
    it = NamedOpsEngine(world)
    ticket = submit(it, "first")
    ticket.wait()
    if world.rank == 0:
        threading.Timer(0.2, it.close).start()
        with pytest.raises(CommError, match="closed"):
            run(it, "never", "allreduce", ONE)
    else:
        with pytest.raises(CommError):
            run(it, "other", "allreduce", ONE)
        it.close()
    for _ in range(3):
        assert ticket.wait().equal(2 * ONE), "as often as is asked for"
    all_gather_json(world, "test/closed", 0)


@ranks(2)
def test_the_place_of_a_thread_that_reads_is_where_it_waits() -> None:
    world = fd.init()
    with engine() as it:
        places: list[str] = []
        links = it._controller.state.links
        assert links is not None
        serve = links.serve

        def noting(events: object) -> object:
            places.append(main_thread_place())
            return serve(events)  # type: ignore[arg-type]

        if world.rank == 0:
            links.serve = noting  # type: ignore[assignment, method-assign]
        else:
            time.sleep(0.1)
        run(it, "here", "allreduce", ONE)
        links.serve = serve  # type: ignore[method-assign]
        assert all("test_waiting_threads.py" in place for place in places)
        assert not any("_serve" in place for place in places), places[-1]
