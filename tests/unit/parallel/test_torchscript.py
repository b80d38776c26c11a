"""TorchScript and hooks: what cannot be compiled is refused by name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError


@pytest.fixture(autouse=True)
def _world_of_one() -> Iterator[None]:
    fd.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        yield
    fd.shutdown()


def distributed() -> nn.Module:
    model = nn.Linear(3, 2)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    return model


def test_scripting_a_distributed_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.jit\.script compiles a model's hooks.*load_state_dict"):
        torch.jit.script(distributed())


def test_a_scripted_model_is_refused() -> None:
    model = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"the model is scripted .a .*ScriptModule.*give the module"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


def test_hooks_have_names_for_others() -> None:
    model = distributed()
    for hook in (*model._forward_hooks.values(), *model._forward_pre_hooks.values()):
        assert functools.wraps(hook)(lambda: None).__name__ in ("_Before", "_After")
    traced = torch.jit.trace(model, torch.zeros(1, 3))
    assert traced(torch.zeros(5, 3)).shape == (5, 2)
