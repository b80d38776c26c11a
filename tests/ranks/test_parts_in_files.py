"""What one rank has of a divided model is not written as if it were the whole."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from tests.ranks.pool import ranks

PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "zero": {"zero": 3},
    "whole": {"zero": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(self.up(x).relu())
        return found


class Whole(nn.Sequential):
    """Writes itself as models of transformers do."""

    def save_pretrained(self, folder: Path, *, state_dict: Any = None) -> None:
        numbers = {name: each.numpy() for name, each in (state_dict or self.state_dict()).items()}
        folder.write_text(str(numbers))


def trained(plan: dict[str, Any]) -> Whole:
    fd.init()
    torch.manual_seed(0)
    model = Whole(*(Block() for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    fd.distribute(model, optimizer, fd.Plan(**plan))
    fd.step(model, nn.functional.mse_loss, torch.randn(4, 8), torch.randn(4, 8))
    optimizer.step()
    return model


@pytest.mark.gate_cases("zero", "tensor")
@pytest.mark.parametrize("name", PLANS)
@ranks(2)
def test_a_part_is_read_copied_and_loaded_and_never_pickled(name: str, tmp_path: Path) -> None:
    model = trained(PLANS[name])
    state = model.state_dict()
    by_name = {f"module.{key}": value.cpu() for key, value in state.items()}
    one_block = model[model_part()].state_dict()
    for each in (state, {"model": state, "step": 3}, copy.deepcopy(state), by_name, one_block):
        for write in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            if name == "whole":
                write(each)
                continue
            with pytest.raises(fd.ConfigError, match=r"one rank's part of a model.*\(plan: \w+ = \d\)"):
                write(each)
    file = Path(tmp_path) / f"weights of {fd.world().rank}"
    if name == "whole":
        model.save_pretrained(file)
    else:
        with pytest.raises(fd.ConfigError, match="one rank's part"):
            model.save_pretrained(file)
        with pytest.raises(fd.ConfigError, match="one rank's part"):
            model.save_pretrained(file, state_dict=state)
        model.save_pretrained(file, state_dict={"whole": torch.ones(2)})
    assert file.exists()
    before = {key: value.clone() for key, value in state.items()}
    model.load_state_dict(copy.deepcopy(state))
    for key, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, before[key]), key
    with torch.no_grad():
        copied = copy.deepcopy(model) if name == "tensor" else None
    if copied is not None:
        with pytest.raises(fd.ConfigError, match="one rank's part"):
            pickle.dumps(copied.state_dict())
    fd.save(tmp_path, model)


def model_part() -> int:
    """Return a block of which this rank has no more than a part: of a pipeline, one of another stage."""
    return 3 if fd.world().rank == 0 else 0
