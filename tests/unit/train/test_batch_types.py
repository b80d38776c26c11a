"""The types of batches that a checker sees are those that come: mypy checks `assert_type`, the rest runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import farandole as fd

if TYPE_CHECKING:
    from typing import assert_type
else:

    def assert_type(value: Any, _: Any) -> Any:
        return value


T = TypeVar("T")


class Samples(Dataset[T]):
    def __init__(self, sample: T) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> T:
        return self.sample


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    fd.init(progress=False)
    yield
    fd.shutdown()


def test_batches_have_the_types_that_a_checker_is_told() -> None:
    for rows in fd.shard(DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4)), batch_size=2)):
        assert_type(rows, list[Tensor])
        assert [type(each) for each in rows] == [Tensor, Tensor]
    for tensor in fd.shard(DataLoader(Samples(torch.zeros(3)), batch_size=2)):
        assert_type(tensor, Tensor)
        assert tensor.shape == (2, 3)
    for named in fd.shard(DataLoader(Samples({"ids": torch.zeros(3)}), batch_size=2)):
        assert_type(named, dict[str, Tensor])
        assert named["ids"].shape == (2, 3)
    for numbers in fd.shard(DataLoader(Samples(7), batch_size=2)):
        assert_type(numbers, Tensor)
        assert numbers.tolist() == [7, 7]
    for words in fd.shard(DataLoader(Samples("one"), batch_size=2)):
        assert_type(words, list[str])
        assert words == ["one", "one"]


def test_what_a_collate_function_alone_knows_stays_open() -> None:
    labelled: Samples[tuple[Tensor, int]] = Samples((torch.zeros(3), 1))
    for batch in fd.shard(DataLoader(labelled, batch_size=2)):
        assert_type(batch, Any)
        assert batch[1].tolist() == [1, 1], "no number, as a sample has"
    anything: DataLoader[Any] = DataLoader(labelled, batch_size=2, collate_fn=len)
    for count in fd.shard(anything):
        assert_type(count, Any)
        assert count == 2
