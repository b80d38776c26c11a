"""`farandole checkpoint`: what it prints, writes, removes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from farandole.checkpoint.directory import DirectoryLock
from farandole.cli.main import run
from tests.unit.checkpoint.made import TENSORS, files_of, save_by_hand


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (100, 200, 300):
        save_by_hand(tmp_path / "saved", step)
    save_by_hand(tmp_path / "saved", 400, is_whole=False)
    return tmp_path / "saved"


def test_the_list_fits_on_a_screen_and_says_what_is_no_checkpoint(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files_of(directory, 200)[1].unlink()
    assert run(["checkpoint", "list", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "state", "size", "ranks", "tensors", "written"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["100", "complete"], ["200", "damaged"], ["300", "complete"], ["400", "unfinished"],
    ]  # fmt: skip
    assert lines[5].startswith("step 200: cannot read")
    assert all(len(line) <= 100 for line in lines[:5])


def test_verify_names_the_damage_and_the_last_whole_one(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "verify", str(directory)]) == 0
    path = files_of(directory, 300)[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert run(["checkpoint", "list", str(directory)]) == 0, "sizes are as they were"
    capsys.readouterr()
    assert run(["checkpoint", "verify", str(directory)]) == 1
    said = capsys.readouterr().out
    assert "step 300:" in said
    assert "'model/number'" in said
    assert "2 whole, 1 damaged; the last whole one is step 200" in said
    assert run(["checkpoint", "verify", str(directory), "--step", "200"]) == 0
    capsys.readouterr()
    assert run(["checkpoint", "verify", str(directory), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["last_good"] == 200


def test_export_writes_the_models_own_names(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "export", str(directory), str(tmp_path / "one.safetensors")]) == 0
    said = capsys.readouterr()
    assert "_extra_state is no tensor" in said.err
    assert "step 300: 4 tensors" in said.out
    found = load_file(tmp_path / "one.safetensors")
    for name, value in {"tied": TENSORS["model/rows"][1], **_by_own_names()}.items():
        assert found[name].dtype == value.dtype, name
        assert np.array_equal(found[name], value), name
    assert len(found) == 4


def test_export_in_several_files_with_an_index(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights"
    assert (
        run(["checkpoint", "export", str(directory), str(out), "--max-shard-size", "150B", "--step", "100"]) == 0
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert names == sorted(set(index["weight_map"].values())) == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]  # fmt: skip
    assert index["metadata"]["total_size"] == 96 + 96 + 96 + 4
    for name, value in _by_own_names().items():
        assert np.array_equal(load_file(out / index["weight_map"][name])[name], value), name
    assert sorted(path.name for path in out.iterdir()) == [*names, "model.safetensors.index.json"]


def test_export_of_damaged_weights_writes_nothing(directory: Path, tmp_path: Path) -> None:
    path = files_of(directory, 300)[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert run(["checkpoint", "export", str(directory), str(tmp_path / "out")]) == 2
    assert not list((tmp_path / "out").iterdir())


def test_prune_keeps_what_it_was_told_to(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "prune", str(directory), "--keep", "1", "--keep-every", "200"]
    assert run([*words, "--dry-run"]) == 0
    assert "would be removed: step 100" in capsys.readouterr().out
    assert len(list(directory.glob("step-*"))) == 4
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
            "removed": [100], "unfinished": [400], "kept": [200, 300], "stays": {},
        }  # fmt: skip
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-00000200", "step-00000300"]
    assert run(["checkpoint", "verify", str(directory)]) == 0


@pytest.mark.full("further")
def test_prune_leaves_a_directory_alone_that_a_job_writes_to(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = DirectoryLock(directory, "host7", "n")
    try:
        assert run(["checkpoint", "prune", str(directory), "--keep", "1"]) == 2
    finally:
        lock.release()
    assert "written by another job: process" in capsys.readouterr().err
    assert len(list(directory.glob("step-*"))) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "{dir}/none"], "does not exist, expected a directory of checkpoints"),
        (["list", "{dir}/.."], ""),
        (["list", "{dir}/step-00000100"], "is the directory of one checkpoint; name the one that holds it"),
        (["verify", "{dir}", "--step", "7"], "no checkpoint of step 7; there are: 100, 200, 300"),
        (["verify", "{dir}", "--step", "seven"], "'seven': expected a whole number"),
        (["export", "{dir}", "{out}", "--step", "400"], "no checkpoint of step 400"),
        (["export", "{dir}", "{out}", "--module", "ema"], "has no module 'ema'; it has: model"),
        (["export", "{dir}", "{out}", "--max-shard-size", "many"], "many"),
        (["export", "{dir}", "{dir}/.lock/x"], ""),
        (["prune", "{dir}", "--keep", "0"], "'0': expected a whole number of at least 1"),
        (["prune", "{dir}"], "--keep"),
        (["convert", "{dir}", "{out}"], "--to"),
        (["convert", "{dir}", "{dir}", "--to", "torch"], "is there already"),
        (["lst", "{dir}"], "invalid choice: 'lst'; did you mean 'list'?"),
        ([], "ACTION"),
    ],
)
def test_bad_input(
    directory: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"dir": str(directory), "out": str(tmp_path / "out")}
    (directory / ".lock").touch()
    code = run(["checkpoint", *(word.format(**places) for word in words)])
    problem = capsys.readouterr().err
    if words[:1] == ["list"] and not said:
        assert code == 0, "a directory without checkpoints is an empty list"
        return
    assert code == 2, problem
    assert said in problem
    assert "Traceback" not in problem
    assert not (tmp_path / "out").exists()


def _by_own_names() -> dict[str, np.ndarray]:
    return {name.removeprefix("model/"): value for name, (_, value) in TENSORS.items()}
