"""What all ranks load is read once a host; afterwards nothing of it is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.checkpoint.directory import step_directory
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.errors import CheckpointError
from farandole.train.checkpoint import loader, reading
from tests.ranks.pool import ranks, takes


class Keeping(nn.Module):
    """Keeps the very tensor that it is given to load."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(700))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.kept = state_dict[prefix + "kept"]


@takes(60)
@ranks(2)
def test_what_is_read_once_a_host_is_each_ranks_own_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fd.init(progress=False)
    monkeypatch.setattr(reading, "_LEAST_SHARED_BYTES", 0)
    rooms: list[reading.SharedRoom] = []
    make_room = reading.shared_room

    def noted(*arguments: Any) -> reading.SharedRoom:
        rooms.append(make_room(*arguments))
        return rooms[-1]

    monkeypatch.setattr(loader, "shared_room", noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 30).to(torch.float64), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    keeping = Keeping()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    keeping.kept += 5
    everything: Any = {"keeping": keeping}

    def tensors() -> list[torch.Tensor]:
        moments = [each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*model.state_dict().values(), *keeping.state_dict().values(), *moments]

    expected = [each.clone() for each in tensors()]
    fd.save(tmp_path, model, optimizer, step=1, **everything)
    for weight in model.parameters():
        weight.data.zero_()
    fd.load(tmp_path, model, optimizer, **everything)
    (room,) = rooms
    assert 0 < len(room.mine) < len(room.tensors), "each reads a part"
    mine = all_gather_json(here, "test/mine", sorted(room.mine))
    assert sorted(mine[0] + mine[1]) == sorted(room.tensors), "each tensor is read by one rank"
    rooms.clear()
    for one, two in zip(tensors(), expected, strict=True):
        assert torch.equal(one, two), "as it was saved"
    fd.barrier()
    for each in tensors():
        each.detach().add_(1 + here.rank)
    fd.barrier()
    for one, two in zip(tensors(), expected, strict=True):
        assert torch.equal(one, two + (1 + here.rank)), "no other rank's"
    before = [each.clone() for each in tensors()]

    if here.is_main:  # a byte that one of the two ranks reads
        path = next(step_directory(tmp_path, 1).glob("rank-00000*"))
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    fd.barrier()
    with pytest.raises(CheckpointError, match="is damaged"):
        fd.load(tmp_path, model, optimizer, **everything)
    for one, two in zip(tensors(), before, strict=True):
        assert torch.equal(one, two), "nothing was changed"
