"""The clocks of ranks at servers: random programs of ranks, and what must be true whatever their order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.vocabulary.errors import Mismatch
from farandole.sync.server.channel import ServerMessage
from farandole.sync.server.dense.clock_service import Clocks, ClockService


@given(
    ranks=st.integers(1, 5), staleness=st.sampled_from([0, 1, 2, 3, None]), steps=st.integers(1, 12),
    seed=st.integers(0, 2**32), dies=st.booleans(),
)  # fmt: skip
def test_no_rank_gets_further_ahead_and_each_push_is_in_one_entry(
    ranks: int, staleness: int | None, steps: int, seed: int, dies: bool
) -> None:
    clocks, choose = Clocks(staleness, dict.fromkeys(range(ranks), 0)), random.Random(seed)
    begun, finished = dict.fromkeys(range(ranks), 0), dict.fromkeys(range(ranks), 0)
    made: list[list[Any]] = []
    while any(finished[rank] < steps for rank in clocks.done):
        may = [rank for rank in clocks.done if finished[rank] < steps and clocks.may_begin(rank)]
        assert may, "each waits for another"
        rank = choose.choice(may)
        begun[rank] = clocks.done[rank]
        if staleness is not None:
            assert begun[rank] - min(clocks.done.values()) <= staleness
        made += [
            each for entry in clocks.finish(rank, finished[rank], 1.0, clocks.version) for each in entry["of"]
        ]
        finished[rank] += 1
        assert clocks.finish(rank, finished[rank] - 1, 1.0, clocks.version) == []  # said twice
        if dies and len(clocks.done) > 1 and choose.random() < 0.1:
            gone = choose.choice(list(clocks.done))
            made += [each for entry in clocks.leave(gone) for each in entry["of"]]
        if choose.random() < 0.2:
            clocks = Clocks.from_json(staleness, clocks.to_json())
            clocks.forget(clocks.version - 1)
    said = [(rank, step) for rank, step, _ in made]
    assert len(set(said)) == len(said)
    assert sorted(said) == sorted((rank, step) for rank in finished for step in range(finished[rank]))
    for rank in finished:
        assert [step for other, step in said if other == rank] == list(range(finished[rank]))
    assert sum(clocks.staleness_counts.values()) == len(said)


def test_a_whole_step_weighs_by_samples_in_the_order_of_ranks() -> None:
    clocks = Clocks(0, {0: 0, 1: 0, 2: 0})
    assert clocks.finish(2, 0, 0.5, 0) == clocks.finish(0, 0, 1.5, 0) == []
    assert not clocks.may_begin(2)
    assert clocks.finish(1, 0, 0.0, 0) == [{"of": [[0, 0, 0.75], [1, 0, 0.0], [2, 0, 0.25]], "rate": 1.0}]
    clocks.finish(0, 1, 1.0, 1)
    clocks.finish(2, 1, 1.0, 1)
    assert clocks.leave(1) == [{"of": [[0, 1, 0.5], [2, 1, 0.5]], "rate": 1.0}]


def test_one_push_moves_as_far_as_its_share_of_a_whole_step() -> None:
    clocks = Clocks(3, {0: 0, 1: 0})
    assert clocks.finish(1, 0, 0.5, 0) == [{"of": [[1, 0, 1.0]], "rate": 0.25}]
    assert clocks.finish(0, 0, 0.0, 0) == [{"of": [[0, 0, 0.0]], "rate": 0.0}]
    assert clocks.staleness_counts == {0: 1, 1: 1}


def ask(service: ClockService, rank: int, **values: Any) -> list[tuple[int, Any]]:
    """Return all replies that a request gives, also to others."""
    reply = service.handle(rank, ServerMessage({"seen": 0, **values}))
    return [*([] if reply is None else [(rank, reply)]), *service.due()]


def test_a_service_that_is_killed_finds_its_decisions_in_the_journal(tmp_path: Path) -> None:
    config = {"ranks": [0, 1], "staleness": None, "directory": str(tmp_path)}
    service = ClockService(config)
    ask(service, 0, do="finish", step=0, share=1.0, read=0)
    state = service.state()
    ask(service, 1, do="finish", step=0, share=1.0, read=0)
    ask(service, 1, do="finish", step=1, share=1.0, read=0)
    expected = ask(service, 0, do="look")[0][1].values["entries"]
    assert len(expected) == 3
    with (tmp_path / "journal-1").open("a") as file:
        file.write('{"version": 3, "ent')  # it was killed while it wrote
    for _ in range(2):
        again = ClockService(config)
        again.load(state)
        assert ask(again, 0, do="look")[0][1].values["entries"] == expected
        assert ask(again, 1, do="finish", step=1, share=1.0, read=0)[0][1].values == {}  # said again: known
        assert ask(again, 0, do="look")[0][1].values["entries"] == expected
        step = len(expected) - 1
        ask(again, 1, do="finish", step=step, share=1.0, read=0)  # it goes on in the same journal
        expected = ask(again, 0, do="look")[0][1].values["entries"]
        assert len(expected) == step + 2
    without_snapshot = ClockService(config)
    assert without_snapshot._clocks.version == len(expected)


def test_a_journal_goes_on_over_snapshots_of_which_the_last_is_not_on_the_disk(tmp_path: Path) -> None:
    config = {"ranks": [0, 1], "staleness": 0, "directory": str(tmp_path)}
    service, states = ClockService(config), []
    for step in range(3):
        for rank in (1, 0):
            ask(service, rank, do="finish", step=step, share=1.0 + rank, read=step)
        states.append(service.state())
    ask(service, 1, do="finish", step=3, share=2.0, read=3)
    ask(service, 0, do="gather", what="fd.drain", number=1)
    service.client_left(1)
    service.due()
    expected = ask(service, 0, do="look")[0][1].values
    assert [len(entry["of"]) for entry in expected["entries"]] == [2, 2, 2]
    for state in states[1:]:  # that of before is needed until the last is on the disk
        again = ClockService(config)
        again.load(state)
        assert ask(again, 0, do="look")[0][1].values["entries"] == expected["entries"]
        assert ask(again, 0, do="gather", what="fd.drain", number=1) != [], "it was said that all have met"


def test_decisions_that_the_disk_does_not_take_are_written_when_it_does(tmp_path: Path) -> None:
    service = ClockService(config := {"ranks": [0], "staleness": None, "directory": str(tmp_path)})
    state = service.state()
    blocked = tmp_path / "journal-1"
    blocked.mkdir()
    for step in range(3):
        ask(service, 0, do="finish", step=step, share=1.0, read=0)
        assert service.is_behind
    blocked.rmdir()
    service.state()
    assert not service.is_behind
    again = ClockService(config)
    again.load(state)
    found, expected = (ask(each, 0, do="look")[0][1].values["entries"] for each in (again, service))
    assert found == expected
    assert len(found) == 3


def test_what_ranks_have_met_for_is_known_after_a_restoration(tmp_path: Path) -> None:
    """Rank 0 has heard that both met, and goes on; rank 1 asks again."""
    service = ClockService(config := {"ranks": [0, 1], "staleness": 0, "directory": str(tmp_path)})
    before = service.state()
    for rank in (0, 1):
        replies = ask(service, rank, do="gather", what="fd.drain", number=1)
    assert sorted(rank for rank, _ in replies) == [0, 1]
    for state in (before, service.state()):
        again = ClockService(config)
        again.load(state)
        assert [rank for rank, _ in ask(again, 1, do="gather", what="fd.drain", number=1)] == [1]
        assert ask(again, 0, do="gather", what="fd.drain", number=2) == [], "another time"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rank_that_left_is_waited_for_no_more_and_what_it_decided_is_kept(
    staleness: int, tmp_path: Path
) -> None:
    service = ClockService(config := {"ranks": [0, 1, 2], "staleness": staleness, "directory": str(tmp_path)})
    state = service.state()
    for step in range(1 if staleness == 0 else 2):
        for rank in (0, 1):
            ask(service, rank, do="finish", step=step, share=1.0, read=0)
    ask(service, 1, do="wait")
    assert ask(service, 0, do="wait") == []
    service.client_left(2)
    assert sorted(rank for rank, _ in service.due()) == [0, 1]
    again = ClockService(config)
    again.load(state)
    assert again._clocks.entries == service._clocks.entries != []
    for rank in (0, 1):
        ask(service, rank, do="look", seen=1)
    assert service._clocks.first == 1, "no entry is kept for the rank that left"


def test_entries_are_kept_for_the_rank_that_has_fewest(tmp_path: Path) -> None:
    service = ClockService(config := {"ranks": [0, 1], "staleness": None, "directory": str(tmp_path)})
    for step in range(3):
        ask(service, 0, do="finish", step=step, share=1.0, read=step, seen=step)
    assert service._clocks.first == 0
    assert len(ask(service, 1, do="look")[0][1].values["entries"]) == 3
    ask(service, 1, do="look", seen=2)
    assert service._clocks.first == 2
    ask(service, 0, do="look", seen=3)
    again = ClockService(config)
    again.load(service.state())
    assert len(ask(again, 1, do="look", seen=2)[0][1].values["entries"]) == 1
    ask(again, 1, do="look", seen=3)
    assert again._clocks.first == 3, "a restored service knows what the others have"


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_rank_may_be_as_far_ahead_as_the_bound_and_no_further(staleness: int) -> None:
    clocks = Clocks(staleness, {0: 0, 1: 0})
    for step in range(staleness + 1):
        assert clocks.may_begin(0)
        clocks.finish(0, step, 1.0, step)
    assert not clocks.may_begin(0)
    clocks.finish(1, 0, 1.0, 0)
    assert clocks.may_begin(0)
    assert clocks.staleness_counts == {0: staleness + 1, staleness + 1: 1}


def test_a_whole_step_of_a_journal_is_not_made_again() -> None:
    clocks = Clocks(0, {0: 0, 1: 0}, shares={0: 1.0})
    clocks.adopt(0, {"of": [[0, 0, 0.5], [1, 0, 0.5]], "rate": 1.0})
    assert clocks.may_begin(0)
    assert clocks.finish(0, 0, 1.0, 0) == clocks.finish(1, 0, 1.0, 0) == []
    assert clocks.done == {0: 1, 1: 1}


def test_ranks_that_wait_for_each_other_for_ever_are_an_error_on_all(tmp_path: Path) -> None:
    service = ClockService({"ranks": [0, 1], "staleness": 1, "directory": str(tmp_path)})
    assert ask(service, 0, do="gather", what="fd.drain", number=1) == []
    replies = ask(service, 1, do="gather", what="loads other parameters", number=1)
    assert [(rank, type(error)) for rank, error in replies] == [(0, Mismatch), (1, Mismatch)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_ranks_that_drain_hold_up_no_other_with_a_bound(staleness: int, tmp_path: Path) -> None:
    service = ClockService({"ranks": [0, 1], "staleness": staleness, "directory": str(tmp_path)})
    ask(service, 0, do="gather", what="fd.drain", number=1)
    for step in range(6):
        ask(service, 1, do="finish", step=step, share=1.0, read=step)
        replies = ask(service, 1, do="wait")
        if staleness == 0:
            assert all(isinstance(error, Mismatch) for _, error in replies)
            assert len(replies) == 2
            return
        assert [rank for rank, _ in replies] == [1]
    replies = ask(service, 1, do="gather", what="fd.drain", number=1)
    assert sorted(rank for rank, _ in replies) == [0, 1]
