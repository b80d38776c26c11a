"""Hooks around the step of a class whose step calls that of its base class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.parallel.optim.step_hooks import is_nested_step


class Outer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def seen(optimizer: torch.optim.Optimizer) -> list[bool]:
    answers: list[bool] = []

    def hook(stepped: torch.optim.Optimizer, *_: Any) -> None:
        answers.append(is_nested_step(stepped))

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    optimizer.step()
    return answers


def test_only_the_inner_step_is_nested() -> None:
    torch.optim.SGD([torch.zeros(1)], 0.1)  # from now on torch runs the hooks around its step
    assert seen(Outer([torch.zeros(1)], 0.1)) == [False, True, True, False]


def test_a_step_of_another_optimizer_within_is_none() -> None:
    inner = torch.optim.SGD([torch.zeros(1)], 0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    optimizer.register_step_pre_hook(lambda *_: seen_within.extend(seen(inner)))
    seen_within: list[bool] = []
    assert seen(optimizer) == [False, False]
    assert seen_within == [False, False]


def test_a_step_that_raised_is_over() -> None:
    class Breaks(Outer):
        broken = True

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise ValueError("broken")
            return super().step(closure)

    optimizer = Breaks([torch.zeros(1)], 0.1)
    with pytest.raises(ValueError, match="broken"):
        optimizer.step()
    optimizer.broken = False
    answers = seen(optimizer)
    assert (answers[0], answers[-1]) == (False, False)
    assert sum(not answer for answer in answers) == 2


def test_outside_of_a_step_nothing_is_nested() -> None:
    assert not is_nested_step(torch.optim.SGD([torch.zeros(1)], 0.1))
