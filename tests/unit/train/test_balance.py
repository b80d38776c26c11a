"""Shares by speed: integers against brute force, places where shares change, and when they do."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product

import pytest
import torch

from farandole.core.step_model import divide_samples, longest_seconds
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.events import EVALUATION, DataWait, Event, Exchange, Phase, StepDone
from farandole.core.vocabulary.spec import Plan
from farandole.train.balance import (
    ComputeMeter,
    ComputeTimes,
    Division,
    ShareChanges,
    ShareDecision,
    Window,
    is_share_state,
)
from farandole.train.data.partition import Partition
from farandole.train.data.position import LoopPlace
from farandole.train.data.rank_sampler import EpochPlan, Order

CASES = [
    (size, count, seed) for size, most in ((2, 24), (3, 16), (4, 11)) for count in range(most) for seed in range(6)
]


def all_divisions(count: int, size: int, cap: int, least: int) -> Iterator[tuple[int, ...]]:
    for counts in product(range(least, (cap or count) + 1), repeat=size):
        if sum(counts) == count:
            yield counts


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_division_is_the_best_there_is(size: int, capped: bool) -> None:
    for _, count, seed in (case for case in CASES if case[0] == size):
        draw = random.Random(seed * 1000 + count)
        speeds = tuple(draw.choice([1.0, 0.5, 0.25, draw.uniform(0.1, 3.0)]) for _ in range(size))
        cap = max(-(-count // size), draw.randint(1, count + 1)) if capped else 0
        found = divide_samples(count, speeds, cap)
        assert sum(found) == count
        assert max(found) <= (cap or count), f"{found} of {count}, cap {cap}"
        least = 1 if count >= size else 0
        assert min(found) >= least, f"{found}: a rank has nothing"
        best = min(longest_seconds(each, speeds) for each in all_divisions(count, size, cap, least))
        assert longest_seconds(found, speeds) == pytest.approx(best, rel=1e-12), f"{found} at {speeds}, cap {cap}"


def test_equal_speeds_divide_as_without_shares() -> None:
    for size, count in product((1, 2, 3, 5), range(40)):
        even = [len(Partition(rank, size, 8).cut(0, count)) for rank in range(size)]
        assert list(divide_samples(count, (0.3,) * size)) == even, f"{count} over {size}"


def test_large_batches_are_divided_at_once_and_well() -> None:
    counts = divide_samples(1_000_000, (1.0, 1.0, 1.0, 0.5))
    assert counts == (285715, 285714, 285714, 142857)


def test_no_room() -> None:
    with pytest.raises(ValueError, match="9 samples do not fit 2 ranks of at most 4"):
        divide_samples(9, (1.0, 1.0), 4)


def order_of(total: int) -> Callable[[LoopPlace], Order]:
    return lambda _: Order(torch.arange(total))


def plans(total: int, size: int, whole: int, changes: list[ShareChanges]) -> list[EpochPlan]:
    made = []
    for rank in range(size):
        place = LoopPlace(0, iteration=changes[rank].begin())
        made.append(EpochPlan(place, Partition(rank, size, whole), order_of(total), 0, changes[rank]))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_once_wherever_shares_change(seed: int) -> None:
    draw = random.Random(seed)
    size, whole, total = draw.randint(2, 5), draw.randint(5, 20), draw.randint(1, 120)
    changes = [ShareChanges(Division((1.0,) * size)) for _ in range(size)]
    for _ in range(3):
        epoch = plans(total, size, whole, changes)
        drawing = [plan.batches() for plan in epoch]
        seen: list[list[list[int]]] = [[] for _ in range(size)]
        ended: set[int] = set()
        while len(ended) < size:
            for rank in range(size):  # some are further ahead than others, as workers and prefetchers are
                for _ in range(draw.randint(0, 4)):
                    batch = next(drawing[rank], None)
                    if batch is None:
                        ended.add(rank)
                    else:
                        seen[rank].append(batch)
            if draw.random() < 0.5:
                division = Division(tuple(draw.uniform(0.1, 2) for _ in range(size)))
                with ExitStack() as held:
                    begin = max([held.enter_context(each.held()) for each in changes])
                    for each in changes:
                        each.change(begin, division)
        steps = [list(plan.steps()) for plan in epoch]
        assert len({len(each) for each in seen}) == 1, "ranks make unequal numbers of steps"
        found = [i for rank in range(size) for batch, step in zip(seen[rank], steps[rank], strict=True)
                 for i in batch[: step.part.samples]]  # fmt: skip
        assert sorted(found) == list(range(total))
        for step in zip(*steps, strict=True):
            assert sum(each.part.factor for each in step) == pytest.approx(size), "weights are of one mean"


def test_what_was_drawn_does_not_change_and_threads_wait() -> None:
    changes = ShareChanges(Division((1.0, 1.0)))
    iteration = changes.begin()
    changes.draw(iteration, 0, 8)
    with changes.held() as drawn:
        thread = threading.Thread(target=changes.draw, args=(iteration, 8, 16))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "a batch was drawn while shares changed"
        changes.change(drawn, Division((3.0, 1.0)))
    thread.join()
    found = [changes.at(iteration, used) for used in (0, 8, 16)]
    assert [each.counts(8) for each in found if each] == [(4, 4), (6, 2), (6, 2)]
    with changes.held(), pytest.raises(AssertionError, match="drawn up to"):
        changes.change((iteration, 8), Division((1.0, 1.0)))


def test_the_state_of_shares_goes_through_json() -> None:
    changes = ShareChanges(Division((1.0, 1.0)))
    iteration = changes.begin()
    changes.draw(iteration, 0, 24)
    with changes.held() as drawn:
        changes.change(drawn, Division((0.1 + 0.2, 1.0)))
    state = json.loads(json.dumps(changes.state(iteration, 8)))
    assert state == [[8, [1.0, 1.0]], [24, [0.1 + 0.2, 1.0]]]
    assert is_share_state(state)
    other = ShareChanges(Division((1.0, 1.0)))
    number = other.begin()
    last = other.load(state, cap=0)
    assert last == Division((0.1 + 0.2, 1.0))
    for used in (8, 16, 24, 32):
        assert other.at(number, used) == changes.at(iteration, used)
    assert changes.state(iteration + 1, 0) == [[0, [0.1 + 0.2, 1.0]]]
    for wrong in (
        [],
        [[0]],
        [[0, []]],
        [[-1, [1.0]]],
        [[0, [0.0]]],
        [[0, [1.0, float("nan")]]],
        [[True, [1.0]]],
        3,
    ):
        assert not is_share_state(wrong), f"{wrong}"


# -- when shares change --------------------------------------------------------------------------

WHOLE = 64


def window(seconds: tuple[float, ...], counts: tuple[int, ...], network: float = 0.0) -> Window:
    """What ranks measure that take `seconds` for a sample; `network`: what a step takes beside."""
    longest = max(own * each for own, each in zip(counts, seconds, strict=True))
    return Window(seconds, longest + network, longest, WHOLE, counts)


def windows_until(
    decision: ShareDecision, seconds: tuple[float, ...], network: float = 0.0, most: int = 60
) -> int:
    for number in range(1, most):
        if decision.take(window(seconds, decision.division.counts(WHOLE), network)) is not None:
            return number
    return most


EQUAL = Division((1.0,) * 4)


def test_a_large_gain_is_taken_at_once_and_a_small_one_when_it_lasts() -> None:
    decision = ShareDecision(EQUAL)
    assert windows_until(decision, (0.01, 0.01, 0.01, 0.02)) == 1
    assert decision.division.counts(WHOLE) == divide_samples(WHOLE, (100.0, 100.0, 100.0, 50.0))
    assert windows_until(decision, (0.01, 0.01, 0.01, 0.02)) == 60, "it is the best already"
    assert windows_until(ShareDecision(EQUAL), (0.01, 0.01, 0.01, 0.012)) == 3
    assert windows_until(ShareDecision(EQUAL), (0.01, 0.01, 0.01, 0.0102)) == 60


def test_nothing_moves_where_the_network_is_the_limit() -> None:
    assert windows_until(ShareDecision(EQUAL), (0.01, 0.01, 0.01, 0.02), network=10.0) == 60


def test_speed_that_changes_is_followed_within_60_steps() -> None:
    decision = ShareDecision(EQUAL)
    for seconds in ((0.01, 0.01, 0.01, 0.02), (0.02, 0.01, 0.01, 0.01), (0.01, 0.014, 0.01, 0.01)):
        for _ in range(6):
            decision.take(window(seconds, decision.division.counts(WHOLE)))
        speeds = tuple(1 / each for each in seconds)
        best = longest_seconds(divide_samples(WHOLE, speeds), speeds)
        assert longest_seconds(decision.division.counts(WHOLE), speeds) <= 1.05 * best, f"{seconds}"
        for _ in range(4):
            decision.take(window(seconds, decision.division.counts(WHOLE)))


@pytest.mark.parametrize("seed", range(10))
def test_jitter_alone_moves_at_most_once_in_1000_steps(seed: int) -> None:
    draw = random.Random(seed)
    decision, moves = ShareDecision(EQUAL), 0
    for _ in range(100):
        medians = [sorted(draw.gauss(1, 0.1) for _ in range(10)) for _ in range(4)]
        seconds = tuple(0.01 * (each[4] + each[5]) / 2 for each in medians)
        moves += decision.take(window(seconds, decision.division.counts(WHOLE))) is not None
    assert moves <= 1


def test_a_change_that_gains_too_little_is_taken_back() -> None:
    decision = ShareDecision(EQUAL)
    slow = (0.01, 0.01, 0.01, 0.02)
    found = decision.take(window(slow, (16,) * 4))
    assert found is not None
    assert found.gain == pytest.approx(0.32 / 0.2, rel=0.1)
    late = Window(slow, 0.31, 0.2, WHOLE, (16,) * 4)  # batches drawn before it: nothing is judged by them
    assert [decision.take(late) for _ in range(3)] == [None] * 3
    now = Window(slow, 0.31, 0.2, WHOLE, found.division.counts(WHOLE))
    assert decision.take(now) is None, "the first steps are cold"
    back = decision.take(now)
    assert back is not None
    assert (back.returns, back.division) == (True, EQUAL)
    rest = [decision.take(window(slow, (16,) * 4)) for _ in range(11)]
    assert [each is None for each in rest] == [True] * 10 + [False]


# -- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"balance": "fast"}, 'balance = "fast", expected "none", "speed", or a share above 0'),
        ({"balance": "2,0"}, 'balance = "2,0", expected'),
        ({"balance": "2,-1"}, 'balance = "2,-1", expected'),
        ({"balance": "2,nan"}, 'balance = "2,nan", expected'),
        ({"balance": "2,,1"}, 'balance = "2,,1", expected'),
        ({"balance": "2,inf"}, 'balance = "2,inf", expected'),
        ({"balance_cap": 3}, 'balance_cap = 3 with balance = "none"'),
        ({"balance": "speed", "balance_cap": -1}, "balance_cap = -1"),
        ({"balance": "speed", "pipeline": 2}, "with pipeline = 2"),
        ({"balance": "2,1", "tensor": 2}, "with tensor = 2"),
        ({"balance": "2,1", "context": 2}, "with context = 2"),
        ({"balance": "2,1", "expert": 2}, "with expert = 2"),
        ({"balance": "2,1", "micro_batches": 2}, "with micro_batches = 2"),
        ({"balance": "speed", "zero": 3}, "with zero = 3"),
        ({"balance": "speed", "zero": 1, "overlap_gather": True}, "with overlap_gather = true"),
        ({"balance": "speed", "sync_batch_norm": True}, "with sync_batch_norm = true"),
    ],
)
def test_plans_that_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_mapping(keys, where="x")
    assert said in str(caught.value)
    assert ";" in str(caught.value), "what to do is not said"
    assert caught.value.exit_code == 2


def test_plans_that_are_not() -> None:
    for keys in ({"balance": ""}, {"balance": "none", "pipeline": 2}, {"balance": "2, 1.5", "zero": 3}):
        Plan.from_mapping(keys, where="x")


def test_a_state_from_the_beginning_of_an_epoch_divides_from_its_first_batch() -> None:
    saved = ShareChanges(Division((2.0, 1.0), 0))
    saved.begin()
    loaded = ShareChanges(Division((1.0, 1.0), 0))
    iteration = loaded.begin()
    division = loaded.load(saved.state(1, 0), 0)
    assert loaded.at(iteration, 0) == division == Division((2.0, 1.0), 0)


def test_waiting_is_no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of a second: waits for data, for gradients and for an evaluation."""
    clock = iter((10.0, 11.0, 12.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    taken: list[Event] = []
    passed_on = type("Taken", (), {"record": lambda _, event: taken.append(event)})()
    meter = ComputeMeter(passed_on)
    meter.step_begins()
    for step in (1, 2):
        begin = 9.0 + step
        events: list[Event] = [
            DataWait(begin, begin + 0.25, 4),
            Exchange((), begin + 0.5, begin + 0.625, 0),
            Phase(EVALUATION, begin + 0.75, begin + 0.875),
            StepDone(step, begin + 1.0),
        ]
        for event in events:
            meter.record(event)
        meter.step_ends()
        meter.step_begins()
    assert meter.take() == ComputeTimes(0.125, 0.5, 1.0, 4)
    assert meter.take() == ComputeTimes(0.0, 0.0, 0.0, 0.0)
    assert len(taken) == 8
