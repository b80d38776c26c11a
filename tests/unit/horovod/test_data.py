"""A loader that a thread runs ahead of the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from farandole.horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    """Counts to a limit; fails at one number if told to."""

    def __init__(self, limit: int, fails_at: int = -1) -> None:
        self.limit, self.fails_at = limit, fails_at
        self.given = 0

    def __len__(self) -> int:
        return self.limit

    def _iterate(self) -> Iterator[int]:
        for number in range(self.limit):
            if number == self.fails_at:
                raise OSError(f"no number {number}")
            self.given += 1
            yield number

    def _process_batch(self, batch: int) -> int:
        return 10 * batch


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


def loading_threads() -> int:
    return sum(thread.name == "async-data-loader" for thread in threading.enumerate())


def test_a_plain_loader() -> None:
    assert list(Numbers(3)) == [0, 10, 20]
    with pytest.raises(NotImplementedError, match="how many batches"):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError, match="_iterate"):
        next(iter(BaseDataLoader()))


@pytest.mark.parametrize("queue_size", [0, 1, 64])
def test_every_epoch_is_whole_and_in_order(queue_size: int) -> None:
    loader = Ahead(queue_size, limit=5)
    assert [list(loader) for _ in range(3)] == [[0, 10, 20, 30, 40]] * 3
    assert loading_threads() == (1 if queue_size else 0)
    loader.close_async_loader()
    assert loading_threads() == 0


def test_it_runs_ahead_but_not_further_than_its_queue() -> None:
    loader = Ahead(async_loader_queue_size=4, limit=1000)
    first = next(iter(loader))
    deadline = time.monotonic() + 10
    while loader.given < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert first == 0
    assert loader.given == 6  # the one taken, four that wait, one in the thread's hand
    loader.close_async_loader()
    assert loading_threads() == 0


def test_closing_twice_and_starting_again() -> None:
    loader = Ahead(2, limit=3)
    loader.close_async_loader()  # never started
    iterator = iter(loader)
    assert next(iterator) == 0
    loader.close_async_loader()
    loader.close_async_loader()
    assert list(iterator) == []  # closed inside the loop: it ends
    assert list(loader) == [0, 10, 20]
    loader.close_async_loader()


def test_an_error_of_the_loader_is_raised_in_the_loop() -> None:
    loader = Ahead(8, limit=4, fails_at=2)
    seen: list[Any] = []
    with pytest.raises(OSError, match="no number 2"):
        seen.extend(loader)  # what came before the error stays
    assert seen == [0, 10]
    assert loading_threads() == 0
    loader.fails_at = -1
    assert list(loader) == [0, 10, 20, 30]
    loader.close_async_loader()


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    loader = Ahead(2, True, 1)
    list(loader)
    loader.close_async_loader()
    assert capsys.readouterr().err.splitlines() == [
        "Ahead: starting the thread, 2 batches ahead",
        "Ahead: closing the thread, 2 batches ahead",
    ]


def test_a_negative_queue_is_refused() -> None:
    with pytest.raises(ValueError, match="async_loader_queue_size=-1"):
        Ahead(-1, limit=1)
