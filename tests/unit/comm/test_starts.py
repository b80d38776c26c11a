"""How processes at a store that dead ones have used agree on their start, with threads at one store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from farandole.comm.world.connect import agree_on_start
from farandole.core.vocabulary.errors import CommError, Stalled
from tests.unit.comm.test_backend_meeting import world


class Ranks:
    """Processes that come to one store; those whose start does not come about are as good as dead."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._store.set_timeout(timedelta(seconds=20))

    def come(self, rank: int, size: int = 3, seconds: float = 20.0) -> tuple[threading.Thread, list[str]]:
        said: list[str] = []

        def agree() -> None:
            try:
                said.append(agree_on_start(world(self._store, rank, size, seconds), self._store))
            except CommError as problem:
                said.append(str(problem))

        thread = threading.Thread(target=agree)
        thread.start()
        return thread, said

    def meet(self, *order: int, size: int = 3) -> str:
        """Come in this order, the first before the others are started; return what all agree on."""
        first = self.come(order[0], size)
        first[0].join(0.1)
        came = [first, *(self.come(rank, size) for rank in order[1:])]
        for thread, _ in came:
            thread.join(20)
        (start,) = {said for _, (said,) in came}
        return start


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_each_start_has_a_name_of_its_own_whoever_comes_first(order: tuple[int, ...]) -> None:
    ranks = Ranks()
    names = [ranks.meet(0, 1, 2), ranks.meet(*order), ranks.meet(1, 0, size=2), ranks.meet(*order)]
    assert len(set(names)) == 4


@pytest.mark.gate_cases("dead0", "dead2")
@pytest.mark.parametrize("dead", [(0,), (1,), (0, 1), (1, 2)])
def test_a_start_that_not_all_came_to_is_left(dead: tuple[int, ...]) -> None:
    ranks = Ranks()
    left = [ranks.come(rank, seconds=0.3) for rank in dead]
    for thread, _ in left:
        thread.join(20)
    name = ranks.meet(2, 1, 0)
    assert name not in [said for _, (said,) in left]


def test_a_rank_that_waits_in_a_dead_start_is_called_to_the_next() -> None:
    ranks = Ranks()
    dead, _ = ranks.come(0, seconds=0.3)
    dead.join(20)
    early, said = ranks.come(1)  # nothing tells it that rank 0 is gone
    early.join(0.1)
    late = [ranks.come(rank) for rank in (0, 2)]
    for thread, _ in [*late, (early, said)]:
        thread.join(20)
    assert len({name for _, (name,) in late} | set(said)) == 1


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(Stalled, match=r"ranks 1 and 2 did not get here within 0\.1 s"):
        agree_on_start(world(store, 0, 3, 0.1), store)
    with pytest.raises(Stalled, match="rank 0 did not get here"):
        agree_on_start(world(dist.HashStore(), 2, 3, 0.1), dist.HashStore())
