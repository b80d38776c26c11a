"""The members: what happens to an elastic job, without processes and with a clock of our own."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.launch.elastic.membership import Blacklist, Kill, Membership, Order, Say, Start, Stop, Tell
from farandole.launch.elastic.options import ElasticOptions


class Job:
    """The members, and what it ordered."""

    def __init__(self, hosts: dict[str, int], *, min_ranks: int = 1, **options: object) -> None:
        limits = ElasticOptions(min_ranks=min_ranks, **options)  # type: ignore[arg-type]
        self.membership = Membership(limits, Blacklist(limits.cooldown_range_seconds, random.Random(0)), 0.0)
        self.now = 0.0
        self.started: list[tuple[int, str]] = []
        self.stop: Stop | None = None
        self.killed: list[int] = []
        self.told: dict[int, list[dict[str, object]]] = {}
        self.said: list[str] = []
        self.membership.hosts_are(hosts, self.now)
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        while orders := self.membership.tick(self.now):
            for order in orders:
                self.obey(order)

    def obey(self, order: Order) -> None:
        if isinstance(order, Start):
            self.started.append((order.number, order.host))
        elif isinstance(order, Tell):
            place = {} if order.place is None else vars(order.place)
            self.told.setdefault(order.number, []).append({**order.frame, **place})
        elif isinstance(order, Kill):
            self.killed.append(order.number)
        elif isinstance(order, Say):
            self.said.append(order.text)
        else:
            assert self.stop is None, "a job stops once"
            self.stop = order

    def ready(self, *numbers: int, progress: int = 0) -> None:
        for number in numbers:
            self.membership.is_ready(number, progress=progress, address="h", port=1000 + number, now=self.now)
        self.turn()

    def dies(self, *numbers: int) -> None:
        for number in numbers:
            self.membership.has_ended(number, well=False, why="killed", now=self.now)
        self.turn()

    @property
    def is_over(self) -> bool:
        return self.stop is not None

    def last(self, number: int) -> dict[str, object]:
        return self.told[number][-1]

    def ranks(self) -> dict[int, int]:
        """Rank of each worker in the current generation."""
        found = {}
        for number, frames in self.told.items():
            frame = next((f for f in reversed(frames) if f["type"] == "assignment"), None)
            if frame is not None and frame["generation"] == self.membership.current.number:
                found[number] = frame["rank"]
        return found  # type: ignore[return-value]


def trained(hosts: dict[str, int], **options: object) -> Job:
    """Return a job whose first generation trains, with two commits."""
    job = Job(hosts, **options)  # type: ignore[arg-type]
    job.ready(*range(len(job.started)), progress=-1)
    for number, _ in job.started:
        job.membership.has_progressed(number, 2)
    return job


def test_the_first_generation_waits_for_all_that_were_started() -> None:
    job = Job({"a": 2, "b": 1})
    assert job.started == [(0, "a"), (1, "a"), (2, "b")]
    job.ready(2, 0)
    assert not job.ranks()
    job.ready(1)
    assert job.ranks() == {0: 0, 1: 1, 2: 2}
    frames = [job.last(number) for number in range(3)]
    assert {(f["address"], f["port"], f["nonce"], f["generation"]) for f in frames} == {
        ("h", 1000, frames[0]["nonce"], 1)
    }


def test_a_death_frees_all_survivors_and_the_newest_state_becomes_rank_0() -> None:
    job = trained({"a": 3})
    job.dies(0)
    assert [job.last(n)["type"] for n in (1, 2)] == ["leave", "leave"]
    job.ready(1, progress=4)
    assert job.last(1)["type"] == "leave", "worker 2 has not left yet"
    job.ready(2, progress=5)
    assert job.ranks() == {2: 0, 1: 1}
    assert job.last(1)["port"] == 1002


def test_a_failed_exchange_frees_everybody_once() -> None:
    job = trained({"a": 3})
    job.membership.has_failed(1, 1, "closed by peer", job.now)
    job.membership.has_failed(2, 1, "closed by peer", job.now)
    job.turn()
    assert [[f["type"] for f in job.told[n]] for n in range(3)] == [["assignment", "leave"]] * 3
    job.ready(0, 1, 2, progress=2)
    job.membership.has_failed(1, 1, "of the generation before", job.now)
    job.turn()
    assert job.last(0)["type"] == "assignment"


def test_new_hosts_are_announced_when_their_workers_are_ready() -> None:
    job = trained({"a": 2})
    job.membership.hosts_are({"a": 2, "b": 1}, job.now)
    job.turn()
    assert job.started[-1] == (2, "b")
    assert job.last(0)["type"] == "assignment"
    job.ready(2, progress=-1)
    assert job.last(0) == {"type": "hosts_updated", "kind": 2, "at": job.now}
    job.turn(1.0)
    assert len(job.told[0]) == 2, "said once"
    job.ready(1, 0, progress=3)
    assert job.ranks() == {0: 0, 1: 1, 2: 2}


def test_a_removed_host_is_told_to_go_at_the_next_commit() -> None:
    job = trained({"a": 1, "b": 1})
    job.membership.hosts_are({"a": 1}, job.now)
    job.turn()
    assert job.last(0) == {"type": "hosts_updated", "kind": 1, "at": job.now}
    job.ready(0, 1, progress=3)
    assert job.last(1) == {"type": "removed", "why": "b[1] has been removed from elastic job"}
    assert job.ranks() == {0: 0}
    job.turn(11.0)
    assert job.killed == [1], "it had time to end by itself"
    job.membership.has_ended(1, well=False, why="killed", now=job.now)
    job.membership.has_ended(0, well=True, why="", now=job.now)
    job.turn()
    assert job.stop == Stop(True)


def test_hosts_that_are_all_replaced_hand_the_state_over() -> None:
    job = trained({"a": 1})
    job.membership.hosts_are({"b": 1}, job.now)
    job.turn()
    assert job.started[-1] == (1, "b")
    job.ready(1, progress=-1)
    job.ready(0, progress=3)
    assert job.ranks() == {0: 0, 1: 1}
    job.turn()
    assert job.last(0)["type"] == "assignment"
    job.membership.has_progressed(1, 3)
    job.turn()
    assert job.last(0)["type"] == "hosts_updated"
    job.ready(0, 1, progress=4)
    assert job.last(0)["type"] == "removed"
    assert job.ranks() == {1: 0}


def test_too_few_wait_until_the_time_out() -> None:
    job = trained({"a": 2}, min_ranks=2, elastic_timeout_seconds=5.0)
    job.dies(1)
    job.ready(0, progress=2)
    job.turn(4.9)
    assert not job.is_over
    job.turn(0.2)
    assert job.stop is not None
    assert not job.stop.succeeded
    assert "1 workers are ready after 5 s, and 2 are needed; hosts are a:2" in job.stop.text


def test_a_host_in_time_ends_the_wait() -> None:
    job = trained({"a": 2}, min_ranks=2, elastic_timeout_seconds=5.0)
    job.dies(1)
    job.ready(0, progress=2)
    job.turn(3.0)
    job.membership.hosts_are({"a": 2, "b": 1}, job.now)
    job.turn()
    job.ready(2, progress=-1)
    assert job.ranks() == {0: 0, 2: 1}
    job.turn(100.0)
    assert job.stop is None


def test_a_failed_host_gets_no_new_workers_for_ever_or_for_a_while() -> None:
    job = trained({"a": 2})
    job.dies(1)
    job.ready(0, progress=2)
    job.turn(4000.0)
    assert len(job.started) == 2
    job = trained({"a": 2}, cooldown_range_seconds=(1, 8))
    job.dies(1)
    job.ready(0, progress=2)
    job.turn(1.9)
    assert len(job.started) == 2
    job.turn(1.2)
    assert job.started[2:] == [(2, "a")]


def test_the_reset_limit() -> None:
    job = trained({"a": 4}, reset_limit=1)
    job.dies(3)
    job.ready(0, 1, 2, progress=2)
    assert job.membership.current.number == 2
    job.dies(2)
    job.ready(0, 1, progress=2)
    assert job.stop == Stop(
        False, "Horovod was shutdown because number of resets during elastic job exceeded limit: 1"
    )


@pytest.mark.parametrize("cooldown", [None, (1, 2)])
def test_all_members_failed(cooldown: tuple[int, int] | None) -> None:
    job = trained({"a": 2}, cooldown_range_seconds=cooldown)
    job.dies(0, 1)
    assert job.stop == Stop(False, "every worker that had the state of the job has failed")
    assert len(job.started) == 2


def test_new_workers_do_not_go_on_without_the_state() -> None:
    job = trained({"a": 1})
    job.membership.hosts_are({"a": 1, "b": 1}, job.now)
    job.turn()
    job.ready(1, progress=-1)
    job.dies(0)
    assert job.stop == Stop(False, "every worker that had the state of the job has failed")


def test_before_the_first_commit_nothing_is_lost() -> None:
    job = Job({"a": 1})
    job.ready(0, progress=-1)
    job.membership.has_progressed(0, 0)
    job.membership.hosts_are({"a": 1, "b": 1}, job.now)
    job.turn()
    job.ready(1, progress=-1)
    job.dies(0)
    assert job.ranks() == {1: 0}


def test_workers_that_fail_before_the_first_generation() -> None:
    job = Job({"a": 1, "b": 1})
    job.dies(0)
    assert not job.is_over
    job.dies(1)
    assert job.stop == Stop(False, "workers failed on every host: a (1 failed), b (1 failed)")


def test_the_workers_of_a_new_host_are_one_reset() -> None:
    """However long the second of them takes to start; a host that goes meanwhile does not wait for it."""
    job = trained({"a": 2}, elastic_timeout_seconds=100.0, reset_limit=1)
    job.membership.hosts_are({"a": 2, "b": 2}, job.now)
    job.turn()
    assert job.started[2:] == [(2, "b"), (3, "b")]
    job.ready(2, progress=-1)
    job.turn(8.0)
    assert job.last(0)["type"] == "assignment", "nobody is asked to leave for one of two"
    job.ready(3, progress=-1)
    asked = {"type": "hosts_updated", "kind": 2, "at": job.now}
    assert job.last(0) == asked
    job.membership.hosts_are({"a": 2, "b": 2, "c": 1}, job.now)
    job.turn(1.0)
    assert job.started[-1] == (4, "c")
    assert job.last(0) == asked, "and they are asked once"
    job.ready(0, 1, progress=3)
    assert job.ranks() == {0: 0, 1: 1, 2: 2, 3: 3}
    assert not job.is_over


def test_one_that_never_starts_holds_its_neighbours_back_for_a_while_only() -> None:
    job = trained({"a": 2}, elastic_timeout_seconds=100.0)
    job.membership.hosts_are({"a": 2, "b": 2}, job.now)
    job.turn()
    job.ready(2, progress=-1)
    job.membership.hosts_are({"a": 1, "b": 2}, job.now)
    job.turn()
    assert job.last(0) == {"type": "hosts_updated", "kind": 1, "at": job.now}, "a slot is gone"
    job = trained({"a": 2}, elastic_timeout_seconds=100.0)
    job.membership.hosts_are({"a": 2, "b": 2}, job.now)
    job.turn()
    job.ready(2, progress=-1)
    job.turn(100.0)
    assert job.last(0) == {"type": "hosts_updated", "kind": 2, "at": job.now}


def test_one_success_ends_the_job_and_no_generation_follows() -> None:
    job = trained({"a": 2})
    job.membership.hosts_are({"a": 2, "b": 1}, job.now)
    job.turn()
    job.membership.has_ended(0, well=True, why="", now=job.now)
    job.membership.hosts_are({"a": 2, "b": 3}, job.now)
    job.turn()
    assert len(job.started) == 3
    job.ready(2, progress=-1)
    job.membership.has_ended(1, well=True, why="", now=job.now)
    job.turn()
    assert job.killed == [2], "it came when the job was over"
    job.membership.has_ended(2, well=False, why="killed", now=job.now)
    job.turn()
    assert job.stop == Stop(True)


@pytest.mark.parametrize("generation", [0, 1])
def test_a_success_that_leaves_others_behind_is_a_failure(generation: int) -> None:
    """One ends with exit code 0 while the others train, or before they have met: nothing was trained."""
    job = trained({"a": 3}) if generation else Job({"a": 3})
    job.membership.has_ended(1, well=True, why="", now=job.now)
    job.ready(0, 2)
    assert job.killed == [0, 2]
    for number in (0, 2):
        job.membership.has_ended(number, well=False, why="killed", now=job.now)
    job.turn()
    assert job.stop is not None
    assert not job.stop.succeeded
    assert job.stop.text.startswith(
        "worker 1 ended with exit code 0 while workers 0, 2 still trained and could not "
    )


@pytest.mark.parametrize("success_first", [True, False])
def test_a_failure_beside_a_success_is_a_failure(success_first: bool) -> None:
    job = trained({"a": 2})
    for number in (0, 1) if success_first else (1, 0):
        job.membership.has_ended(number, well=number == 0, why="exit code 1", now=job.now)
    job.turn()
    assert job.stop == Stop(False)


def test_a_member_that_does_not_leave_is_killed_at_the_time_out() -> None:
    job = trained({"a": 3}, elastic_timeout_seconds=5.0)
    job.dies(0)
    job.ready(1, progress=2)
    job.turn(5.1)
    assert job.killed == [2]
    job.dies(2)
    assert job.ranks() == {1: 0}


class _Walk:
    """A random history; after each event what must always hold is looked at."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.job = Job({"a": 2, "b": 2}, cooldown_range_seconds=(1, 4), elastic_timeout_seconds=30.0)

    def step(self) -> None:
        job, chance = self.job, self.chance
        workers = [w for w in job.membership.workers.values() if w.state != "ended"]
        event = chance.random()
        if event < 0.55:
            for worker in workers:
                wants = worker.state == "starting" or (
                    worker.state == "member" and job.last(worker.number)["type"] != "assignment"
                )
                if wants and chance.random() < 0.7:
                    job.ready(worker.number, progress=worker.progress)
        elif event < 0.7 and job.membership.current.broken_at is None:
            for worker in workers:
                if worker.state == "member":
                    job.membership.has_progressed(worker.number, max(job.membership.best_progress, 0) + 1)
                    break
            for worker in workers:
                if worker.state == "member":
                    job.membership.has_progressed(worker.number, job.membership.best_progress)
        elif event < 0.8 and workers:
            job.dies(chance.choice(workers).number)
        elif event < 0.9:
            job.membership.hosts_are({h: chance.randint(1, 2) for h in "abc" if chance.random() < 0.7}, job.now)
        job.turn(chance.random() * 2)

    def check(self) -> None:
        membership = self.job.membership
        ranks = self.job.ranks()
        assert sorted(ranks.values()) == list(range(len(ranks)))
        training = {worker.number for worker in membership.workers.values() if worker.state == "member"}
        assert training <= set(membership.current.members)


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_any_history_keeps_the_ranks_in_order_and_comes_to_an_end(seed: int) -> None:
    walk = _Walk(seed)
    job = walk.job
    for _ in range(50):
        walk.step()
        walk.check()
    if not job.is_over:
        # Whatever happened: when no host is left and the last worker dies, the job ends, and once.
        job.membership.hosts_are({}, job.now)
        for worker in list(job.membership.workers.values()):
            if worker.state != "ended":
                job.dies(worker.number)
        job.turn(31.0)
        job.turn(31.0)
    assert job.is_over


