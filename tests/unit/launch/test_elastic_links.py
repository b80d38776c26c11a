"""Two workers that cannot reach each other, though the launcher reaches both."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from farandole.launch.elastic.membership import LinkFaults
from farandole.train import elastic as elastic_worker
from farandole.train.elastic import MOST_CALLS, ElasticWorker, unreachable
from tests.unit.launch.test_elastic_membership import Job

ORDER = {"a": (0, 0), "b": (0, 1), "c": (0, 2)}

# -- whom to drop ---------------------------------------------------------------------------------


def test_a_pair_that_fails_twice_running_costs_the_later_host() -> None:
    links = LinkFaults()
    links.note("b", ["c"], 1)
    assert links.host_to_drop(1, ORDER) is None
    links.note("c", ["b"], 2)  # whichever of the two says it
    assert links.host_to_drop(2, ORDER) == ("c", ["b"])
    assert links.host_to_drop(2, {"a": (0, 0), "b": (0, 1)}) is None, "it is gone already"
    links.forget("c")
    assert links.host_to_drop(2, ORDER) is None


def test_failures_that_are_not_of_one_pair_or_not_running_drop_nobody() -> None:
    links = LinkFaults()
    links.note("b", ["c"], 1)
    links.note("a", ["c"], 2)
    links.note("b", ["c"], 3)
    assert all(links.host_to_drop(generation, ORDER) is None for generation in (1, 2, 3))


def test_the_host_that_most_others_miss_is_dropped_also_if_it_is_the_first() -> None:
    links = LinkFaults()
    for generation in (4, 5):
        links.note("b", ["a"], generation)
        links.note("c", ["a"], generation)
    assert links.host_to_drop(5, ORDER) == ("a", ["b", "c"])


# -- the membership -----------------------------------------------------------------------------------


def spread(**options: Any) -> Job:
    """Return a job on three hosts with addresses of their own, whose first generation trains."""
    job = Job({"a": 1, "b": 1, "c": 1}, **options)
    meet(job, 0, 1, 2, progress=-1)
    for number in range(3):
        job.membership.has_progressed(number, 2)
    return job


def meet(job: Job, *numbers: int, progress: int = 2) -> None:
    for number in numbers:
        job.membership.is_ready(
            number, progress=progress, address=f"10.0.0.{number}", port=1000 + number, now=job.now
        )
    job.turn()


def spread_with_misses(misses: dict[int, str]) -> Job:
    """Return it after worker 0 failed and each of `misses` missed an address; workers 0 and 1 are back."""
    job = spread(elastic_timeout_seconds=600.0)
    job.membership.has_failed(0, 1, "no answer", job.now)
    for number, address in misses.items():
        job.membership.has_missed(number, 1, [address], job.now)
    meet(job, 0, 1)
    return job


def test_members_are_told_where_the_other_hosts_are() -> None:
    job = spread()
    assert job.last(1)["ways"] == [["10.0.0.2", 1002], ["10.0.0.0", 1000]]
    alone = Job({"a": 2})
    alone.ready(0, 1)
    assert alone.last(0)["ways"] == []


def test_after_a_second_generation_that_fails_on_the_same_pair_one_of_the_two_is_dropped() -> None:
    job = spread()
    for generation in (1, 2):
        assert job.membership.current.number == generation
        job.membership.has_failed(1, generation, "it did not answer", job.now)
        job.membership.has_missed(1, generation, ["10.0.0.2"], job.now)
        job.turn()
        if generation == 1:
            assert job.killed == []
            meet(job, 0, 1, 2)
    assert job.killed == [2]
    assert (
        "host c is dropped: b cannot reach it, though this launcher reaches both; no new workers there" in job.said
    )
    job.membership.has_ended(2, well=False, why="killed", now=job.now)
    meet(job, 0, 1)
    assert job.ranks() == {0: 0, 1: 1}
    assert not job.is_over


def test_a_host_that_others_miss_and_that_does_not_leave_is_dropped() -> None:
    """It is cut off from the launcher too, which has not noticed yet."""
    job = spread_with_misses({0: "10.0.0.2", 1: "10.0.0.2"})
    job.turn(5.0)
    assert job.killed == []
    job.turn(0.1)
    assert job.killed == [2]
    assert any(text.startswith("host c is dropped: a, b cannot reach it") for text in job.said)
    assert job.ranks() == {0: 0, 1: 1}


def test_one_that_misses_another_itself_is_given_its_time() -> None:
    job = spread_with_misses({0: "10.0.0.2", 2: "10.0.0.0"})
    job.turn(20.0)
    assert job.killed == []


def test_names_of_one_machine_miss_nobody() -> None:
    job = Job({"a": 1, "b": 1})
    job.ready(0, 1)
    for generation in (1, 2):
        job.membership.has_failed(0, generation, "x", job.now)
        job.membership.has_missed(0, generation, ["h"], job.now)
        job.ready(0, 1, progress=1)
    assert job.killed == []


# -- the workers ----------------------------------------------------------------------------------


def test_a_refused_call_is_an_answer_and_none_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_server(("127.0.0.2", 0)) as good:
        with socket.create_server(("127.0.0.3", 0)) as closed:
            refused = closed.getsockname()
        waiting = []
        for _ in range(4):  # until its queue takes no more
            call = socket.socket()
            call.setblocking(False)
            call.connect_ex(full.getsockname())
            waiting.append(call)
        begin = time.monotonic()
        assert unreachable([good.getsockname(), refused, full.getsockname()], 0.3) == ["127.0.0.1"]
        assert time.monotonic() - begin < 5
        for call in waiting:
            call.close()
    assert unreachable([]) == []
    assert unreachable([refused] * (3 * MOST_CALLS)) == []


def test_a_worker_says_whom_it_misses_unless_it_was_told_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    class Line:
        def __init__(self) -> None:
            self.sent: list[dict[str, Any]] = []

        def send(self, frame: dict[str, Any]) -> None:
            self.sent.append(frame)

    monkeypatch.setattr(elastic_worker, "unreachable", lambda ways: [address for address, _ in ways])
    here = object.__new__(ElasticWorker)
    line = Line()
    here._line, here._changed = line, threading.Condition()  # type: ignore[assignment]
    here.generation, here._leaving, here._ways = 3, 0, [("10.0.0.2", 1)]
    here._tell_of_failure("no answer")
    end = time.monotonic() + 10
    while len(line.sent) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert line.sent == [
        {"type": "failed", "generation": 3, "why": "no answer"},
        {"type": "missed", "generation": 3, "addresses": ["10.0.0.2"]},
    ]
    here._leaving = 3
    here._tell_of_failure("another left")
    assert [frame["type"] for frame in line.sent] == ["failed", "missed", "failed"]
    for thread in threading.enumerate():
        if thread.name == "farandole reach":
            thread.join(10)
    assert len(line.sent) == 3
