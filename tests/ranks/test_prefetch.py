"""`fd.prefetch` of divided loaders: weights, places and waits are those of the batch that the loop has."""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.events import SETUP_PREFETCH, DataWait, Event
from farandole.parallel.instrument.training_facts import facts_of
from tests.ranks.pool import ranks, takes
from tests.ranks.reference import assert_same_bits
from tests.ranks.test_balance import COUNT, WHOLE, Rows, alone, assert_near, everyones, make, switch_to, train
from tests.ranks.test_balance import loader as rows_loader
from tests.ranks.test_resume import Shuffled, numbers, of_all, seen


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def rows(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(*(torch.randn(count, width, generator=draw, dtype=torch.float64) for width in (6, 3)))


def as_drawn(batches: Iterable[Any]) -> Iterable[Any]:
    return batches


def made_anew(batches: Iterable[Any]) -> Iterator[Any]:
    """As a loop that moves batches to a device: their memory is not known."""
    for x, y in batches:
        yield x + 0.0, y.clone()


def late(batches: Iterable[Any]) -> Iterator[Any]:
    """Give the thread time to draw all that it may."""
    for batch in batches:
        time.sleep(0.01)
        yield batch


@pytest.mark.gate_cases("25-1-0-4-late", "25-1-1-2-made_anew", "13-2-0-4-made_anew", "13-2-1-2-as_drawn")
@pytest.mark.parametrize("loop", [as_drawn, made_anew, late])
@pytest.mark.parametrize(("workers", "depth"), [(0, 1), (0, 4), (1, 2)])
@pytest.mark.parametrize(("count", "accumulate"), [(25, 1), (13, 2)])
@ranks(2)
def test_uneven_last_batches_train_as_one_process(
    count: int, workers: int, depth: int, accumulate: int, loop: Callable[[Any], Any]
) -> None:
    """A short last batch, which one of the ranks may have nothing of, counts where it is used."""
    fd.init()
    model, reference = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    fd.distribute(model, optimizer, fd.Plan(accumulate=accumulate))
    divided = fd.shard(DataLoader(rows(count), batch_size=6, num_workers=workers), split=True)
    prefetched = loop(fd.prefetch(divided, depth=depth)) if loop is as_drawn else None
    for _ in range(2):
        for network, stepper, batches in (
            (model, optimizer, prefetched or loop(fd.prefetch(divided, depth=depth))),
            (reference, other, DataLoader(rows(count), batch_size=6)),
        ):
            number = 0
            for number, (x, y) in enumerate(batches, start=1):
                (nn.functional.mse_loss(network(x), y) / accumulate).backward()
                if number % accumulate == 0:
                    stepper.step()
                    stepper.zero_grad()
            if number % accumulate:
                stepper.step()
                stepper.zero_grad()
    assert_near(model, reference)
    assert_same_bits(model)
    assert fd.world().session.batch_weight.factor == 1.0, "no loop goes on"


@ranks(2)
def test_copies_are_known_by_their_memory() -> None:
    """A batch is known where the loop has other tensors than the loader made, and several of them at a time."""
    from farandole.comm.device.streams import simulate_device
    from tests.unit.train.test_prefetch import Noting

    fd.init()
    model, reference = net(), net()
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    fd.distribute(model, optimizer)
    streams: Any = Noting()
    simulate_device(torch.device("cpu"), streams)
    try:
        batches = list(fd.prefetch(fd.shard(DataLoader(rows(13), batch_size=6), split=True)))
    finally:
        simulate_device(torch.device("cpu"), None)
    order = (2, 0, 1)
    plain = list(DataLoader(rows(13), batch_size=6))
    for network, stepper, each in ((model, optimizer, batches), (reference, other, plain)):
        for at in order:
            x, y = each[at]
            stepper.zero_grad()
            nn.functional.mse_loss(network(x), y).backward()
            stepper.step()
    assert_near(model, reference)


@pytest.mark.full_cases("2-in order-0", "1-shuffled-2", "1-in order-0", "1-shuffled-0")
@pytest.mark.full_cases("1-stream-0", "2-in order-2", "2-shuffled-2", "2-stream-2", "2-stream-0")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "in order", "stream"])
@ranks(1, 2)
def test_a_state_is_of_the_batch_that_the_loop_has(kind: str, workers: int) -> None:
    fd.init()
    first = fd.prefetch(numbers(kind, workers), depth=3)
    whole = [seen(first) for _ in range(2)]
    for stop in (1, 3, len(first)):
        plain, prefetched = numbers(kind, workers), fd.prefetch(numbers(kind, workers), depth=3)
        seen(plain)
        begun = seen(prefetched)
        assert begun == whole[0]
        states = []
        for loader in (plain, prefetched):
            iterator = iter(loader)
            mine = [[int(i) for i in next(iterator)] for _ in range(stop)]
            if loader is prefetched:
                time.sleep(0.02)  # the thread draws what it may
            states.append(json.loads(json.dumps(loader.state_dict())))
            del iterator
            assert json.loads(json.dumps(loader.state_dict())) == states[-1], "leaving the loop changes nothing"
        begun += mine
        assert states[0] == states[1]
        assert (states[1]["epoch"], states[1]["batches"]) == (1, stop)
        resumed = fd.prefetch(numbers(kind, workers), depth=2)
        resumed.load_state_dict(states[1])
        begun += seen(resumed)  # after the last batch, whose end was not seen yet, nothing
        assert begun == whole[0] + whole[1], stop
        assert resumed.state_dict()["epoch"] == 2