def test_a_lost_host_is_one_failure_and_breaks_the_generation() -> None:
    job = Job({"a": 1, "b": 3}, cooldown_range_seconds=(1, 100))
    job.ready(0, 1, 2, 3)
    job.membership.host_is_lost("b", "no sign of life", job.now)
    job.turn()
    assert job.membership.blacklist.failures("b") == 1
    assert job.last(0)["type"] == "leave"
    assert re.fullmatch(r"host b is lost: no sign of life; no new workers there for \d\.\d s", job.said[-1])
    job.ready(0)
    assert job.ranks() == {0: 0}
    assert len(job.started) == 4, "nobody is started there yet"
    job.turn(10)
    assert job.started[4:] == [(4, "b"), (5, "b"), (6, "b")]


def test_a_host_that_was_never_reached_is_no_loss_to_those_that_train() -> None:
    job = Job({"a": 1, "b": 1})
    job.membership.host_is_lost("b", "its name is not known here", job.now)
    job.ready(0)
    assert job.ranks() == {0: 0}
    assert not [frame for frame in job.told[0] if frame["type"] == "leave"]
    job.membership.has_ended(0, well=True, why="", now=job.now)
    job.turn()
    assert job.stop == Stop(True)


def test_a_job_that_ends_waits_for_no_lost_host() -> None:
    job = Job({"a": 1, "b": 1})
    job.ready(0, 1)
    job.membership.has_ended(0, well=True, why="", now=job.now)
    job.turn()
    assert not job.is_over
    job.membership.host_is_lost("b", "no sign of life", job.now)
    job.turn()
    assert job.stop == Stop(False), "a member was lost"


