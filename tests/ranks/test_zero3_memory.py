"""Bytes of a sharded training on each rank, by the storages of all tensors of the process."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.core.vocabulary.spec import Plan
from tests.ranks.pool import fresh, ranks, takes
from tests.ranks.test_routes import TWO_HOSTS, pretend_two_hosts

pytestmark = pytest.mark.full("slow")

WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.layers(self.norm(x))
        return found


def storages() -> dict[int, int]:
    """Return the bytes of all memory that tensors of this process have, by address."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        kind = type(each)  # `isinstance` asks objects of other libraries, which may answer with a warning
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def bytes_of_training(plan: Plan) -> tuple[float, float]:
    """Return the bytes that a training holds between backward and step, and after clearing, over 4 a parameter.

    Memory that the ranks share to exchange is made once a world, by a training before it. Whoever counts by this
    is the first in its processes: garbage of another test may be collected, and counted, meanwhile.
    """
    train(plan, {})
    return train(plan, storages())


def train(plan: Plan, before: dict[int, int]) -> tuple[float, float]:
    model = nn.Sequential(nn.Embedding(128, WIDTH), *(Layer() for _ in range(4)), nn.Linear(WIDTH, 128))
    count = sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    fd.distribute(model, optimizer, plan)
    for i in range(3):
        model(torch.arange(8)).float().logsumexp(1).mean().backward()
        if i < 2:
            optimizer.step()
            optimizer.zero_grad()
    found = []
    for _ in range(2):
        now = storages()
        found.append(sum(size for at, size in now.items() if at not in before) / (4 * count))
        optimizer.zero_grad()
    return found[0], found[1]


@pytest.mark.full("busy")
@pytest.mark.alone
@ranks(8)
@takes(240)
@fresh
def test_stage_3_on_eight_ranks_has_an_eighth_of_parameters_gradients_and_states() -> None:
    """Rajbhandari et al. 2020, figure 1, in float32: 16 bytes a parameter over the ranks."""
    size = fd.init().size
    whole, cleared = bytes_of_training(Plan(zero=3))
    assert abs(whole / (4 / size) - 1) < 0.02, f"{whole:.4f} of parameters, expected {4 / size:.4f}"
    assert abs(cleared / (3 / size) - 1) < 0.02, f"{cleared:.4f} of parameters, expected {3 / size:.4f}"
    assert 1 - whole / 4 >= 0.85, f"{1 - whole / 4:.3f} of the memory is saved"


@ranks(4, **TWO_HOSTS)
@takes(240)
@fresh
def test_hybrid_has_a_copy_on_each_host() -> None:
    pretend_two_hosts()
    fd.init()
    whole, _ = bytes_of_training(Plan(zero=3, shard_within="host"))
    assert abs(whole / (4 / 2) - 1) < 0.02, f"{whole:.4f} of parameters, expected 2"


@ranks(2)
@fresh
def test_passes_that_are_accumulated_leave_shards() -> None:
    """The third pass is one of four; inside `fd.accumulate` gradients are whole."""
    fd.init()
    summed, _ = bytes_of_training(Plan(zero=3, accumulate=4))
    assert abs(summed / (4 / 2) - 1) < 0.02, f"{summed:.4f} of parameters, expected 2"


@ranks(2)
@fresh
def test_residuals_of_packed_gradients_are_not_sharded() -> None:
    fd.init()
    whole, _ = bytes_of_training(Plan(zero=3, codec="int8"))
    assert abs(whole / (4 / 2 + 1) - 1) < 0.05, f"{whole:.4f} of parameters, expected 3"