@ranks(1)
def test_workers_end_with_the_loader_whose_loop_was_left() -> None:
    """Those that wait for the garbage collector keep it for 5 s each, at any moment."""
    fd.init()
    gc.collect()
    gc.disable()
    try:
        for stop in (1, 11):
            loader = fd.prefetch(numbers("in order", 2), depth=3)
            assert len(loader) == 11
            iterator = iter(loader)
            for _ in range(stop):
                next(iterator)
            assert len(multiprocessing.active_children()) == 2
            time.sleep(0.1)  # until the end is drawn, which the loop has not seen
            del iterator, loader
            assert not multiprocessing.active_children(), stop
    finally:
        gc.enable()


@ranks(2)
def test_an_epoch_that_was_left_by_break_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    fd.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer)
    loader = fd.prefetch(numbers("shuffled"), depth=4)
    whole = seen(loader)
    loader.set_epoch(0)
    part = seen(loader, 2)
    fd.save(tmp_path, model, optimizer, step=2, loader=loader)
    again = fd.prefetch(numbers("shuffled"))
    assert fd.load(tmp_path, model, optimizer, loader=again) == 2
    rest = seen(again)
    assert part + rest == whole
    used = sorted(i for own in of_all(part + rest) for batch in own for i in batch)
    assert used == list(range(43)), "each sample once"


@ranks(2)
def test_an_order_that_rank_0_draws_is_sent_where_no_thread_sends() -> None:
    fd.init()
    samples: Any = range(43)
    for options in (
        {"batch_size": 4, "sampler": Shuffled()},
        {"batch_sampler": BatchSampler(RandomSampler(samples), 4, False)},
    ):
        plain = fd.shard(DataLoader(samples, **options), seed=3)
        loader = fd.prefetch(fd.shard(DataLoader(samples, **options), seed=3), depth=4)
        for _ in range(3):
            expected = seen(plain)
            mine = []
            for batch in loader:
                mine.append([int(i) for i in batch])
                assert fd.mean(1.0) == 1.0, "an exchange of the loop's own meanwhile"
            assert mine == expected


