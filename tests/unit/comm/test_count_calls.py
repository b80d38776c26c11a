"""Counts of batches on ranks that are threads: who weighs, who leaves it out, and what it costs who does not."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from farandole.comm.engine import guards
from farandole.comm.engine.guards import CountCalls
from farandole.comm.world.store_sync import all_gather_json
from farandole.comm.world.world import World
from farandole.core.vocabulary.errors import Mismatch
from tests.unit.comm.ranks_in_threads import Rank, backward, grads, parameters_of, play

LEFT_OUT = "rank 1 left out fd.weight in a step in which"


def weigh(rank: Rank, count: float) -> float:
    """What `fd.weight` does with a valid count."""
    total = CountCalls.of(rank.world).add_up(count, is_none=False, is_invalid=False).total
    rank.world.session.batch_weight.set_by_count(count * rank.world.size / total)
    return total


def told(rank: Rank, named: dict[str, nn.Parameter], **scales: float) -> str:
    """Return what ranks are told when rank 1 goes on to its backward pass, and the others give a count."""
    go_on = partial(backward, named, **scales) if rank.number == 1 else partial(weigh, rank, 2.0)
    with pytest.raises(Mismatch) as caught:
        go_on()
    return str(caught.value)


def test_gradients_of_two_reducers_are_weighed_by_counts() -> None:
    def body(rank: Rank) -> list[dict[str, float | None]]:
        first, second = parameters_of(a=(3,)), parameters_of(b=(3,))
        reducers = [rank.reducer(first), rank.reducer(second)]
        found = []
        for _ in range(2):
            assert weigh(rank, 1.0 + 2 * rank.number) == 4.0
            for named in (first, second):
                backward(named, **dict.fromkeys(named, 1.0 + rank.number))
                found.append(grads(named))
            for reducer in reducers:
                reducer.note_step()
        return found

    assert play(2, body) == [[{"a": 1.75}, {"b": 1.75}] * 2] * 2


@pytest.mark.parametrize("weighed_before", [False, True])
def test_a_rank_that_leaves_out_its_count_is_named_on_all(weighed_before: bool) -> None:
    def body(rank: Rank) -> str:
        named = parameters_of(a=(3,))
        reducer = rank.reducer(named)
        if weighed_before:
            weigh(rank, 1.0)
            backward(named, a=1.0)
            reducer.note_step()
        return told(rank, named, a=1.0)

    for text in play(3, body):
        assert LEFT_OUT in text
        assert "ranks 0 and 2 called it" in text


def test_the_ones_that_weigh_at_the_end_of_a_backward_pass_are_met_there() -> None:
    """The other rank exchanges twice after one count: its second exchange meets a count."""

    def body(rank: Rank) -> str:
        first, second = parameters_of(a=(3,)), parameters_of(b=(3,))
        rank.reducer(first), rank.reducer(second)
        weigh(rank, 1.0)
        backward(first, a=1.0)
        return told(rank, second, b=1.0)

    assert all(LEFT_OUT in text for text in play(2, body))


def test_ranks_compare_by_the_store_once_and_a_single_rank_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def count(world: World, name: str, value: bool, **_: bool) -> list[bool]:
        asked.append(name)
        return all_gather_json(world, name, value)

    monkeypatch.setattr(guards, "all_gather_json", count)

    def body(rank: Rank) -> float:
        return sum(weigh(rank, 1.0) for _ in range(3))

    assert play(2, body) == [6.0, 6.0]
    assert asked == ["fd.weight/first"] * 2
    assert play(1, body) == [3.0]
    assert asked == ["fd.weight/first"] * 2
