"""`farandole checkpoint convert --from`: weights of other formats become a checkpoint, or are refused by name."""

from __future__ import annotations

import json
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import farandole as fd
from farandole.checkpoint.directory import saved_steps
from farandole.checkpoint.listing import verify_checkpoint
from farandole.cli.main import run
from farandole.train.checkpoint import optimizers as division


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "PIECE_BYTES", 1000)  # so that `large` is cut


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3, bias=False)
        self.last_again = self.last
        self.bits16 = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.large = nn.Parameter(torch.randn(40, 25))
        self.register_buffer("turned", torch.randn(4, 6).t())
        self.register_buffer("none", torch.zeros(0, 3))

    def get_extra_state(self) -> Any:
        return {"rounds": 4}

    def set_extra_state(self, state: Any) -> None:
        self.rounds = state["rounds"]


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=path, no_dist=True)


def require_loaded(directory: Path, model: nn.Module, step: int) -> None:
    verify_checkpoint(directory, step)
    again: Any = Model(9)
    fd.init(progress=False)
    try:
        assert fd.load(directory, again) == step, "the only checkpoint there"
    finally:
        fd.shutdown()
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(again.state_dict()[name], value), name


def convert(source: Path, directory: Path, from_: str, *more: str) -> int:
    return run(["checkpoint", "convert", str(source), str(directory), "--from", from_, *more])


@pytest.mark.parametrize("entry", [None, "model", "state_dict", "model_state_dict"])
def test_a_file_of_torch(tmp_path: Path, entry: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(1)
    state: dict[str, Any] = dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1).state_dict()
    torch.save(
        state if entry is None else {entry: state, "optimizer": optimizer, "step": 70}, tmp_path / "last.pt"
    )
    assert convert(tmp_path / "last.pt", tmp_path / "made", "torch") == 0
    require_loaded(tmp_path / "made", model, 0 if entry is None else 70)
    said = capsys.readouterr()
    assert ("left out, as only weights are converted: optimizer" in said.err) == (entry is not None)
    assert verify_checkpoint(tmp_path / "made", saved_steps(tmp_path / "made")[0]).shared["modules"]["model"][
        "last_again.weight"
    ] == {"$tensor": "model/last.weight"}, "tied parameters are one tensor"


def test_a_wrapped_model_and_another_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(1)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"teacher": wrapped, "student": {}}, tmp_path / "both.pt")
    assert convert(tmp_path / "both.pt", tmp_path / "made", "torch") == 2
    said = capsys.readouterr().err
    assert "which state_dict is not clear; those in it: teacher" in said
    assert "--module" in said
    assert convert(tmp_path / "both.pt", tmp_path / "made", "torch", "--module", "student") == 2
    assert "no state_dict under 'student'" in capsys.readouterr().err
    assert not (tmp_path / "made").exists(), "nothing is made for a source that is refused"
    assert convert(tmp_path / "both.pt", tmp_path / "made", "torch", "--module", "teacher", "--step", "3") == 0
    assert '"module."' in capsys.readouterr().err
    require_loaded(tmp_path / "made", model, 3)


def test_a_directory_of_dcp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(1)
    moments = {"state": {"bits16": {"exp_avg": torch.zeros(7)}}, "param_groups": [{"lr": 0.5}]}
    save_dcp({"model": model.state_dict(), "optimizer": moments, "step": 12}, tmp_path / "dcp")
    assert convert(tmp_path / "dcp", tmp_path / "made", "dcp", "--json") == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["step"], report["left_out"]) == (12, ["optimizer"])
    require_loaded(tmp_path / "made", model, 12)
    save_dcp({"app": {"model": model.state_dict(), "optimizer": moments}}, tmp_path / "app")
    assert convert(tmp_path / "app", tmp_path / "made-app", "dcp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["app.optimizer"]
    require_loaded(tmp_path / "made-app", model, 0)
    save_dcp(model.state_dict(), tmp_path / "flat")
    assert convert(tmp_path / "flat", tmp_path / "made-flat", "dcp") == 0
    require_loaded(tmp_path / "made-flat", model, 0)


def test_there_and_back(tmp_path: Path) -> None:
    model = Model(1)
    torch.save(model.state_dict(), tmp_path / "last.pt")
    assert convert(tmp_path / "last.pt", tmp_path / "made", "torch", "--step", "5") == 0
    for format_ in ("torch", "dcp"):
        out, made = tmp_path / f"as-{format_}", tmp_path / f"from-{format_}"
        assert run(["checkpoint", "convert", str(tmp_path / "made"), str(out), "--to", format_]) == 0
        assert convert(out, made, format_) == 0
        require_loaded(made, model, 5)


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.contiguous().clone() for name, value in state.items()}