def chained(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@ranks(2)
def test_an_epoch_that_begins_in_the_thread_is_refused_and_one_inside_is_not() -> None:
    fd.init()
    loader = numbers("shuffled")
    found: list[Any] = []
    with pytest.raises(
        fd.ConfigError, match=r"begins another epoch of a loader of fd\.shard.*prefetch the loader"
    ):
        found.extend(fd.prefetch(chained(loader)))
    assert len(found) == len(loader)
    loader.set_epoch(0)
    expected = [seen(loader) for _ in range(2)]
    loader.set_epoch(0)
    endless = chained(fd.prefetch(loader))
    assert [[int(i) for i in next(endless)] for _ in range(2 * len(loader))] == expected[0] + expected[1]


def drawn_by(divided: Any) -> tuple[int, int]:
    found: tuple[int, int] = divided._farandole.changes._drawn
    return found


@pytest.mark.gate_cases("0-2", "1-1")
@pytest.mark.parametrize(("workers", "depth"), [(0, 1), (0, 2), (1, 1)])
@ranks(2)
@takes(60)
def test_shares_that_change_begin_behind_what_was_drawn(workers: int, depth: int) -> None:
    fd.init()
    model, optimizer = make(fd.Plan(balance="speed"))
    divided = fd.shard(rows_loader(workers, prefetch_factor=1 if workers else None), split=True, seed=5)
    loader = fd.prefetch(divided, depth=depth)
    drawn = 1 + depth + workers
    counts = []
    for epoch, change in enumerate([(1.0, 3.0), (5.0, 1.0)]):
        mine = []
        for number, batch in enumerate(loader):
            if number == 0:
                deadline = time.monotonic() + 20
                while drawn_by(divided) != (epoch + 1, WHOLE * drawn):
                    assert time.monotonic() < deadline, drawn_by(divided)
                    time.sleep(0.005)
                switch_to(*change)
            mine += train(model, optimizer, [batch])
        steps = everyones(mine)
        assert sorted(i for step in steps for own in step for i in own) == list(range(COUNT))
        counts.append([[len(own) for own in step] for step in steps])
    assert counts[0] == [[6, 6]] * drawn + [[3, 9]] * (5 - drawn) + [[0, 1]]
    assert counts[1] == [[3, 9]] * drawn + [[10, 2]] * (5 - drawn) + [[1, 0]]
    assert_near(model, alone(2))
    assert_same_bits(model)


@ranks(2)
@takes(60)
def test_a_state_between_a_change_of_shares_and_its_begin() -> None:
    """What the thread has drawn in the old shares is drawn in them again."""
    fd.init()
    model, optimizer = make(fd.Plan(balance="speed"))
    divided = fd.shard(rows_loader(), split=True, seed=5)
    saved: Any = None
    rest: list[list[int]] = []
    for number, batch in enumerate(fd.prefetch(divided, depth=2)):
        found = train(model, optimizer, [batch])
        rest += found if saved is not None else []
        if number == 0:
            while drawn_by(divided) != (1, WHOLE * 3):
                time.sleep(0.005)
            switch_to(1.0, 2.0)
            saved = json.loads(json.dumps(divided.state_dict()))
    assert saved["shares"] == [[12, [1.0, 1.0]], [36, [1.0, 2.0]]]
    again = fd.shard(rows_loader(), split=True, seed=5)
    again.load_state_dict(saved)
    assert train(model, optimizer, fd.prefetch(again, depth=3)) == rest
    used = [i for step in everyones(rest) for own in step for i in own]
    assert sorted(used) == sorted(torch.randperm(COUNT, generator=torch.Generator().manual_seed(5))[12:].tolist())


@ranks(3)
def test_placeholders_are_known_where_results_are_gathered() -> None:
    fd.init()
    loader = fd.prefetch(fd.shard(DataLoader(rows(13), batch_size=6), split=True), depth=4)
    x = rows(13).tensors[0]
    found = [fd.gather(mine) for mine, _ in late(loader)]
    assert torch.equal(torch.cat(found), x)


class Keep:
    """Keeps the waits of a rank."""

    def __init__(self) -> None:
        self.waits: list[DataWait] = []

    def record(self, event: Event) -> None:
        if isinstance(event, DataWait):
            self.waits.append(event)


class Timed(Rows):
    """Takes its time for a batch, and says when it is made."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.made = threading.Semaphore(0)

    def __getitems__(self, indexes: list[int]) -> Any:
        time.sleep(self.seconds)
        self.made.release()
        return [self[i] for i in indexes]


@pytest.mark.gate_cases("divided")
@pytest.mark.parametrize("kind", ["divided", "plain", "recorded", "evaluation"])
@ranks(1)
def test_what_is_recorded_is_the_wait_of_the_loop(kind: str) -> None:
    here = fd.init()
    keep = here.session.recorder = Keep()
    data = Timed(0.1)
    source: Any = DataLoader(data, batch_size=WHOLE)
    if kind == "recorded":
        fd.record(net(), torch.optim.SGD([torch.ones(1)], 0.1), source)
    if kind in ("divided", "evaluation"):
        source = fd.shard(source, evaluate=kind == "evaluation")
    loader = fd.prefetch(source, depth=1)
    fd.record(net(), torch.optim.SGD([torch.ones(1)], 0.1), loader)  # its waits are recorded once
    count = 0
    for count, _ in enumerate(loader, start=1):
        if count == 1:
            assert data.made.acquire(timeout=10)
        if count < len(loader):  # the next one is ready, or nearly so
            assert data.made.acquire(timeout=10)
            time.sleep(0.03)
    assert count == 6
    if kind == "evaluation":
        assert not keep.waits
        return
    assert [wait.samples for wait in keep.waits] == [12, 12, 12, 12, 12, 1]
    seconds = [wait.end_seconds - wait.begin_seconds for wait in keep.waits]
    assert seconds[0] >= 0.1, "nothing is ahead of the first"
    assert max(seconds[1:]) < 0.05, f"the thread took 0.1 s for each, and the loop waited {seconds}"
    assert all((wait.cpu_seconds or 0.0) < 0.1 for wait in keep.waits)
    assert facts_of(here).known(SETUP_PREFETCH) == 1
    if kind != "plain":
        list(source)
        assert facts_of(here).known(SETUP_PREFETCH) is None


@ranks(2)
def test_two_loops_over_one_loader_at_a_time() -> None:
    fd.init()
    divided = numbers("shuffled")
    loader = fd.prefetch(divided, depth=3)
    expected = [seen(loader) for _ in range(3)]
    loader.set_epoch(0)
    found: list[list[list[int]]] = [[], [], []]
    for batch in loader:
        found[0].append([int(i) for i in batch])
        if len(found[0]) == 2:
            found[1] = seen(loader)
            found[2] = seen(divided)
    assert found == expected
    assert len({json.dumps(each) for each in all_gather_json(fd.world(), "test/state", divided.state_dict())}) == 1


@ranks(2)
def test_a_step_that_fails_leaves_no_thread_and_no_weight() -> None:
    here = fd.init()
    loader = fd.prefetch(fd.shard(DataLoader(rows(13), batch_size=6), split=True), depth=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert here.session.batch_weight.factor != 1.0
    del iterator
    assert here.session.batch_weight.factor == 1.0
    assert not [each for each in threading.enumerate() if each.name == "farandole-prefetch"]