def test_a_new_worker_has_no_part_in_a_step_that_is_made_again() -> None:
    job = trained({"a": 2})
    job.membership.hosts_are({"a": 2, "b": 1}, job.now)
    job.turn()
    job.ready(2, progress=-1)
    job.dies(1)
    where = {"progress": 1, "address": "h", "port": 1000}
    job.membership.is_ready(0, **where, now=job.now, is_in_step=True)  # type: ignore[arg-type]
    job.turn()
    assert job.ranks() == {0: 0}, "alone, though worker 2 waits"


def with_spare(**options: object) -> Job:
    """Return a job of two ranks that train, and worker 2, which waits with its script done up to their state."""
    job = Job({"a": 3}, max_ranks=2, spares=1, **options)  # type: ignore[arg-type]
    for number in range(3):
        prepares(job, number)
    job.turn()
    for number in (0, 1):
        job.membership.has_progressed(number, 1)
    return job


def prepares(job: Job, number: int) -> None:
    """Say that a worker has called `init`, and can go on without a place."""
    job.membership.is_ready(number, progress=-1, address="h", port=1, now=job.now, can_prepare=True)


def waits(job: Job, number: int, progress: int, *, is_in_step: bool = False, lets_in: bool = False) -> None:
    """Say that a worker waits for the next generation."""
    where = {"progress": progress, "address": "h", "port": number, "now": job.now}
    job.membership.is_ready(number, **where, is_in_step=is_in_step, lets_in=lets_in)  # type: ignore[arg-type]


