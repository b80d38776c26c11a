"""Ranks that end well too early, and which of several failures is the first cause."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from farandole.core.vocabulary.run_files import Crash, events_path, stacks_path
from farandole.launch.job.contract import JobSpec, RankSpec
from farandole.launch.output import Output
from farandole.launch.supervise import job_loop, ranks
from farandole.launch.supervise.failure import Exit, find_failure
from farandole.launch.supervise.job_loop import Outcome
from farandole.launch.supervise.ranks import LeaverWatch, Left, Supervisor

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


def crash(rank: int, when: float, kind: str, *, consequence: bool = True) -> Crash:
    return Crash(rank, "host-a", 5, kind, f"{kind} of {rank}", "", consequence, 1, when)


# -- the first cause ------------------------------------------------------------------------------


@pytest.mark.parametrize("left_at", [0.5, 1.5])
def test_a_rank_that_left_is_the_cause_of_others_that_miss_it(left_at: float) -> None:
    """Its connections close before its process is gone, so its end may come last."""
    exits = [Exit(0, 1, 1.0), Exit(1, 0, left_at), Exit(2, 1, 1.1)]
    found = find_failure(
        exits,
        [crash(0, 0.9, "PeerLost"), crash(2, 1.0, "PeerLost")],
        host="h",
        stop_seconds=0,
    )
    assert (found.rank, found.host, found.exit_code, found.also_failed) == (1, "h", 1, (0, 2))
    lines = found.to_text(Path("r")).splitlines()
    assert lines[0] == (
        "farandole: rank 1 on h failed: it ended with exit code 0 before the others, which still needed it"
    )
    assert "every rank has to take part" in lines[1]
    assert "where each asks for farandole.mean(value)" in lines[1]


def test_a_rank_that_left_is_not_blamed_for_what_others_did_alone() -> None:
    left = Exit(1, 0, 0.5)
    own = find_failure(
        [Exit(0, 1, 1.0), left], [crash(0, 0.9, "ValueError", consequence=False)], host="h", stop_seconds=0,
    )  # fmt: skip
    assert own.rank == 0
    for text in ("ValueError: x", "requests.exceptions.Timeout: the upload timed out", "killed"):
        alone = find_failure([Exit(0, 1, 1.0, held=text), left], [], host="h", stop_seconds=0)
        assert (alone.rank, alone.cause) == (0, text)


def test_a_rank_that_ends_well_when_it_is_told_to_stop_did_not_leave() -> None:
    exits = [Exit(0, 1, 1.0, held=GLOO), Exit(1, 0, 1.3, stopped_by_us=True)]
    found = find_failure(exits, [], host="h", stop_seconds=0)
    assert (found.rank, found.cause) == (0, GLOO)


def test_who_waited_in_vain_comes_before_who_was_left() -> None:
    """A cut link: the healthy rank is left by the two that see it, a moment before their accounts are there."""
    exits = [Exit(rank, 1, 2.0) for rank in range(3)]
    crashes = [crash(0, 1.0, "PeerLost"), crash(1, 1.014, "Stalled"), crash(2, 1.015, "Stalled")]
    found = find_failure(exits, crashes, host="h", stop_seconds=0)
    assert (found.rank, found.cause) == (1, "Stalled of 1")
    crashes.append(crash(3, 1.5, "CommError"))
    found = find_failure([*exits, Exit(3, 1, 2.0)], crashes, host="h", stop_seconds=0)
    assert found.rank == 1
    held = [Exit(0, 1, 1.0, held=GLOO), Exit(1, 1, 1.1, held="torch.distributed.DistStoreError: timed out")]
    assert find_failure(held, [], host="h", stop_seconds=0).rank == 1


# -- watching -------------------------------------------------------------------------------------


class Watched:
    """A watch with a clock of its own, and processes that work as much as they are told to."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.now, self.work = directory, 100.0, {10: 0.0, 12: 0.0}
        self.watch = LeaverWatch(directory)
        monkeypatch.setattr(ranks, "processor_seconds", lambda process: self.work[process])

    def look(self, seconds: float, *, busy: bool, left: bool = True) -> list[tuple[float, Left]]:
        found = []
        for _ in range(int(seconds / ranks.LOOK_SECONDS)):
            self.now += ranks.LOOK_SECONDS
            self.work[12] += 0.4 * busy
            said = self.watch.look(self.now, [Exit(1, 0, 100.0)] if left else [], {0: 10, 2: 12})
            found += [] if said is None else [(self.now, said)]
        return found


def begun(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch()


def test_a_rank_that_ends_before_rank_0_has_saved_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    for rank in range(3):
        begun(stacks_path(tmp_path, rank))
        begun(events_path(tmp_path, rank))
    assert not watched.look(60.0, busy=True)
    assert not watched.look(60.0, busy=False, left=False)


def test_others_that_do_nothing_are_worth_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    watched.look(20.0, busy=True)
    [(when, said)] = watched.look(60.0, busy=False)
    assert 125.0 <= when <= 126.0
    assert (said.rank, said.waiting, said.is_missed) == (1, (0, 2), False)
    assert said.to_text().startswith(
        "note: rank 1 ended with exit code 0 before the others, and ranks 0 and 2 did nothing for 5 s"
    )


def test_others_that_are_meeting_wait_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    assert not watched.look(4.0, busy=True), "nobody has called fd.init"
    begun(stacks_path(tmp_path, 2))
    found = watched.look(3.0, busy=True)
    assert found
    assert found[0][1] == Left(1, (2,), is_missed=True)
    begun(events_path(tmp_path, 1))
    assert not watched.look(4.0, busy=True), "it has met the others and gone: they may go on by themselves"


# -- with processes -------------------------------------------------------------------------------


def supervise(directory: Path, text: str) -> tuple[Outcome, str]:
    out, err = io.BytesIO(), io.BytesIO()
    output = Output(directory, 2, out=out, err=err)
    places = [RankSpec(rank, 2, rank, 2) for rank in range(2)]
    command = [sys.executable, "-S", "-c", f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}"]
    outcome = Supervisor(command, places, JobSpec("127.0.0.1", 1, directory), output, dict(os.environ)).run()
    output.close()
    return outcome, err.getvalue().decode()


def test_a_job_whose_ranks_wait_for_one_that_left_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MEETING_SECONDS", 0.1)
    begun(stacks_path(tmp_path, 0))
    outcome, _ = supervise(tmp_path, "rank or time.sleep(600)")
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.stopped) == (1, (0,))
    assert outcome.failure.cause == (
        "it ended with exit code 0 before the others, and rank 0 waited for it in fd.init"
    )


def test_the_one_that_left_is_waited_for_when_others_say_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 takes its time to end; rank 0 has failed by then."""
    monkeypatch.setattr(job_loop, "UNEXPLAINED_SECONDS", 20.0)
    outcome, _ = supervise(
        tmp_path, f"rank and time.sleep(0.8)\nrank or sys.exit('Traceback (most recent call last):\\n{GLOO}')"
    )
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.also_failed, outcome.failure.stopped) == (1, (0,), ())
    assert outcome.seconds < 10
