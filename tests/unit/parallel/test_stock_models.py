"""Models that torch itself distributes: which are recorded unasked, and that none is refused for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from farandole.core.vocabulary.errors import ConfigError
from farandole.integrations.unasked import _is_on_all
from farandole.parallel.instrument import phase_hooks
from farandole.parallel.instrument.training_facts import _codable_share


@pytest.mark.parametrize(
    ("sizes", "placements", "is_recorded"),
    [
        ((4,), (Shard(0),), True),
        ((2, 2), (Replicate(), Shard(0)), True),
        ((2, 2), (Shard(0), Shard(1)), False),
        ((1, 2, 2), (Replicate(), Shard(0), Shard(1)), False),
        ((2,), (Shard(0),), False),
    ],
    ids=["fsdp", "hsdp", "fsdp and tensor", "hsdp and tensor", "some of the ranks"],
)
def test_models_whose_ranks_all_have_samples_of_their_own_are_recorded(
    sizes: tuple[int, ...], placements: tuple[Any, ...], is_recorded: bool
) -> None:
    mesh = SimpleNamespace(size=lambda: torch.Size(sizes).numel(), ndim=len(sizes))
    shard = SimpleNamespace(device_mesh=mesh, placements=placements)
    model: Any = SimpleNamespace(parameters=lambda: [shard, shard])
    assert _is_on_all(model, 4) is is_recorded


def test_compiled_autograd_is_refused_for_our_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_hooks, "_compiled_autograd_is_on", lambda: True)
    monkeypatch.setattr(phase_hooks, "has_world", lambda: True)
    monkeypatch.setattr(phase_hooks, "world", lambda: SimpleNamespace(size=2))
    ours, stock = phase_hooks.ModelWatch(exchanges=False), phase_hooks.ModelWatch(exchanges=False)
    stock.refuses_compiled_autograd = False
    for watch in (ours, stock):
        watch._depth = 1  # inside of a pass: nothing more is recorded
    stock.forward_begins(nn.Linear(2, 2), (), {})
    with pytest.raises(ConfigError, match="compiled autograd"):
        ours.forward_begins(nn.Linear(2, 2), (), {})


def test_what_a_codec_takes_is_not_known_of_flat_parameters() -> None:
    matrix, bias, frozen = (nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (4096,), (128, 128)))
    frozen.requires_grad_(False)
    assert _codable_share([matrix, bias, frozen]) == 0.5
    assert _codable_share([bias]) == 0.0
    flat: Any = nn.Parameter(torch.ones(4096))
    flat._fsdp_flattened = True
    assert _codable_share([matrix, flat]) is None