def test_a_spare_prepares_itself_and_takes_the_place_of_a_lost_member() -> None:
    job = with_spare()
    assert (job.ranks(), [frame["type"] for frame in job.told[2]]) == ({0: 0, 1: 1}, ["later"])
    waits(job, 2, -1)
    job.turn()
    assert job.last(0)["type"] == "assignment", "it is not needed yet"
    job.dies(1)
    waits(job, 0, 1, is_in_step=True)
    job.turn()
    assert job.ranks() == {0: 0}, "the step is made again without it"
    job.turn()
    assert job.last(0)["type"] == "hosts_updated"
    waits(job, 0, 1, is_in_step=True, lets_in=True)
    job.turn()
    assert job.ranks() == {0: 0, 2: 1}


def test_no_rank_comes_in_where_one_that_trains_is_in_a_step() -> None:
    job = with_spare()
    waits(job, 2, -1)
    waits(job, 0, 1, is_in_step=True, lets_in=True)
    waits(job, 1, 1, is_in_step=True)
    job.turn()
    assert job.ranks() == {0: 0, 1: 1}


def test_a_worker_that_comes_while_others_train_is_let_prepare_itself() -> None:
    job = with_spare(cooldown_range_seconds=(1, 1))
    job.dies(2)
    job.turn(3.0)
    assert job.started[-1] == (3, "a")
    prepares(job, 3)
    job.turn()
    assert job.last(3)["type"] == "later"


