"""Length buckets: every sample once, samples of a batch about equally long, budgets kept, and what lengths are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

import farandole as fd
from farandole.train.data.length_buckets import Cut, LengthBuckets, agreed_lengths, read_lengths


@given(
    lengths=st.lists(st.integers(0, 60), max_size=300), multiple=st.integers(1, 7),
    tokens=st.sampled_from([0, 60, 200]), is_sorted=st.booleans(), seed=st.integers(0, 5),
)  # fmt: skip
def test_every_sample_once_in_batches_that_keep_their_budget(
    lengths: list[int], multiple: int, tokens: int, is_sorted: bool, seed: int
) -> None:
    each = torch.tensor(lengths, dtype=torch.int64)
    order = torch.randperm(len(each), generator=torch.Generator().manual_seed(seed))
    buckets = LengthBuckets(each, Cut(multiple, tokens), is_sorted)
    arranged, sizes = buckets.arrange(order, seed)
    assert arranged.sort().values.tolist() == list(range(len(each)))
    assert torch.equal(arranged, buckets.arrange(order, seed).order), "the same order and seed, the same result"
    if is_sorted:
        full = len(each) - len(each) % multiple
        assert each[arranged[:full]].tolist() == sorted(lengths, reverse=True)[:full] or tokens
    elif len(each) >= multiple:
        first = multiple if sizes is None else sizes[0]
        whole = order[: len(each) - len(each) % multiple]
        assert int(each[arranged[:first]].max()) == int(each[whole].max()), "the longest sample comes first"
    if not tokens:
        assert sizes is None
        return
    assert sizes is not None
    assert sum(sizes) == len(each)
    assert all(size % multiple == 0 for size in sizes[:-1])
    for batch in arranged.split(sizes):
        assert -(-len(batch) // multiple) * int(each[batch].max()) <= tokens, "padded tokens of one of the parts"


def test_batches_are_of_about_equal_length_and_epochs_differ() -> None:
    lengths = torch.randint(1, 1000, (20_000,), generator=torch.Generator().manual_seed(3))
    buckets = LengthBuckets(lengths, Cut(32, 0))
    epochs = []
    for seed in range(2):
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
        batches = buckets.arrange(order, seed).order.view(-1, 32)
        padded = int(lengths[batches].max(1).values.sum()) * 32
        assert padded < 1.03 * int(lengths.sum()), "random batches have 1.94"
        maxima = lengths[batches].max(1).values.double()
        neighbours = float(torch.corrcoef(torch.stack([maxima[1:-1], maxima[2:]]))[0, 1])
        assert abs(neighbours) < 0.15, "batches of all lengths are mixed"
        within = lengths[batches].double() - lengths[batches].double().mean(1, keepdim=True)
        assert float(within.mean(0).abs().max()) < 1.5, "no place within a batch is for the longer ones"
        epochs.append({tuple(sorted(batch)) for batch in batches.tolist()})
    assert not epochs[0] & epochs[1], "no batch is made of the same samples again"


def test_what_is_left_over_is_no_matter_of_length() -> None:
    lengths = torch.arange(1, 104)
    buckets = LengthBuckets(lengths, Cut(8, 0))
    left = torch.cat(
        [
            lengths[buckets.arrange(torch.randperm(103, generator=torch.Generator().manual_seed(i)), i).order[-7:]]
            for i in range(200)
        ]
    )
    assert 48 < float(left.double().mean()) < 56


class Table:
    """A dataset with columns."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: Any) -> Any:
        return {"length": [5, 0, 2], "tokens": [[1] * 5, [], [1, 1]], 0: "a row"}[key]


def test_lengths_are_a_list_an_array_a_function_or_a_column() -> None:
    forms: list[Any] = [
        [5, 0, 2], (5.0, 0.0, 2.0), np.array([5, 0, 2], np.uint16), torch.tensor([5, 0, 2]), [5, 0, 2].__getitem__,
        "length", "tokens",
    ]  # fmt: skip
    for form in forms:
        assert read_lengths(form, Table()).tolist() == [5, 0, 2], form


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([5, -3, 2], "length of sample 1 is -3, expected a whole number of 0 or more"),
        ([5, None, 2], "length of sample 1 is None"),
        ([5, 2, float("nan")], "length of sample 2 is nan"),
        (np.array([5, 2.5, 1]), "length of sample 1 is 2.5"),
        ([True, True, False], "length of sample 0 is True"),
        ([[1], [2, 3], [4]], r"length of sample 0 is \[1\]"),
        (["a", "b", "c"], "length of sample 0 is a"),
        (np.ones((3, 2), int), r"length of sample 0 is \[1 1\]"),
        ([1, 2], "2 lengths for a dataset of 3 samples"),
        ("width", "the Table has no column 'width' for lengths"),
        (3, "lengths is a int, expected numbers, a function or the name of a column"),
        (lambda index: None, "length of sample 0 is None"),
    ],
)
def test_bad_lengths_are_named(lengths: Any, text: str) -> None:
    with pytest.raises(fd.ConfigError, match=text) as caught:
        read_lengths(lengths, Table())
    assert "\n" in str(caught.value) or "give" in str(caught.value), "a remedy"


def test_what_does_not_go_with_lengths_is_refused_by_name() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    rows: Any = range(6)
    even = [1] * 6
    cases: list[tuple[Any, Any, Any, str]] = [
        (DataLoader(rows), None, 8, "max_tokens=8 without lengths"),
        (DataLoader(rows), even, 0, "max_tokens is 0"),
        (DataLoader(rows), even, 2.5, "max_tokens is 2.5"),
        (DataLoader(Stream(), 2), even, None, r"lengths for a stream \(Stream\)"),
        (
            DataLoader(rows, batch_sampler=BatchSampler(rows, 2, False)),
            even,
            None,
            "a loader with a batch_sampler",
        ),
        (DataLoader(rows, 2), even, 8, "batch_size=2 and max_tokens=8 both say"),
        (
            DataLoader(rows, sampler=WeightedRandomSampler(even, 6)),
            even,
            8,
            "max_tokens with a WeightedRandomSampler",
        ),
    ]
    for loader, lengths, max_tokens, text in cases:
        found, problem = agreed_lengths(loader, lengths, max_tokens)
        assert found is None
        with pytest.raises(fd.ConfigError, match=text):
            raise problem or AssertionError(f"nothing is wrong, expected {text}")
    with pytest.raises(
        fd.ConfigError, match="sample 1 has 9 tokens, more than a batch of max_tokens=8 on one rank"
    ):
        LengthBuckets(torch.tensor([8, 9]), Cut(1, 8))
