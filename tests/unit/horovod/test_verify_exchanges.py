"""Gradients that are not finite, as ``farandole verify`` compares them."""

from __future__ import annotations

import math

import pytest
import torch

from farandole.horovod.verify.exchanges import leave_out_infinite


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_where_a_gradient_is_not_finite_the_mean_is_not(odd: float) -> None:
    expected = torch.tensor([1.0, odd, 3.0], dtype=torch.float64)
    result = torch.tensor([1.0, math.nan, 4.0], dtype=torch.float64)
    assert not leave_out_infinite(result, expected)
    assert (result.tolist(), expected.tolist()) == ([1.0, 0.0, 4.0], [1.0, 0.0, 3.0])
    assert leave_out_infinite(torch.zeros(1), torch.tensor([odd]))


def test_a_mean_that_alone_is_not_finite_is_compared() -> None:
    result = torch.tensor([math.inf])
    assert not leave_out_infinite(result, torch.ones(1))
    assert result.tolist() == [math.inf]
