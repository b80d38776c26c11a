"""`load_state_dict` of a divided model: a state of the whole is refused, one of this rank's parts is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.spec import Plan
from tests.ranks.pool import ranks


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


@ranks(2)
def test_a_state_of_the_whole_is_refused_on_every_rank_and_parts_are_loaded() -> None:
    fd.init()
    plans: list[dict[str, Any]] = [
        {"pipeline": 2, "micro_batches": 2},
        {"tensor": 2, "tensor_recipe": {"0": "columns", "2": "rows"}},
        {"zero": 3},
    ]
    for keys in plans:
        whole, mine = model(), model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        fd.distribute(mine, optimizer, Plan.from_mapping(keys, where="test"))
        fd.step(mine, nn.functional.mse_loss, torch.ones(4, 6), torch.ones(4, 3))
        optimizer.step()
        key, value = next(iter(keys.items()))
        for strict, assign in ((True, False), (False, False), (True, True)):
            with pytest.raises(fd.ConfigError, match=rf"the whole of '\d.weight'.*{key} = {value}") as refused:
                mine.load_state_dict(whole.state_dict(), strict=strict, assign=assign)
            assert "fd.load(DIRECTORY, model)" in str(refused.value), keys
        parts = {name: each.clone() for name, each in mine.state_dict().items()}
        optimizer.zero_grad(), fd.step(mine, nn.functional.mse_loss, torch.ones(4, 6), torch.ones(4, 3))
        optimizer.step()
        mine.load_state_dict(parts)
        for name, each in mine.state_dict().items():
            assert torch.equal(_local(each), _local(parts[name])), (keys, name)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
