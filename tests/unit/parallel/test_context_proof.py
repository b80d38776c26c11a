"""What the proof of divided sequences makes of outputs of other shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farandole.parallel.context import proof

GROUP: Any = SimpleNamespace(size=2, rank=0)


@pytest.mark.parametrize(
    ("whole", "here", "difference"),
    [
        ((8, 3), (4, 3), 0.0),  # two tokens of each of two samples
        ((14, 3), (7, 3), 2.0),  # rows that were routed to an expert: none of them is where the other way has it
        ((8, 3), (3, 3), 2.0),
        ((8, 3), (4, 3, 1), 2.0),
    ],
)
def test_outputs_of_other_shapes(whole: tuple[int, ...], here: tuple[int, ...], difference: float) -> None:
    assert proof._difference_of(GROUP, torch.ones(whole), torch.ones(here)) == difference
