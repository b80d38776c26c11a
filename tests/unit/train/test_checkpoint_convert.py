"""`farandole checkpoint convert`: what `torch.load` and torch.distributed.checkpoint find."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from farandole.cli.main import run
from tests.unit.checkpoint.made import TENSORS, files_of, save_by_hand

VALUES = {name.removeprefix("model/"): torch.from_numpy(value) for name, (_, value) in TENSORS.items()}


def test_to_torch_and_to_dcp(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "saved", 7)
    assert run(["checkpoint", "convert", str(tmp_path / "saved"), str(tmp_path / "last.pt"), "--to", "torch"]) == 0
    found = torch.load(tmp_path / "last.pt", weights_only=True)
    assert found["step"] == 7
    for name, value in VALUES.items():
        assert torch.equal(found["model"][name], value), name
    assert torch.equal(found["model"]["tied"], VALUES["rows"])
    own = found["optimizer"]
    assert own["param_groups"] == [{"lr": 0.5, "params": [0, 1]}], "as `Optimizer.state_dict` numbers them"
    assert set(own["state"]) == {1}
    assert torch.equal(own["state"][1]["exp_avg"], VALUES["rows"])

    assert run(["checkpoint", "convert", str(tmp_path / "saved"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in VALUES.items()},
        "optimizer": {"state": {"rows": {"exp_avg": torch.zeros(6, 4)}}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it loads in a single process
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, value in VALUES.items():
        assert torch.equal(state["model"][name], value), name
    assert torch.equal(state["optimizer"]["state"]["rows"]["exp_avg"], VALUES["rows"])


def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "saved", 7)
    path = files_of(tmp_path / "saved", 7)[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for to in ("torch", "dcp"):
        assert run(["checkpoint", "convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", to]) == 2
        assert [each.name for each in tmp_path.iterdir()] == ["saved"]
