"""Which optimizer counts the steps."""

from __future__ import annotations

from farandole.comm.world.session import NEVER, Session, StepCounter, next_power_of_two


class Optimizer:
    """Weakly referable."""


def test_the_first_registered_counts() -> None:
    steps, first, second = StepCounter(), Optimizer(), Optimizer()
    begun = [steps.has_begun]
    for each in (first, second, first):
        steps.register(each)
    begun.append(steps.has_begun)
    assert begun == [False, True]
    assert [steps.count(each) for each in (second, first, second, first)] == [False, True, False, True]
    assert steps.done == 2


def test_the_next_one_leads_when_the_first_is_dropped_and_the_count_goes_on() -> None:
    steps, first, second, third = StepCounter(), Optimizer(), Optimizer(), Optimizer()
    for each in (first, second, third):
        steps.register(each)
    assert steps.count(first)
    del first, each
    assert not steps.count(third), "the second was registered before it"
    assert steps.count(second)
    assert steps.done == 2


def test_an_optimizer_that_was_not_registered_counts_nothing() -> None:
    steps = StepCounter()
    assert not steps.count(Optimizer())
    assert steps.done == 0


def test_a_step_is_recorded_before_listeners_hear_of_it_and_releases_what_was_dropped() -> None:
    session, optimizer, order = Session(), Optimizer(), list[str]()

    class Keep:
        def record(self, event: object) -> None:
            order.append(type(event).__name__)

    session.recorder = Keep()
    session.steps.register(optimizer)
    session.steps.after_step(lambda number: order.append(f"step {number}"))
    session.let_go_later(lambda: order.append("released"))
    session.step_ends(Optimizer())
    assert order == []
    session.step_ends(optimizer)
    assert order == ["StepDone", "step 1", "released"]


def test_a_listener_says_of_which_step_it_wants_to_hear_next() -> None:
    steps, optimizer = StepCounter(), Optimizer()
    heard: dict[str, list[int]] = {"each": [], "rarely": [], "once": [], "later": []}

    def rarely(step: int) -> int:
        heard["rarely"].append(step)
        return next_power_of_two(step)

    def once(step: int) -> int:
        heard["once"].append(step)
        steps.after_step(heard["later"].append)
        return NEVER

    steps.register(optimizer)
    steps.after_step(heard["each"].append)
    steps.after_step(rarely)
    steps.after_step(once)
    for _ in range(9):
        assert steps.count(optimizer)
        steps.notify()
    every = list(range(1, 10))
    assert heard == {"each": every, "rarely": [1, 2, 4, 8], "once": [1], "later": every}


def test_a_session_keeps_one_of_a_kind_until_it_closes() -> None:
    session = Session()
    kept = session.keep(list, list)
    assert session.keep(list, list) is kept
    session.close()
    assert session.keep(list, list) is not kept
