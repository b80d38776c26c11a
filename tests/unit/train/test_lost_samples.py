"""The rest of an epoch after ranks were lost: their samples follow what was used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from torch.utils.data import IterableDataset, SequentialSampler

from farandole.comm.world.world import World
from farandole.train.data.partition import Partition
from farandole.train.data.position import LoaderPosition, LoopPlace, reordered
from farandole.train.data.rank_sampler import RankBatches, RankSampler
from farandole.train.data.stream import divide_stream

NO_WORLD = cast("World", None)


def drawn(sampler: RankSampler | RankBatches, place: LoopPlace) -> list[int]:
    """Return the samples of one rank in the rest of an epoch."""
    plan = sampler.make_plan(place)
    both = zip(plan.batches(), plan.steps(), strict=True)
    return [index for batch, step in both for index in batch if step.part.samples]


@pytest.mark.parametrize("gone", [[0], [2], [0, 1], [1, 2]])
@pytest.mark.parametrize("batches", [1, 3, 4])
def test_each_sample_is_drawn_once_when_ranks_are_lost(gone: list[int], batches: int) -> None:
    """Of 22 samples in batches of two a rank: the fourth batch of three ranks has four."""
    source, seen = SequentialSampler(range(22)), list[int]()
    plans = [RankSampler(source, Partition(rank, 3, 6), NO_WORLD, 0).make_plan(LoopPlace(0)) for rank in range(3)]
    for rank in set(range(3)) - set(gone):
        parts = [part.part for part in plans[rank].steps()]
        taken = [batch for batch, part in zip(plans[rank].batches(), parts, strict=True) if part.samples]
        seen += [index for batch in taken[:batches] for index in batch]
    sure = [list(plans[rank].batches())[: batches - 1] for rank in gone]
    seen += [index for each in sure for batch in each for index in batch]
    end, lost = plans[0].lost_with(gone, range(batches - 1, batches))
    assert end == min(6 * batches, 22)
    place = LoopPlace(0, batches=batches, used=end - len(lost), moved=((end, tuple(lost)),))
    left = Partition(0, 3, 6).over(0, 3 - len(gone))
    assert left.whole == 2 * left.size
    for rank in range(left.size):
        seen += drawn(RankSampler(source, left.over(rank, left.size), NO_WORLD, 0), place)
    assert sorted(seen) == list(range(22))


def test_a_split_batch_stays_and_moves_are_in_the_state_of_a_loader() -> None:
    assert Partition(0, 4, 8, is_split=True).over(1, 2) == Partition(1, 2, 8, is_split=True)
    position = LoaderPosition(current=LoopPlace(2, batches=3, used=7, moved=((9, (1, 5)),)))
    state = position.state(None, 0, lambda *_: [])
    assert state["moved"] == [[9, [1, 5]]]
    again = LoaderPosition()
    again.load(state)
    assert again.upcoming().moved == ((9, (1, 5)),)
    assert reordered(range(12), again.upcoming().moved) == [0, 2, 3, 4, 6, 7, 8, 1, 5, 9, 10, 11]


def test_a_stream_says_from_the_begin_whether_its_batches_bring_its_state() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    stream = divide_stream(Numbers(), Partition(0, 1, 2))
    assert not stream.keeps_states
    assert list(stream), "it can be read"