def test_spares_are_no_part_of_how_a_job_ends() -> None:
    job = with_spare()
    waits(job, 2, -1)
    for number in (0, 1):
        job.membership.has_ended(number, well=True, why="", now=job.now)
    job.turn()
    assert job.killed == [2]
    job.dies(2)
    assert job.stop == Stop(True)
    assert not [text for text in job.said if "worker 2" in text]


def test_a_script_that_ends_before_it_took_the_state_does_not_end_the_job() -> None:
    job = with_spare()
    job.membership.has_ended(2, well=True, why="", now=job.now)
    job.turn()
    assert not job.is_over
    assert job.said[-1].startswith(
        "worker 2 on a is gone: its script has ended before it took the state of the others"
    )
    assert not job.membership.finishing


def test_a_spare_does_not_go_on_without_those_that_have_the_state() -> None:
    job = with_spare()
    waits(job, 2, -1)
    job.dies(0, 1)
    assert job.stop is not None
    assert not job.stop.succeeded


def test_a_spare_that_never_trained_makes_no_generation_of_its_own() -> None:
    job = Job({"a": 3}, max_ranks=2, spares=1)
    job.ready(0, 1, 2, progress=-1)
    assert job.ranks() == {0: 0, 1: 1}
    job.dies(0, 1)
    assert job.stop is not None
    assert not job.stop.succeeded
    assert job.ranks() == {0: 0, 1: 1}, "it would have trained alone, from the begin"


def test_a_spare_that_waits_counts_for_the_least_ranks() -> None:
    job = with_spare(min_ranks=2)
    waits(job, 2, -1)
    job.dies(1)
    waits(job, 0, 1, is_in_step=True)
    job.turn()
    assert job.ranks() == {0: 0}, "the step is made again, and the spare comes in after it"
