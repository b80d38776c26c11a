"""Decisions of the online tuner, on step times that are made up: a planted best, noise, drift, alarms, budgets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from farandole.core.bucket_plan import ExchangeKeys
from farandole.train.tune_decision import (
    ADOPTED,
    FAILED,
    NOISE,
    NOT_FINISHED,
    ROLLED_BACK,
    BlockOrder,
    PatternSearch,
    StepBlock,
    TuneDecision,
    TuneLimits,
    bucket_grid,
    gain_of,
    slowest,
)
from farandole.train.tuner import total_gain

MIB = 2**20
START = ExchangeKeys(4 * MIB, MIB, "none", "flat", 1, 1)
BEGIN = BlockOrder(START, 0, 5, "")
SIZES = bucket_grid(64 * MIB)
NAMES = ("bucket_bytes", "first_bucket_bytes", "route", "connections")
Cost = Callable[[ExchangeKeys, int], float]


def with_size(size: int) -> ExchangeKeys:
    return replace(START, bucket_bytes=size, first_bucket_bytes=min(size, MIB))


def played(
    cost: Cost,
    limits: TuneLimits,
    predicted: Sequence[ExchangeKeys] = (),
    *,
    total: int | None = None,
    steps: int = 5000,
) -> TuneDecision:
    """Let a decision run a job whose steps take `cost(keys, step)` seconds, three quarters of it exposed."""
    decision = TuneDecision(START, PatternSearch(predicted, SIZES, NAMES), limits)
    order = BEGIN
    step = 3
    while not order.is_last and step < steps:
        seconds = [cost(order.setting, step + i) for i in range(order.skip + order.count)]
        step += len(seconds)
        counted = tuple(seconds[order.skip :])
        order = decision.take(StepBlock(counted, 0.75 * min(counted)), step, total)
    assert order.is_last or total is None, "it ends"
    return decision


def bowl(best: int, steepness: float) -> Cost:
    """Return steps that are shortest, 0.1 s, with buckets of `best` bytes, and longer the further from it."""
    return lambda keys, step: 0.1 * (1 + steepness * abs(math.log2(keys.bucket_bytes / best)))


def noisy(cost: Cost, share: float) -> Cost:
    draw = random.Random(1)
    return lambda keys, step: cost(keys, step) * draw.gauss(1.0, share)


@pytest.mark.parametrize(
    ("best", "steepness"), [(SIZES[0], 0.2), (SIZES[2], 0.06), (SIZES[5], 0.2), (SIZES[6], 0.06), (SIZES[8], 0.2)]
)
def test_a_planted_best_bucket_is_found_within_5_percent_in_10_trials_whatever_is_predicted(
    best: int, steepness: float
) -> None:
    cost = noisy(bowl(best, steepness), 0.01)
    for guess in (SIZES[0], SIZES[-1]):
        decision = played(cost, TuneLimits(trials=10, budget=1.0), [with_size(guess)])
        found = bowl(best, steepness)(decision.incumbent, 0)
        assert found <= 1.05 * 0.1, f"best {best}, guessed {guess}: {decision.incumbent}, {found}"
        assert len(decision.trials) <= 10, "no more than were allowed"


def test_a_machine_that_becomes_slower_is_no_gain_and_no_loss() -> None:
    decision = played(lambda keys, step: 0.1 * (1 + 0.004 * step), TuneLimits(trials=4, budget=1.0))
    assert decision.incumbent == START, [trial.verdict for trial in decision.trials]
    assert decision.trials, "something was tried"
    assert not [trial for trial in decision.trials if trial.verdict == ADOPTED], "drift is no gain"


def test_noise_alone_is_not_adopted() -> None:
    adopted = 0
    for seed in range(8):
        draw = random.Random(seed)
        decision = played(lambda keys, step: draw.gauss(0.1, 0.01), TuneLimits(trials=5, budget=1.0))  # noqa: B023 - called at once
        adopted += sum(trial.verdict == ADOPTED for trial in decision.trials)
        assert all(trial.verdict for trial in decision.trials), "every trial has a verdict"
        assert any(trial.verdict == NOISE for trial in decision.trials) or adopted, "said so"
    assert adopted <= 3, f"{adopted} of 40 trials of nothing were adopted"


def test_a_gain_that_is_gone_after_the_switch_is_rolled_back() -> None:
    tried = with_size(16 * MIB)
    seen = 0

    def cost(keys: ExchangeKeys, step: int) -> float:
        nonlocal seen
        seen += keys == tried
        return 0.1 if keys != tried else (0.08 if seen <= 7 else 0.15)

    decision = played(cost, TuneLimits(trials=1, budget=1.0), [tried])
    assert decision.incumbent == START, "back to what was there"
    assert decision.trials[0].verdict == ROLLED_BACK, decision.trials[0]
    assert decision.trials[0].gain is not None, "and by how much"
    assert decision.trials[0].gain.is_loss, "it is a loss"


def answered(blocks: list[StepBlock], limits: TuneLimits) -> tuple[TuneDecision, list[BlockOrder]]:
    """Give a decision these blocks, whatever it asked for."""
    decision = TuneDecision(START, PatternSearch([with_size(16 * MIB)], SIZES, NAMES), limits)
    return decision, [decision.take(block, 8 + 7 * i, 10_000) for i, block in enumerate(blocks)]


def test_a_memory_alarm_ends_a_trial_at_once_and_one_without_a_trial_ends_all() -> None:
    normal = StepBlock((0.1,) * 5, 0.05)
    alarmed = StepBlock((0.05,) * 5, 0.05, "rank 1: the memory of the host is nearly used up")
    decision, orders = answered([normal, alarmed], TuneLimits(budget=1.0))
    assert decision.trials[0].verdict == FAILED, "however fast it was"
    assert orders[1].setting == START, "the next steps run as before"
    assert not orders[1].is_last, "others may be tried"
    decision, orders = answered([alarmed], TuneLimits(budget=1.0))
    assert orders[0].is_last, "nothing is tried where memory is short"
    assert not decision.trials, "nothing"
    decision, orders = answered([normal, StepBlock((0.05,) * 5, 0.05), normal, alarmed], TuneLimits(budget=1.0))
    assert decision.trials[0].verdict == ROLLED_BACK, "an alarm after the switch"
    assert orders[-1].setting == START, "rolled back"


def test_nothing_is_tried_where_communication_hides() -> None:
    decision, orders = answered([StepBlock((0.1,) * 5, 0.0001)], TuneLimits())
    assert orders[0].is_last, decision.stopped
    assert "ranks wait for communication in only 0.1% of a step: no more" in decision.stopped, decision.stopped
    assert not decision.is_cut_short, "a later run need not look"
    varied = StepBlock((0.1, 0.2, 0.1, 0.3, 0.15), 0.002)
    decision, orders = answered([varied], TuneLimits())
    assert orders[0].is_last, decision.stopped
    assert decision.is_cut_short, "on a quieter machine there may be something"


def test_a_known_run_keeps_to_its_budget_or_makes_one_trial() -> None:
    cost = bowl(64 * MIB, 0.2)
    decision = played(cost, TuneLimits(budget=0.02), total=2000)
    assert 7 < decision.spent_steps <= 40, decision.spent_steps
    assert "the budget is used" in decision.stopped, decision.stopped
    short = played(cost, TuneLimits(budget=0.02), total=100)
    assert short.spent_steps == TuneLimits().trial_steps, "one trial"
    assert not played(cost, TuneLimits(budget=0.02), total=15).trials, "not at the very end of a run"


def test_without_a_known_end_trials_wait_until_they_are_allowed() -> None:
    limits = TuneLimits(budget=0.02, trials=3)
    decision = TuneDecision(START, PatternSearch([], SIZES, NAMES), limits)
    order, step, spent = BEGIN, 3, 0
    while not order.is_last:
        steps = order.skip + order.count
        step += steps
        spent += steps if order.setting not in (START, decision.incumbent) else 0
        assert spent <= max(limits.trial_steps, 0.02 * step), f"{spent} of {step} steps"
        order = decision.take(StepBlock((0.1 if order.setting == START else 0.11,) * 5, 0.05), step, None)
    assert step > 2 * limits.trial_steps / 0.02, "it waited"


def test_what_changes_during_a_run_ends_it_with_what_is_in_force() -> None:
    decision, _ = answered([StepBlock((0.1,) * 5, 0.05)], TuneLimits(budget=1.0))
    order = decision.abandon("models were distributed")
    assert order.is_last, "no more meetings"
    assert order.setting == START, "not what is on trial"
    assert decision.trials[0].verdict == NOT_FINISHED, "without a verdict of its own"


def test_the_slowest_rank_counts_and_the_one_that_waits_least_says_what_is_exposed() -> None:
    block = slowest([[0.1, 0.1, 0.5], [0.2, 0.2, 0.2]], [0.09, 0.02])
    assert block.seconds == (0.2, 0.2, 0.2), "by the median"
    assert block.exposed_share == pytest.approx(0.1), "0.02 of 0.2"


def test_a_gain_has_its_sign_and_interval() -> None:
    gain = gain_of([[0.08, 0.08, 0.08]], [[0.1, 0.1, 0.1]])
    assert gain.share == pytest.approx(0.2), gain
    assert gain.is_certain, gain
    assert gain_of([[0.12] * 3], [[0.1] * 3]).is_loss, "longer steps"


def test_settings_with_the_same_buckets_are_tried_once() -> None:
    search = PatternSearch([], SIZES, ("bucket_bytes",), layout=lambda keys: min(keys.bucket_bytes, 8 * MIB))
    found = []
    while (keys := search.next(START)) is not None:
        found.append(keys.bucket_bytes)
    assert sorted(found) == [MIB, 2 * MIB, 16 * MIB], "8 MiB makes the buckets of 16"


def test_connections_are_tried_where_messages_travel_and_only_named_keys_change() -> None:
    search = PatternSearch([], SIZES, ("connections",))
    assert search.next(START) is None, "gloo has its own"
    coded = replace(START, codec="int8")
    assert [search.next(coded), search.next(coded), search.next(coded)] == [
        replace(coded, connections=2), replace(coded, connections=4), None,
    ], "one after the other"  # fmt: skip


def test_what_several_settings_gained_is_measured_against_the_first_and_a_loss_is_rolled_back() -> None:
    decision = played(bowl(64 * MIB, 0.2), TuneLimits(budget=1.0))
    assert sum(trial.verdict == ADOPTED for trial in decision.trials) > 1, "one after the other"
    assert decision.overall is not None, "measured"
    assert decision.overall.share == pytest.approx(1 - 1 / 1.8), "four places from the best"
    largest = 0

    def cost(keys: ExchangeKeys, step: int) -> float:
        """Steps that become shorter with each size, until all are longer than by the settings at first."""
        nonlocal largest
        largest = max(largest, keys.bucket_bytes)
        if keys == START:
            return 0.2 if largest < 64 * MIB else 0.01
        return 2.0 / keys.bucket_bytes.bit_length()

    rolled = played(cost, TuneLimits(budget=1.0, trials=4))
    assert rolled.overall is not None, [trial.verdict for trial in rolled.trials]
    assert rolled.overall.is_loss, rolled.overall
    assert rolled.incumbent == START, "back to the settings at first"
    assert not [trial for trial in rolled.trials if trial.verdict == ADOPTED], "none is called a gain any more"
    assert total_gain(rolled) is None, "nothing is said to be shorter by a loss"


def divided(*, room: bool, most: int = 8) -> PatternSearch:
    """Return a search that may change micro-batches and nothing else."""
    return PatternSearch([], SIZES, ("micro_batches",), most_micro_batches=most, has_room=room)


def test_micro_batches_are_halved_where_there_is_memory_and_doubled_up_to_the_batch() -> None:
    two = replace(START, micro_batches=2)
    search = divided(room=True, most=4)
    assert search.has_more(two)
    assert [search.next(two), search.next(two), search.next(two)] == [
        replace(two, micro_batches=1), replace(two, micro_batches=4), None,
    ], "larger ones first"  # fmt: skip
    assert not search.has_more(two)
    assert divided(room=False, most=3).next(two) is None, "no memory, and no sample"
    tight = divided(room=False)
    tight.predicted, tight.is_settled = [START], True
    assert tight.next(two) is None, "what an earlier run found needs memory too"
    tight.has_room = True
    assert tight.has_more(two)
    assert tight.next(two, is_exchange_hidden=True) == START
    tight.tried.clear()
    assert tight.next(replace(START, micro_batches=8)) is None, "eight times as large is no one step"


def test_hidden_communication_ends_nothing_while_micro_batches_are_left() -> None:
    decision = TuneDecision(START, divided(room=False), TuneLimits(budget=1.0))
    order, step = BEGIN, 3
    while not order.is_last:
        step += order.skip + order.count
        seconds = (0.1 / order.setting.micro_batches,) * order.count
        order = decision.take(StepBlock(seconds, 0.0), step, None)
    assert decision.incumbent.micro_batches == 8, [trial.verdict for trial in decision.trials]
    assert "ranks wait for communication in only 0.0%" in decision.stopped, decision.stopped
    assert decision.overall is not None, "measured against the settings at first"
    assert len(decision.trials) == 3, "nothing of the exchange was tried"


def test_what_turns_out_to_change_results_is_withdrawn() -> None:
    decision = TuneDecision(START, divided(room=False), TuneLimits(budget=1.0))
    for i, seconds in enumerate((0.1, 0.05, 0.1, 0.05)):
        order = decision.take(StepBlock((seconds,) * 5, 0.0), 8 + 7 * i, None)
    assert decision.incumbent.micro_batches == 2, decision.trials
    order = decision.withdraw("dropout")
    assert order.is_last
    assert order.setting == decision.incumbent == START
    assert [trial.verdict for trial in decision.trials] == [ROLLED_BACK, NOT_FINISHED], decision.trials
