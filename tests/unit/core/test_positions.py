"""What positions of ranks mean, and how they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.core.failures import Kind, Position, describe, judge, read_positions, remedy
from farandole.core.vocabulary.run_files import position_path, write_private

MEAN = Position(0, 5, "waiting", "hang.py:5", "fd.mean")
BACKWARD = Position(1, 5, "waiting", "base.py:10 (step)", "backward")


def other(kind: Kind, *, busy: bool = False) -> Position:
    return Position(1, 5, kind, "eval.py:7 (validate)", "", busy)


def test_ranks_that_wait_in_different_calls_wait_for_each_other() -> None:
    assert judge([MEAN, BACKWARD]) == "hang"
    assert (
        describe([MEAN, BACKWARD])
        == "rank 0 waits in fd.mean at hang.py:5, rank 1 in backward at base.py:10 (step)"
    )
    told = "rank 0 waited in fd.mean at hang.py:5, rank 1 in backward at base.py:10 (step)"
    assert describe([MEAN, BACKWARD], past=True) == told
    assert "the same calls in the same order" in remedy([MEAN, BACKWARD])


def test_ranks_in_the_same_call_are_one_group() -> None:
    same = [Position(rank, 5, "waiting", "base.py:10 (step)", "backward") for rank in range(3)]
    assert describe(same) == "ranks 0, 1 and 2 wait in backward at base.py:10 (step)"
    assert judge(same) == "hang"
    assert "nothing arrives" in remedy(same)


@pytest.mark.parametrize("kind", ["stopped", "silent", "ended"])
def test_a_rank_that_does_not_come_is_a_hang(kind: Kind) -> None:
    assert judge([MEAN, other(kind)]) == "hang"


@pytest.mark.parametrize("kind", ["working", "idle", "data", "unknown"])
def test_a_rank_that_may_come_is_a_pause(kind: Kind) -> None:
    assert judge([MEAN, other(kind)]) == "pause"
    assert "fd.phase" in remedy([MEAN, other(kind)])


@pytest.mark.parametrize("kind", ["pause", "moving"])
def test_a_pause_that_was_announced_is_nothing(kind: Kind) -> None:
    assert judge([MEAN, other(kind)]) == "nothing"


def test_nobody_waits() -> None:
    assert judge([other("working")]) == judge([other("idle")]) == judge([]) == "nothing"
    assert judge([other("data")]) == "pause"
    assert remedy([other("data")]) == ""


@pytest.mark.parametrize("operation", ["backward", "the GPU"])
def test_one_rank_alone_waits_for_no_other(operation: str) -> None:
    """Its step is long: memory on a disk, a busy machine."""
    alone = Position(0, 0, "waiting", "train.py:7", operation)
    assert judge([alone]) == "nothing"
    assert judge([Position(0, 0, "stopped")]) == "hang"
    assert judge([Position(0, 0, "data")]) == "pause"


def test_a_network_that_is_slow_is_nothing() -> None:
    """Both wait in a collective, and data arrives, or other collectives go on between the samples."""
    assert judge([MEAN, other("waiting", busy=True)]) == "nothing"


def test_positions_are_kept_in_the_run_directory(tmp_path: Path) -> None:
    for position in (BACKWARD, MEAN):
        write_private(position_path(tmp_path, position.rank), position.to_json())
    for rank, text in ((2, '{"rank": 2}'), (3, "[]"), (4, '{"rank": 4, "step": 1, "kind": "lost"}')):
        write_private(position_path(tmp_path, rank), text)
    assert read_positions(tmp_path) == [MEAN, BACKWARD]
    assert read_positions(tmp_path / "none") == []
