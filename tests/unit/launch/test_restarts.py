"""Whether a job begins again after a failure, when, and with which ranks: without processes."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.run_files import PLAN, RUN, SavesAccount
from farandole.core.vocabulary.spec import Plan
from farandole.launch.job.hosts import HostSlots
from farandole.launch.start.placing import place_job
from farandole.launch.start.request import Ending, JobRequest
from farandole.launch.start.restarts import Interval, Restarts
from farandole.launch.supervise.failure import Failure
from farandole.launch.supervise.job_loop import ENDING, Outcome, handling

HOSTS = [HostSlots("a", 1), HostSlots("b", 2), HostSlots("c", 1)]
KILLED = Failure(1, "b", "killed by signal 9 (SIGKILL)", 137)
LOST = Failure(None, "b", "its supervisor was killed", 1)
TRACE = "Traceback (most recent call last):\nValueError: x"
RAISED = Failure(1, "b", "ValueError: x", 1, step=7, traceback=TRACE)


def restarts(directory: Path, **asked: Any) -> Restarts:
    plan, size = asked.pop("plan", None), asked.pop("size", None)
    ending = replace(Ending(restarts=20), **asked)
    return Restarts(place_job(JobRequest(["true"], plan, size, HOSTS, ending=ending)), directory)


def ended(failure: Failure | None) -> Outcome:
    return Outcome(0 if failure is None else failure.exit_code, 1.0, failure)


def names(job: Restarts) -> list[str]:
    return [place.host_name for place in job.placed.places]


def test_pauses_grow_until_there_is_a_new_checkpoint(tmp_path: Path) -> None:
    job, pauses = restarts(tmp_path), []
    for _ in range(8):
        assert job.follow(ended(KILLED))
        pauses.append(job.pause_seconds)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    SavesAccount("saved", whole=5).write(str(tmp_path))
    for pause in (0.0, 1.0):
        assert job.follow(ended(KILLED))
        assert job.pause_seconds == pause
    assert "the last whole checkpoint is that of step 5 in saved" in job.to_text(tmp_path)


@pytest.mark.parametrize(
    ("plan", "least", "left"),
    [
        (None, None, ["a", "b", "b", "c"]),
        (None, 2, ["a", "c"]),
        (Plan(tensor=2), 2, ["a", "c"]),
        (Plan(tensor=2), 1, ["a", "c"]),
        (None, 3, None),
        (Plan(pipeline=4), 2, None),
    ],
)
def test_a_host_that_is_lost_is_left_out_where_it_may(
    tmp_path: Path, plan: Plan | None, least: int | None, left: list[str] | None
) -> None:
    job = restarts(tmp_path, plan=plan, least_ranks=least)
    assert job.follow(ended(LOST)) == (left is not None)
    if left is None:
        assert "2 slots are left, and the plan has no division for" in job.why_not
    else:
        assert names(job) == left


def test_as_many_ranks_as_the_plan_has_a_division_for(tmp_path: Path) -> None:
    job = restarts(tmp_path, plan=Plan(tensor=2), least_ranks=1)
    assert job.follow(ended(replace(LOST, host="c")))
    assert names(job) == ["a", "b"], "three slots are left"


def test_slots_that_are_spare_take_the_place_of_a_lost_host(tmp_path: Path) -> None:
    job = restarts(tmp_path, size=2)
    assert names(job) == ["a", "b"]
    assert job.follow(ended(LOST))
    assert names(job) == ["a", "c"]
    assert job.follow(ended(replace(LOST, host="c")))
    assert names(job) == ["a", "c"], "there is no other: it may be back"


def test_a_rank_that_a_signal_ends_each_time_loses_its_slot(tmp_path: Path) -> None:
    job = restarts(tmp_path, least_ranks=1)
    assert job.follow(ended(KILLED))
    assert len(names(job)) == 4
    assert job.follow(ended(KILLED))
    assert names(job) == ["a", "b", "c"]
    assert job.placed.places[1].visible_devices == (1,), "rank 1 was the first of b"


def test_what_would_end_alike_does_not_begin_again(tmp_path: Path) -> None:
    assert not restarts(tmp_path).follow(ended(None))
    assert not restarts(tmp_path).follow(Outcome(130, 1.0, KILLED, signal=2))
    assert not restarts(tmp_path, restarts=0).follow(ended(KILLED))
    misspelled = replace(LOST, exit_code=2)
    job = restarts(tmp_path)
    assert not job.follow(ended(misspelled))
    assert job.follow(ended(LOST))
    assert job.follow(ended(misspelled)), "it was reached before"
    assert not job.follow(ended(replace(RAISED, exit_code=2)))


def test_the_same_exception_counts_by_the_step_of_the_training(tmp_path: Path) -> None:
    job = restarts(tmp_path)
    SavesAccount("saved", whole=4).write(str(tmp_path))
    assert job.follow(ended(RAISED))
    assert job.follow(ended(replace(RAISED, step=5))), "step 9"
    assert not job.follow(ended(replace(RAISED, step=5)))
    assert "the same exception came at the same step" in job.why_not
    told = replace(RAISED, traceback="RuntimeError: Connection closed by peer [127.0.0.1]:5")
    job = restarts(tmp_path)
    assert all(job.follow(ended(told)) for _ in range(3)), "it tells of another rank"


def test_what_the_one_before_left_is_a_run_of_its_own(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(json.dumps({"size": 4}))
    (tmp_path / PLAN).write_text("")
    for name in ("logs", "crashes", "positions", "checkpoints", "farandole-server-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "events-rank0.jsonl").write_text("")
    job = restarts(tmp_path)
    assert job.follow(ended(LOST))
    aside = job.keep()
    assert aside == tmp_path / "generations" / "0"
    assert sorted(path.name for path in aside.iterdir()) == [
        "crashes", "events-rank0.jsonl", "logs", "plan.toml", "positions", "run.json",
    ]  # fmt: skip
    assert not list((tmp_path / "crashes").iterdir())
    assert (tmp_path / "checkpoints" / "file").exists()
    assert [one["host"] for one in json.loads((tmp_path / RUN).read_text())["restarts"]] == ["b"]
    job.generation = 1
    (tmp_path / "crashes" / "rank_0.json").write_text("{}")
    job.keep()  # its place is taken, as on a disk that is full
    assert not list((tmp_path / "crashes").iterdir()), "an account of before would stop the next one"


def test_a_signal_that_comes_while_a_generation_starts_reaches_it(tmp_path: Path) -> None:
    between, heard = Interval(), list[int]()

    def start() -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)  # before the generation listens
        with handling(ENDING, lambda number, _: heard.append(number)):
            end = time.monotonic() + 5.0
            while not heard and time.monotonic() < end:
                time.sleep(0.01)
        return Outcome(143, 0.0, signal=signal.SIGTERM)

    with handling(ENDING, between.note):
        between.start(start)
    assert heard == [signal.SIGTERM]
    begin = time.monotonic()
    between.wait(30.0, tmp_path)
    assert time.monotonic() - begin < 5.0, "no other one is waited for"
