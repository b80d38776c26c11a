"""`fd.gather`: each sample once, in the order of one process, from ranks with different numbers of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import farandole as fd
from tests.ranks.pool import ranks

DTYPES = (torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


class Answer(NamedTuple):
    score: torch.Tensor
    name: Any


def divided(count: int, *, evaluate: bool = False, whole: bool = False) -> Any:
    data: Any = range(count)
    if whole:
        return fd.shard(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)))
    return fd.shard(DataLoader(data, batch_size=4), evaluate=evaluate)


@pytest.mark.gate_cases("1-2-False")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("count", [24, 41, 37, 25, 2])
@ranks(1, 2, 3)
def test_in_the_loop_each_sample_comes_once_and_in_order(count: int, whole: bool) -> None:
    """25 samples on 3 ranks: the last batch has one sample, and two ranks a placeholder."""
    fd.init()
    found: list[int] = []
    texts: list[str] = []
    for batch in divided(count, whole=whole):
        both = fd.gather({"rows": batch.float()[:, None], "texts": [str(int(i)) for i in batch]})
        found += [int(i) for i in both["rows"][:, 0]]
        texts += both["texts"]
    assert found == list(range(count))
    assert texts == [str(i) for i in range(count)]


@pytest.mark.gate_cases("1-24-True")
@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("count", [24, 41, 37, 25, 2])
@ranks(1, 2, 3)
def test_after_the_loop_too(count: int, evaluate: bool) -> None:
    fd.init()
    rows, names = [torch.empty(0, 2, dtype=torch.int64)], []
    for batch in divided(count, evaluate=evaluate):
        rows.append(torch.stack([batch, -batch], 1))
        names += [f"sample {int(i)}" for i in batch]
    found, texts, array = fd.gather((torch.cat(rows), names, torch.cat(rows).numpy()))
    assert found.tolist() == [[i, -i] for i in range(count)]
    assert texts == [f"sample {i}" for i in range(count)]
    assert array.tolist() == found.tolist()


@ranks(3)
def test_other_rows_come_rank_by_rank_with_every_type_and_uneven_numbers() -> None:
    world = fd.init()
    for dtype in DTYPES:
        mine = torch.full((world.rank, 2), world.rank, dtype=dtype, requires_grad=dtype.is_floating_point)
        found = fd.gather(mine)
        assert found.dtype == dtype
        assert not found.requires_grad
        assert torch.equal(found, torch.tensor([[1, 1], [2, 2], [2, 2]]).to(dtype))
    strided = fd.gather(torch.arange(6).reshape(2, 3).t() + 10 * world.rank)
    assert strided.shape == (9, 2)
    assert strided[:3].tolist() == [[0, 3], [1, 4], [2, 5]]


@ranks(1, 3)
def test_nests_numbers_and_objects() -> None:
    world = fd.init()
    rank, each = world.rank, range(world.size)
    found = fd.gather(
        {
            "b": Answer(torch.tensor(float(rank)), f"rank {rank}"),
            "a": (rank, [rank] * rank, {"empty": torch.empty(0, 3)}),
            "detections": [{"boxes": torch.ones(rank, 4)}],
            "np": np.float32(rank),
        }
    )
    assert list(found) == ["b", "a", "detections", "np"]
    assert isinstance(found["b"], Answer)
    assert found["b"].score.tolist() == list(each)
    assert found["b"].name == [f"rank {i}" for i in each]
    assert found["a"][0] == list(each)
    assert found["a"][1] == [i for i in each for _ in range(i)]
    assert found["a"][2]["empty"].shape == (0, 3)
    assert [len(image["boxes"]) for image in found["detections"]] == list(each)
    assert found["np"] == list(each)


@ranks(3)
def test_a_rank_without_rows_need_not_know_their_type_or_shape() -> None:
    world = fd.init()
    mine = torch.tensor([]) if world.rank == 1 else torch.full((2, 3), world.rank, dtype=torch.int64)
    found = fd.gather(mine)
    assert found.dtype == torch.int64
    assert found.tolist() == [[0] * 3] * 2 + [[2] * 3] * 2
    assert fd.gather(mine.numpy()).tolist() == found.tolist()
    assert fd.gather([]) == []
    assert fd.gather(()) == ()


@ranks(3)
def test_structures_that_differ_are_named_on_all_ranks() -> None:
    odd = fd.init().rank == 2
    cases: list[tuple[Any, str]] = [
        ({"a": 1} if odd else {"b": 1}, r"structure of the value .*\['a'\].* on rank 2"),
        ((1, 2) if odd else (1, 2, 3), "structure of the value"),
        ({"x": torch.ones(2) if odd else torch.ones(2, dtype=torch.int64)}, r"value\['x'\] is .*float32"),
        (torch.ones(2, 3 if odd else 4), r"shape \[\*, 3\].* on rank 2.*list may hold tensors of any shape"),
        (torch.ones(()) if odd else torch.ones(1), r"shape \[\].* on rank 2"),
        ([1] if odd else 1, "a list.* on rank 2"),
        (torch.empty(0) if odd else torch.ones(()), r"shape \[\*\].* on rank 2"),
    ]
    for value, message in cases:
        with pytest.raises(fd.Mismatch, match=message):
            fd.gather(value)
    with pytest.raises(fd.ConfigError, match=r"value is a torch.sparse_coo tensor on rank 2; .*to_dense"):
        fd.gather(torch.eye(3).to_sparse() if odd else torch.eye(3))
    assert fd.gather(1) == [1, 1, 1], "the world is whole"


@ranks(2)
def test_a_rank_whose_loop_has_ended_does_not_meet_another_that_is_in_it() -> None:
    """With evaluate=True ranks may have different numbers of batches: 9 samples are 2 batches and 1."""
    fd.init()
    count = 0

    def gather_in_loop() -> None:
        nonlocal count
        for batch in divided(9, evaluate=True):
            count += len(fd.gather(batch))
        fd.gather(torch.zeros(1))

    with pytest.raises(fd.Mismatch, match=r"rank 0 gathered in the loop over a loader, and the others after it"):
        gather_in_loop()
    assert count == 8


@ranks(2)
def test_an_evaluation_inside_the_training_loop() -> None:
    """The last training batch is a placeholder on rank 1; the values of the evaluation are whole all the same."""
    fd.init()
    for batch in divided(9):
        values = torch.cat(list(divided(13, evaluate=True)))
        assert fd.gather(values).tolist() == list(range(13))
        del batch
