"""Facts about parameters, gradients that stay for a while, and second gradients: no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from farandole.comm.engine.grad_ownership import LocalAccumulation, lie_as_parameters, zero_missing_grads
from farandole.comm.engine.guards import SingleGradientGuard
from farandole.comm.engine.parameters import (
    ReducerOptions,
    describe_parameter,
    layout_of,
    require_dense_parameters,
)
from farandole.core.vocabulary.errors import ConfigError


@pytest.mark.parametrize(
    ("parameter", "strides"),
    [
        (torch.zeros(2, 3, 4), (12, 4, 1)),
        (torch.zeros(2, 3).t(), (1, 3)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.zeros(4, 6)[:, ::2], (3, 1)),
        (torch.zeros(1).expand(5), (1,)),
        (torch.zeros(()), ()),
        (torch.zeros(3, 0), (1, 1)),
        (torch.zeros(6)[1::2][:1].view(1, 1), (2, 2)),
        (torch.zeros(8)[::2], (1,)),
    ],
    ids=lambda value: str(value.shape if isinstance(value, torch.Tensor) else value),
)
def test_gradients_lie_as_dense_parameters_do_and_else_in_order(
    parameter: torch.Tensor, strides: tuple[int, ...]
) -> None:
    assert layout_of(parameter) == (tuple(parameter.shape), strides)


def test_what_ranks_compare_of_a_parameter() -> None:
    facts = dict(describe_parameter("w", torch.nn.Parameter(torch.zeros(4, 1, 3, dtype=torch.bfloat16))))
    assert facts == {
        "parameter 'w'": [[4, 1, 3], "bfloat16"],
        "strides of parameter 'w'": [3, 1],
        "device of parameter 'w'": "cpu",
    }


def test_parameters_without_memory_are_refused() -> None:
    require_dense_parameters([("fine", torch.nn.Parameter(torch.zeros(2)))])
    with pytest.raises(ConfigError, match="parameter 'lazy' has no shape yet; run one batch"):
        require_dense_parameters([("lazy", cast("torch.nn.Parameter", torch.nn.UninitializedParameter()))])
    with pytest.raises(ConfigError, match="parameter 'meta' is on the meta device; move the model"):
        require_dense_parameters([("meta", torch.nn.Parameter(torch.zeros(2, device="meta")))])


def test_gradients_are_laid_as_their_parameters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3).t())
    parameter.grad = torch.arange(6.0).view(3, 2)
    sparse = torch.nn.Parameter(torch.zeros(2, 2))
    sparse.grad = torch.eye(2).to_sparse()
    fine = torch.nn.Parameter(torch.zeros(2))
    fine.grad = kept = torch.ones(2)
    lie_as_parameters([parameter, sparse, fine, torch.nn.Parameter(torch.zeros(1))])
    assert parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, torch.arange(6.0).view(3, 2))
    assert fine.grad is kept
    assert sparse.grad.is_sparse


# -- gradients that stay ---------------------------------------------------------------------------


def held(*values: float | None) -> tuple[LocalAccumulation, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = None if value is None else torch.full((2,), value)
    return LocalAccumulation(parameters), parameters


def values_of(parameters: list[torch.nn.Parameter]) -> list[float | None]:
    return [None if each.grad is None else float(each.grad[0]) for each in parameters]


def test_one_factor_fits_all_gradients_that_are_held() -> None:
    """Two passes of 8 and 24 samples: the first gradient counts a third of the second."""
    accumulation, parameters = held(6.0, None)
    accumulation.share_changes(1.0, 0.5)
    assert (values_of(parameters), accumulation.factor) == ([6.0, None], 1.0), "nothing is held"
    accumulation.passes, accumulation.factor = 1, 0.5
    accumulation.share_changes(0.5, 1.5)
    assert (values_of(parameters), accumulation.factor) == ([2.0, None], 1.5)


def test_the_gradient_of_a_placeholder_stays_away_from_what_is_held() -> None:
    accumulation, parameters = held(6.0, None)
    accumulation.passes = 1
    accumulation.share_changes(1.0, 0.0)
    assert [accumulation.aside is not None] == [True]
    assert values_of(parameters) == [None, None]
    accumulation.forget_cleared()
    assert accumulation.passes == 1, "they are gone only for now"
    parameters[1].grad = torch.ones(2)  # the placeholder's
    accumulation.restore()
    assert accumulation.aside is None
    assert (values_of(parameters), accumulation.factor) == ([6.0, None], 1.0)
    accumulation.share_changes(0.0, 0.0)
    accumulation.share_changes(0.0, 2.0)
    assert accumulation.aside is None, "put back by itself"
    assert (values_of(parameters), accumulation.factor) == ([3.0, None], 2.0)


def test_a_pass_that_weighed_nothing_leaves_nothing_and_counts() -> None:
    accumulation, parameters = held(6.0, 1.0)
    accumulation.passes, accumulation.factor = 1, 0.0
    accumulation.share_changes(0.0, 1.0)
    assert (values_of(parameters), accumulation.factor) == ([None, None], 1.0)
    accumulation.forget_cleared()
    assert accumulation.passes == 1, "it is not the loop that has cleared them"
    accumulation.passes = 0
    accumulation.forget_cleared()
    accumulation.passes = 1
    accumulation.forget_cleared()
    assert accumulation.passes == 0, "now it is"


def test_what_the_loop_clears_is_held_no_more() -> None:
    accumulation, parameters = held(6.0, None)
    accumulation.passes = 2
    accumulation.forget_cleared()
    assert accumulation.passes == 2
    parameters[0].grad = None
    accumulation.forget_cleared()
    assert accumulation.passes == 0


# -- second gradients ------------------------------------------------------------------------------


COUNTING = ReducerOptions(on_second_gradient=KeyError)


def test_a_second_gradient_is_refused_until_the_next_step() -> None:
    once = SingleGradientGuard(COUNTING)
    once.refuse_second(0, "a")
    once.note_exchange(bytearray(b"\1\0\0"), 1)
    once.refuse_second(1, "b")
    once.note_exchange(bytearray(b"\0\1\0"), 1)
    for index, name in enumerate("ab"):
        with pytest.raises(KeyError, match=name):
            once.refuse_second(index, name)
    once.refuse_second(2, "c")
    once.begin_step()
    once.refuse_second(0, "a")


@pytest.mark.parametrize(("options", "accumulate"), [(replace(COUNTING, reduce_op="sum"), 1), (COUNTING, 2)])
def test_where_a_second_exchange_would_count_twice_all_are_spent(options: ReducerOptions, accumulate: int) -> None:
    once = SingleGradientGuard(options)
    once.note_exchange(bytearray(b"\1\0"), accumulate)
    with pytest.raises(KeyError, match="b"):
        once.refuse_second(1, "b")


def test_a_second_gradient_that_is_fine_begins_anew() -> None:
    once = SingleGradientGuard(ReducerOptions(on_second_gradient=lambda name: None))
    once.note_exchange(bytearray(b"\1\1"), 1)
    once.refuse_second(0, "a")
    once.note_exchange(bytearray(b"\1\0"), 1)
    once.refuse_second(1, "b")


def test_missing_gradients_become_contiguous_zeros_and_others_stay() -> None:
    kept = torch.full((2,), 3.0)
    parameters = [torch.nn.Parameter(torch.ones(3, 2).t()), torch.nn.Parameter(torch.ones(2))]
    parameters[1].grad = kept
    zero_missing_grads(parameters)
    missing = parameters[0].grad
    assert missing is not None
    assert missing.is_contiguous()
    assert torch.equal(missing, torch.zeros(2, 3))
    assert parameters[1].grad is kept
