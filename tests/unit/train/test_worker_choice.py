"""``fd.prefetch(loader, workers="auto")``: a number by what is measured, and none where it gains nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import farandole as fd
from farandole.train.data.told_later import LoopWait
from farandole.train.prefetch import WorkerChoice


def iterate(choice: WorkerChoice, wait: float, rest: float, cpu: float = 0.0, steps: int = 30) -> int:
    """Go through an iteration whose steps wait and compute so many seconds; return its workers."""
    workers, now = choice.begin(), 100.0
    for _ in range(steps):
        choice.note(LoopWait(now, now + wait, cpu))
        now += wait + rest
    return workers


def test_a_loader_that_waits_gets_workers_and_keeps_them_if_they_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choice = WorkerChoice(4, 4.0, 1.0)
    assert iterate(choice, 0.05, 0.03, cpu=0.001) == 0
    assert iterate(choice, 0.0, 0.03) == 3, "with a quarter to spare: 62 ms over 3"
    assert iterate(choice, 0.0, 0.03) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert "a batch takes 50 ms (1 ms of it CPU work) and the rest of a step 30 ms, with 4 cores" in first
    assert "num_workers=3 from the next epoch on; a step should then take 30 ms instead of 50 ms" in first
    assert "num_workers=3 stays: a step takes 30 ms, and 80 ms without (6" in second
    assert choice.phase == "over"


def test_workers_that_gain_nothing_are_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    choice = WorkerChoice(4, 4.0, 1.0)
    iterate(choice, 0.05, 0.03)
    iterate(choice, 0.0, 0.03, steps=3)  # says nothing
    assert iterate(choice, 0.05, 0.03) == 3
    assert iterate(choice, 0.05, 0.03) == 0
    assert "num_workers=3 gains nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wait", "rest", "cpu", "cores"),
    [
        (0.05, 0.03, 0.05, 1.0),  # one core, which has to do it anyway
        (0.01, 0.03, 0.0, 8.0),  # a thread hides it
    ],
)
def test_none_where_none_would_help(
    wait: float, rest: float, cpu: float, cores: float, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = WorkerChoice(int(cores), cores, 1.0)
    for _ in range(3):
        assert iterate(choice, wait, rest, cpu) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert "no workers, as the thread alone should do as well" in said


def test_epochs_that_are_too_short_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    choice = WorkerChoice(4, 4.0, 1.0)
    for _ in range(5):
        assert iterate(choice, 0.05, 0.03, steps=10) == 0
    assert choice.phase == "load"
    assert not capsys.readouterr().err


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def test_a_loader_gets_the_workers_from_the_second_epoch_on(capsys: pytest.CaptureFixture[str]) -> None:
    source = DataLoader(Slow(), batch_size=2)
    loader = fd.prefetch(source, workers="auto")
    epochs = []
    for _ in range(2):
        mine: list[int] = []
        for batch in loader:
            mine += batch.tolist()
            time.sleep(0.002)
        epochs.append(source.num_workers)
        assert mine == list(range(40))
    assert epochs[0] == 0
    assert f"num_workers={epochs[1]} from the next epoch on" in capsys.readouterr().err
    assert epochs[1] >= 1


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([])


def test_what_is_refused_and_what_is_left() -> None:
    for loader, kind in (([1], "a list"), (DataLoader(Endless()), r"a stream \(an IterableDataset\)")):
        with pytest.raises(fd.ConfigError, match=f'workers = "auto" is for .*, and this is {kind}'):
            fd.prefetch(loader, workers="auto")
    wrong: Any = 4
    with pytest.raises(fd.ConfigError, match=r"workers is 4.*num_workers="):
        fd.prefetch([], workers=wrong)
    source = DataLoader(Slow(), batch_size=20, num_workers=1)
    assert len(list(fd.prefetch(source, workers="auto"))) == 2
    assert source.num_workers == 1
