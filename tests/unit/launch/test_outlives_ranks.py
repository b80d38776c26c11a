"""A job that goes on when a rank is killed: which ends of ranks stop it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.launch.job.contract import JobSpec
from farandole.launch.supervise.failure import Exit, HostFailure
from farandole.launch.supervise.job_loop import FixedJob


class Job(FixedJob):
    """One whose ranks have ended as is said."""

    def __init__(self, ends: list[Exit], *, outlives_ranks: bool) -> None:
        super().__init__(None, JobSpec("", 0, Path(), outlives_ranks=outlives_ranks))  # type: ignore[arg-type]
        self._exits, self.said = ends, list[str]()

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("is_missed", [False, True])
@pytest.mark.parametrize(
    ("rank", "code", "outlives", "stops"),
    [(1, -9, True, False), (0, -9, True, True), (1, 1, True, True), (1, -9, False, True), (1, 0, True, False)],
)
def test_which_ends_of_ranks_stop_a_job_with_servers(
    rank: int, code: int, outlives: bool, stops: bool, is_missed: bool
) -> None:
    job, stops = Job([Exit(rank, code, 1.0, is_missed=is_missed)], outlives_ranks=outlives), stops or is_missed
    stops = stops and code != 0
    assert job._has_failed(2.0) is stops
    assert job._has_failed(3.0) is stops
    assert len(job.said) == (outlives and code < 0 and rank > 0 and not is_missed)


def test_a_rank_that_was_done_without_is_not_the_cause_of_a_later_failure() -> None:
    killed, failed = Exit(2, -9, 1.0, is_missed=False), Exit(1, 1, 9.0)
    job = Job([killed], outlives_ranks=True)
    assert not job._has_failed(2.0)
    job._exits.append(failed)
    assert job._has_failed(9.0)
    assert job._judged() == [failed]


@pytest.mark.parametrize(("code", "running", "fails"), [(0, [], False), (0, [1], True), (1, [], True)])
def test_a_host_that_is_lost_when_its_ranks_had_ended_well_is_no_failure(
    code: int, running: list[int], fails: bool
) -> None:
    job = Job([Exit(0, code, 1.0)], outlives_ranks=False)
    job._has_lost({"b"}, running, HostFailure("the connection was lost"))
    assert bool(job._losses) is fails
    assert len(job.said) == (not fails)
