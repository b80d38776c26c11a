"""`fd.weight`: a mean over tokens on several ranks is the mean of one process over all tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close, assert_same_bits

WORDS, LENGTH = 11, 7


def language_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS))


def texts(count: int) -> TensorDataset:
    """Ragged texts: their ends are padding, of which the loss is no mean."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    targets = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (count,), generator=generator)
    targets[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return TensorDataset(tokens, targets)


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def count_of(targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum()


def one_ahead(batches: Any) -> Iterator[Any]:
    iterator = iter(batches)
    following = next(iterator, None)
    while following is not None:
        current, following = following, next(iterator, None)
        yield current


def train_reference(count: int, whole: int, window: int, epochs: int = 2) -> nn.Module:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(texts(count), batch_size=whole)
    for _ in range(epochs):
        for i, (tokens, targets) in enumerate(loader):
            (loss_of(model, tokens, targets) / window).backward()
            if (i + 1) % window == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return model


def train(count: int, window: int, *, after_forward: bool, held: bool = False, plan: Any = None) -> nn.Module:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    fd.distribute(model, optimizer, plan)
    loader = fd.shard(DataLoader(texts(count), batch_size=4))
    for _ in range(2):
        for i, (tokens, targets) in enumerate(loader):
            last = (i + 1) % window == 0 or i + 1 == len(loader)
            if not after_forward:
                fd.weight(count_of(targets))
            loss = loss_of(model, tokens, targets) / window
            if after_forward:
                fd.weight(count_of(targets))
            with fd.accumulate(not last) if held else nullcontext():
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model


@pytest.mark.gate_cases("1-22-False")
@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("count", [24, 22, 25])
@ranks(1, 2, 3)
def test_ragged_texts_train_as_in_one_process(count: int, after_forward: bool) -> None:
    """25 texts leave one for the last batch: other ranks have a placeholder, whose tokens count for nothing."""
    world = fd.init()
    reference = train_reference(count, 4 * world.size, 1)
    model = train(count, 1, after_forward=after_forward)
    assert_close(model, reference)
    assert_same_bits(model)


@pytest.mark.full("further")
@pytest.mark.parametrize("how", ["plain", "held", "plan"])
@pytest.mark.parametrize("count", [48, 50, 37])
@ranks(2, 3)
def test_accumulated_texts_too(count: int, how: str) -> None:
    world = fd.init()
    reference = train_reference(count, 4 * world.size, 3)
    plan = fd.Plan(accumulate=3) if how == "plan" else None
    model = train(count, 3, after_forward=False, held=how == "held", plan=plan)
    assert_close(model, reference)
    assert_same_bits(model)


@ranks(2)
def test_without_it_the_mean_is_another() -> None:
    """So that the tests above can fail."""
    world = fd.init()
    reference = train_reference(24, 4 * world.size, 1)
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    fd.distribute(model, optimizer)
    for _ in range(2):
        for tokens, targets in fd.shard(DataLoader(texts(24), batch_size=4)):
            loss_of(model, tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError):
        assert_close(model, reference, rtol=1e-3)


@ranks(2)
def test_one_count_for_a_window_whose_losses_are_sums() -> None:
    """As trainers that divide by the tokens of all micro-batches of a step."""
    world = fd.init()
    reference, model = language_model(), language_model()
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model))
    fd.distribute(model, optimizer)
    tokens, targets = texts(16).tensors
    whole = count_of(targets)
    for rows in (slice(0, 8), slice(8, 16)):
        (
            cross_entropy(reference(tokens[rows]).flatten(0, 1), targets[rows].flatten(), reduction="sum") / whole
        ).backward()
    mine = slice(world.rank * 8, world.rank * 8 + 8)
    own_count = count_of(targets[mine])
    assert fd.weight(own_count) == float(whole)
    for rows in (slice(mine.start, mine.start + 4), slice(mine.start + 4, mine.stop)):
        loss = cross_entropy(model(tokens[rows]).flatten(0, 1), targets[rows].flatten(), reduction="sum")
        (loss / own_count).backward()
    plain.step(), optimizer.step()
    assert_close(model, reference)


@pytest.mark.full("further")
@ranks(2)
def test_a_rank_without_tokens_adds_nothing_and_a_step_without_any_is_refused() -> None:
    world = fd.init()
    reference, model = language_model(), language_model()
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model))
    fd.distribute(model, optimizer)
    tokens, targets = texts(8).tensors
    targets[4:] = -100
    loss_of(reference, tokens, targets).backward()
    mine = slice(world.rank * 4, world.rank * 4 + 4)
    fd.weight(count_of(targets[mine]))
    loss = loss_of(model, tokens[mine], targets[mine])
    assert bool(loss.isnan()) == (world.rank == 1)
    loss.backward()
    plain.step(), optimizer.step()
    assert_close(model, reference)
    with pytest.raises(fd.ConfigError, match="0 on all ranks"):
        fd.weight(0)


@pytest.mark.full("further")
@ranks(3)
def test_wrong_counts_are_named_on_all_ranks() -> None:
    world = fd.init()
    for wrong in (-1, float("nan"), float("inf"), "x", torch.ones(2), True):
        with pytest.raises(fd.ConfigError, match=r"count is .* on rank 1; expected a number of at least 0"):
            fd.weight(wrong if world.rank == 1 else 3)  # type: ignore[arg-type]
    with pytest.raises(fd.Mismatch, match="ranks 0 and 2 gave None"):
        fd.weight(3 if world.rank == 1 else None)
    assert fd.weight(world.rank) == 3


