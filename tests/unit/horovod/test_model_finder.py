"""The hook on all modules that finds the model of an optimizer, and how it goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from farandole.horovod.torch.optimizer import ModelFinder


def test_the_model_is_found_when_it_is_called_and_the_hook_goes() -> None:
    model, found = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), list[Any]()
    finder: Any = ModelFinder(model.parameters(), found.append)
    nn.Linear(1, 1)(torch.ones(1, 1))
    model(torch.ones(1, 1))
    assert found == [model]
    assert finder._handle is None


def test_a_finder_that_is_stopped_goes_at_the_next_call() -> None:
    """Not at once: torch may be going through the hooks just then."""
    wanted, found = nn.Linear(1, 1), list[Any]()
    finder: Any = ModelFinder(wanted.parameters(), found.append)
    finder.stop()
    assert finder._handle is not None
    nn.Linear(1, 1)(torch.ones(1, 1))
    assert finder._handle is None
    assert not found