class Plain(Model):
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def test_safetensors_file_directory_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Model", Plain)
    model = Plain(1)
    state = plain(model)
    (tmp_path / "one").mkdir()
    save_file(state, tmp_path / "one" / "model.safetensors")
    assert convert(tmp_path / "one" / "model.safetensors", tmp_path / "made", "safetensors") == 0
    assert convert(tmp_path / "one", tmp_path / "made", "safetensors", "--step", "2") == 0
    assert saved_steps(tmp_path / "made") == [0, 2]
    require_loaded(tmp_path / "made", model, 2)
    export = ["checkpoint", "export", str(tmp_path / "made"), str(tmp_path / "several")]
    assert run([*export, "--max-shard-size", "100B"]) == 0
    for number, source in enumerate((tmp_path / "several", tmp_path / "several" / "model.safetensors.index.json")):
        assert convert(source, tmp_path / f"back{number}", "safetensors") == 0
        require_loaded(tmp_path / f"back{number}", model, 0)


class Runs:
    """What a hostile file would run."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


def pickled(path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "config": Runs()}, path)


def hostile_metadata(path: Path) -> None:
    save_dcp({"w": torch.zeros(2)}, path)
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))


def header(path: Path, text: bytes, content: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def entry(dtype: str, shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


def another_pickle(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps({}))


def without_shard(path: Path) -> None:
    save_dcp({"w": torch.zeros(2)}, path)
    next(path.glob("*.distcp")).unlink()


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a file that is missing": ("torch", lambda path: None, "No such file or directory"),
    "a file that needs pickle": ("torch", pickled, "needs pickle: it names posix.mkdir"),
    "a file of text": ("torch", lambda path: path.write_text("weights"), "expected a file of torch.save"),
    "an empty file": ("torch", lambda path: path.touch(), "expected a file of torch.save"),
    "a tensor": ("torch", lambda path: torch.save(torch.zeros(2), path), "holds a Tensor, expected a state_dict"),
    "no tensors": ("torch", lambda path: torch.save({"a": 1}, path), "those in it: none"),
    "numbers as names": ("torch", lambda path: torch.save({1: torch.zeros(2)}, path), "expected names of param"),
    "a sparse tensor": (
        "torch", lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path), "model/w is a Tensor of type",
    ),
    "no directory": ("dcp", lambda path: path.mkdir(), "with a file .metadata"),
    "a directory of DCP that runs code": ("dcp", hostile_metadata, "needs pickle: it names posix.mkdir"),
    "a directory of DCP without a file": ("dcp", without_shard, "expected a directory of torch.distributed"),
    "another pickle": ("dcp", another_pickle, "holds a dict"),
    "an empty directory": ("safetensors", lambda path: path.mkdir(), "expected model.safetensors or"),
    "a short file": ("safetensors", lambda path: path.write_bytes(b"123"), "with the length of its header"),
    "no JSON": ("safetensors", lambda path: header(path, b"{"), "cannot be read as safetensors"),
    "another type": ("safetensors", lambda path: header(path, entry("F4", [2], [0, 1]), b"1"), "of type 'F4'"),
    "another size": ("safetensors", lambda path: header(path, entry("F32", [2], [0, 4]), b"1234"), "expected 8"),
    "a gap": ("safetensors", lambda path: header(path, entry("U8", [2], [2, 4]), b"1234"), "leave a gap"),
    "a truncated file": ("safetensors", lambda path: header(path, entry("U8", [4], [0, 4]), b"12"), "expected "),
    "a negative length": (
        "safetensors", lambda path: header(path, entry("U8", [-2], [0, -2]), b""), "no whole numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_sources_end_with_what_was_expected(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    from_, make, expected = BAD[what]
    make(tmp_path / "source")
    assert convert(tmp_path / "source", tmp_path / "made", from_) == 2, what
    said = capsys.readouterr().err
    assert expected in said, said
    assert "Traceback" not in said, said
    assert not (tmp_path / "ran").exists(), "code from a file ran"
    assert not saved_steps(tmp_path / "made"), "nothing was made"


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for places, expected in (
        ({"w": "../a.safetensors"}, "no name of a file beside it"),
        ({"v": "a.safetensors"}, "places v in a.safetensors, which does not have it"),
        ({}, "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        assert convert(index, tmp_path / "made", "safetensors") == 2, places
        assert expected in capsys.readouterr().err, places
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert convert(tmp_path / "model.safetensors.index.json", tmp_path / "made", "safetensors") == 0


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "one.pt")
    assert convert(tmp_path / "one.pt", tmp_path / "made", "torch") == 0
    before = verify_checkpoint(tmp_path / "made", 0)
    assert convert(tmp_path / "one.pt", tmp_path / "made", "torch") == 2
    assert "has a checkpoint of step 0 already" in capsys.readouterr().err
    assert verify_checkpoint(tmp_path / "made", 0) == before, "the checkpoint is as it was"
    (tmp_path / "file").write_text("")
    assert convert(tmp_path / "one.pt", tmp_path / "file", "torch") == 2
    assert "cannot write checkpoints to" in capsys.readouterr().err
    assert run(["checkpoint", "convert", "a", "b"]) == 2
    assert "--to" in capsys.readouterr().err
    assert run(["checkpoint", "convert", "a", "b", "--to", "torch", "--module", "m"]) == 2
    assert "it is for --from" in capsys.readouterr().err