@ranks(2)
def test_a_count_of_an_earlier_step_is_refused() -> None:
    fd.init()
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fd.distribute(model, optimizer)
    tokens, targets = texts(4).tensors
    fd.weight(count_of(targets))
    for _ in range(2):
        loss_of(model, tokens, targets).backward()  # two passes of one step
    optimizer.step()
    with pytest.raises(fd.ConfigError, match=r"for an earlier step and not for this one; .*fd\.weight\(None\)"):
        loss_of(model, tokens, targets).backward()
    fd.weight(None)
    loss_of(model, tokens, targets).backward()
    optimizer.step()


@pytest.mark.full("further")
@ranks(2)
def test_a_count_that_is_given_for_another_batch_than_the_one_in_use_is_refused() -> None:
    """Batches are drawn ahead, and the last one is a placeholder on rank 1."""
    world = fd.init(timeout_seconds=60)
    model = language_model()
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
    batches = one_ahead(fd.shard(DataLoader(texts(9), batch_size=4)))
    tokens, targets = next(batches)
    loss = loss_of(model, tokens, targets)
    fd.weight(count_of(targets))  # after the forward pass, which is certain
    loss.backward()
    batches = one_ahead(fd.shard(DataLoader(texts(9), batch_size=4)))
    tokens, targets = next(batches)
    fd.weight(count_of(targets))
    loss = loss_of(model, tokens, targets)
    with pytest.raises(
        fd.ConfigError if world.rank else fd.CommError, match="drawn ahead" if world.rank else "gone|lost|closed"
    ):
        loss.backward()
    fd.shutdown()


@ranks(2)
def test_batch_norm_over_all_ranks_goes_by_the_count_too() -> None:
    """Every rank's samples are in the statistics, and its loss weighs by what it is a mean of."""
    world = fd.init()
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 6, generator=generator), torch.arange(8) % 3
    y[5:] = -100

    def normed() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    reference, model = normed(), normed()
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model))
    fd.distribute(model, optimizer, fd.Plan(sync_batch_norm=True))
    mine = slice(world.rank * 4, world.rank * 4 + 4)
    for _ in range(3):
        plain.zero_grad(), optimizer.zero_grad()
        cross_entropy(reference(x), y).backward()
        loss = cross_entropy(model(x[mine]), y[mine])
        fd.weight((y[mine] != -100).sum())
        loss.backward()
        plain.step(), optimizer.step()
    assert_close(model, reference)


@ranks(1, 2)
def test_alone_it_checks_and_changes_nothing() -> None:
    world = fd.init()
    assert fd.weight(4.0) == 4.0 * world.size
    assert fd.weight(torch.tensor(2)) == 2.0 * world.size
    assert fd.weight(None) == 0.0
    with pytest.raises(fd.ConfigError, match="expected a number"):
        fd.weight(-2)


def weigh_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, calls: int) -> None:
    tokens, targets = texts(8).tensors
    for _ in range(calls):
        fd.weight(count_of(targets))
    loss_of(model, tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.gate_cases("2-0")
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("odd_calls", [0, 2])
@ranks(3)
def test_a_rank_that_calls_it_less_or_more_is_named_on_all(before: int, odd_calls: int) -> None:
    """In the first step too, and with no rank waiting for the time-out."""
    world = fd.init(timeout_seconds=60)
    model = language_model()
    fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(before):
        weigh_and_step(model, optimizer, 1)
    begin = time.monotonic()
    less, more = ("rank 1", "ranks 0 and 2") if odd_calls == 0 else ("ranks 0 and 2", "rank 1")
    wanted = f"{less} left out fd.weight in a step in which {more} called it"
    with pytest.raises(fd.Mismatch, match=wanted):
        weigh_and_step(model, optimizer, odd_calls if world.rank == 1 else 1)
    assert time.monotonic() - begin < 25


@ranks(2)
def test_a_rank_that_leaves_out_the_return_to_samples_is_named() -> None:
    world = fd.init(timeout_seconds=60)
    model = language_model()
    fd.distribute(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    weigh_and_step(model, optimizer, 1)
    with pytest.raises(fd.Mismatch, match=r"rank 1 left out fd\.weight"):  # noqa: PT012
        if world.rank == 0:
            fd.weight(None)
        weigh_and_step(model, optimizer, 0)


@ranks(2)
def test_two_models_in_one_pass_and_one_that_is_not_weighed() -> None:
    fd.init(timeout_seconds=60)
    first, second = language_model(), language_model()
    both = [*first.parameters(), *second.parameters()]
    fd.distribute(first, one := torch.optim.SGD(first.parameters(), lr=0.1))
    fd.distribute(second, two := torch.optim.SGD(second.parameters(), lr=0.1))
    tokens, targets = texts(8).tensors
    for _ in range(3):
        fd.weight(count_of(targets))
        (loss_of(first, tokens, targets) + loss_of(second, tokens, targets)).backward()
        one.step(), two.step()
        for parameter in both:
            parameter.grad = None
    fd.weight(None)
    loss_of(first, tokens, targets).backward()
    one.step()
    assert_same_bits(first)
