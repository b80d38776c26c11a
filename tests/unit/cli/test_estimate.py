"""``farandole estimate``: the page, the JSON, and errors that name the user's file and line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.main import run
from farandole.core.host.process_status import resident_bytes
from farandole.plan.memory import PRECISIONS, RECOMPUTE, STAGES
from farandole.plan.memory_page import CATEGORIES, ProcessMemory
from farandole.train.analysis import analyse as analysis

MODEL = """\
import torch
from torch import nn

print("a line of the user's")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    def forward(self, x):
        return x + self.layers(x)

def make_model():
    return nn.Sequential(*(Block() for _ in range(4)))

def make_batch():
    return torch.zeros(32, 64)

def loss(outputs, batch):
    return outputs.square().mean()

def wrong_type():
    return 3

def raises():
    return [1][4]

def ends():
    raise SystemExit(3)

def lazy():
    return nn.LazyLinear(3)

def loss_alone(batch):
    return batch.sum()

def tokens():
    return nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 4))

def no_gradient():
    return nn.Flatten()

number = 7

def of_samples(samples):
    return torch.zeros(samples, 64)
"""


PROCESS = ProcessMemory(331_000_000, 335_000_000)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(analysis, "process_before_model", lambda: PROCESS)
    (tmp_path / "training_of_test.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("training_of_test", "broken_of_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["estimate", *words, "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.usefixtures("here")
def test_json_has_every_combination(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "training_of_test:make_model", "--batch", "training_of_test:make_batch")
    assert result["parameters"] == 4 * (2 * 64 * 256 + 256 + 64)
    assert result["blocks"] == 4
    found = {(row["stage"], row["precision"], row["recompute"], row["ranks"]) for row in result["rows"]}
    assert found == {
        (stage, precision, recompute, 2**i)
        for stage in STAGES
        for precision in PRECISIONS
        for recompute in RECOMPUTE
        for i in range(11)
    }
    for row in result["rows"]:
        parts = [row[f"{name}_bytes"] for name in CATEGORIES]
        assert row["total_bytes"] == row["process_bytes"] + sum(parts), row
        assert row["process_bytes"] == PROCESS.resident_bytes
        assert row["activations_bytes"] > 0, row


@pytest.mark.usefixtures("here")
def test_a_gpu_need_not_be_here(capsys: pytest.CaptureFixture[str]) -> None:
    """What a step of the optimizer takes is of all tensors at once there."""
    words = ("training_of_test:make_model", "--batch", "training_of_test:of_samples", "--stage", "0")
    found = {device: answer(capsys, *words, "--device", device) for device in ("cpu", "cuda")}
    temporary = {name: each["rows"][0]["temporary_bytes"] for name, each in found.items()}
    assert temporary["cuda"] > temporary["cpu"]
    for each in found.values():
        assert "--batch takes the number of samples: these are bytes for 2 of them" in each["notes"]


def test_settings_in_which_a_pass_fails_are_in_no_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "wide_of_test.py").write_text("""
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        if self.layer(x).dtype != torch.float32:
            raise TypeError("float32 alone")
        return self.layer(x)

def make_model():
    return Wide()
""")
    words = ("wide_of_test:make_model", "--input", "4,8")
    found = answer(capsys, *words)
    assert {row["precision"] for row in found["rows"]} == {"fp32"}
    assert any(each.startswith("bf16 is left out, as") and "float32 alone" in each for each in found["notes"])
    assert run(["estimate", *words, "--precision", "bf16"]) == 2
    assert "bf16 is left out, as the forward pass raised TypeError: float32 alone" in capsys.readouterr().err


FROZEN = """
import torch
from torch import nn
import farandole as fd

def make_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)) for _ in range(4)))

def make_frozen():
    return make_model().requires_grad_(False).append(nn.Linear(512, 8))
"""


def test_what_makes_a_model_lighter_is_counted_as_it_is_stored(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "lab_of_test.py").write_text(FROZEN)
    words = ["lab_of_test.py:make_model", "--input", "1,512", "--np", "2", "--ranks", "2"]
    result = answer(capsys, *words)
    lighter = {
        name: {(row["stage"], row["precision"]): row for row in rows} for name, rows in result["lighter"].items()
    }
    assert list(lighter) == ["offload", "adapters", "adapters, int8", "adapters, int4"]
    plain = {
        (row["stage"], row["precision"], row["recompute"]): row for row in result["rows"] if row["ranks"] == 2
    }
    weights, biases, adapters = 8 * 512 * 512, 8 * 512, 8 * 2 * 8 * 512
    alone = lighter["adapters"]["0", "fp32"]
    assert alone["weights_bytes"] == 4 * (weights + biases + adapters)
    assert alone["gradients_bytes"] == 4 * adapters
    assert 8 * adapters <= alone["optimizer_bytes"] <= 8 * adapters + 16 * 8, "Adam's two states, and counts"
    for codec, block_bytes, elements in (("int8", 64 + 4, 64), ("int4", 16 + 2, 32)):
        row = lighter[f"adapters, {codec}"]["0", "fp32"]
        assert row["weights_bytes"] == weights // elements * block_bytes + 4 * (biases + adapters)
        assert row["temporary_bytes"] >= 4 * 512 * 512, "a weight that is decoded"
    on_disk, states = lighter["offload"]["0", "fp32"], plain["0", "fp32", "none"]
    assert states["optimizer_bytes"] > 16e6
    assert on_disk["optimizer_bytes"] == min(2 * 2**24, states["optimizer_bytes"])
    assert on_disk["weights_bytes"] == states["weights_bytes"]
    result = answer(capsys, words[0].replace("make_model", "make_frozen"), *words[1:])
    assert list(result["lighter"]) == ["offload", "int8", "int4"], "it is frozen already"


@pytest.mark.full("slow")
def test_states_on_a_disk_are_two_chunks_and_the_command_has_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "lab_of_test.py").write_text(FROZEN.replace("512", "1280"))
    words = ["lab_of_test.py:make_model", "--input", "1,1280", "--np", "1", "--ranks", "1", "--precision", "fp32"]
    (row,) = [
        row
        for row in answer(capsys, *words)["lighter"]["offload"]
        if row["stage"] == "0" and row["recompute"] == "none"
    ]
    assert row["optimizer_bytes"] == 2 * 2**24, "of 105 MB"
    result = answer(capsys, *words, "--memory", f"{row['total_bytes'] + 1_000_000}")
    assert "it would fit with offload, at ZeRO stage" in "\n".join(result["advice"])
    assert result["command"].startswith("farandole run -np 1 ")
    assert "--set offload=disk" in result["command"]
    assert run(["estimate", *words, "--memory", "350MB"]) == 0
    assert (
        "does not fit into 350 MB: each rank makes the whole model first, and has 383 MB then"
        in capsys.readouterr().out
    )
    assert run(["estimate", *words]) == 0
    page = capsys.readouterr().out
    assert "note: each rank makes the whole model before it is divided or stored: 383 MB" in page
    assert "offload: --set offload=disk" in page


@pytest.mark.gate_cases("nadam")
@pytest.mark.parametrize("optimizer", ["sgd", "nadam"])
def test_an_optimizer_whose_states_cannot_be_on_a_disk(
    optimizer: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "lab_of_test.py").write_text(FROZEN)
    words = ["lab_of_test.py:make_model", "--input", "1,512", "--optimizer", optimizer]
    assert "offload" not in answer(capsys, *words)["lighter"]


def test_what_makes_a_model_lighter_goes_with_its_precision(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "lab_of_test.py").write_text(FROZEN)
    words = ["lab_of_test.py:make_model", "--input", "1,512", "--np", "2", "--ranks", "2"]
    for rows in answer(capsys, *words)["lighter"].values():
        assert {row["precision"] for row in rows} == {"fp32", "bf16"}, "a plan refuses bf16_parameters with them"
    assert not any(answer(capsys, *words, "--precision", "bf16-weights")["lighter"].values())
    assert run(["estimate", *words, "--precision", "bf16-weights", "--memory", "332MB"]) == 0
    assert "made lighter" not in capsys.readouterr().out


def test_a_model_that_cannot_be_made_lighter_is_still_estimated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "lab_of_test.py").write_text("""
import torch
from torch import nn

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.named = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        return nn.functional.linear(self.named(input=x), self.layer.weight / self.layer.weight.norm())

def make_model():
    return Normed()

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        return nn.functional.linear(x, self.layer.weight / 2)

def make_own():
    return Own()
""")
    result = answer(capsys, "lab_of_test.py:make_model", "--input", "2,64", "--np", "1", "--ranks", "1")
    assert "adapters" in result["lighter"], "an input that is given by name is one"
    result = answer(capsys, "lab_of_test.py:make_own", "--input", "2,64", "--np", "1", "--ranks", "1")
    assert list(result["lighter"]) == ["offload"]
    assert any(note.startswith("adapters: not known, as ") for note in result["notes"])


@pytest.mark.usefixtures("here")
def test_shapes_say_what_the_batch_function_says(capsys: pytest.CaptureFixture[str]) -> None:
    with_function = answer(capsys, "training_of_test.py:make_model", "--batch", "training_of_test.py:make_batch")
    with_shape = answer(capsys, "training_of_test.py:make_model", "--input", "32,64:float32")
    assert with_function["rows"] == with_shape["rows"]


@pytest.mark.usefixtures("here")
def test_the_page_is_at_most_100_columns_wide(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["training_of_test:make_model", "--input", "4096,64", "--loss", "training_of_test:loss"]
    assert run(["estimate", *words, "--memory", "333MB"]) == 0
    page = capsys.readouterr().out
    assert max(len(line) for line in page.split("does not fit")[0].splitlines()) <= 100, page
    assert page.count("\nhybrid ") == 10, "6 rows of the table by category, and one of each table of totals"
    assert "does not fit into 333 MB on 8 ranks" in page
    assert "too much" in page
    assert "it would fit with" in page


@pytest.mark.usefixtures("here")
def test_a_limit_marks_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "training_of_test:make_model", "--input", "32,64", "--memory", "332MB")
    fits = [row for row in result["rows"] if row["ranks"] == 8 and row["fits"]]
    assert 0 < len(fits) < 30, "some do"
    assert all(row["fits"] == (row["total_bytes"] <= 332_000_000) for row in result["rows"])
    assert result["advice"] == [], "nothing to say where something fits"


@pytest.mark.full("slow")
@pytest.mark.usefixtures("here")
def test_the_page_counts_the_process_and_ends_with_the_command_of_what_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["training_of_test.py:make_model", "--input", "4096,64", "--np", "4"]
    rows = {
        (row["stage"], row["precision"], row["recompute"]): row
        for row in answer(capsys, *words, "--ranks", "4")["rows"]
    }
    words += ["--memory"]
    ends = {
        "9GB": "-np 4 --",
        str(rows["3", "fp32", "blocks"]["total_bytes"]): "-np 4 --set zero=3 --set recompute=blocks --",
        str(rows["3", "bf16-weights", "blocks"]["total_bytes"]): "-np 4 --set zero=3 --set precision=bf16 "
        "--set bf16_parameters=true --set recompute=blocks --",
    }
    for limit, command in ends.items():
        assert run(["estimate", *words, limit]) == 0
        page = capsys.readouterr().out
        assert "total counts the 331 MB of a process before its model" in page
        assert "for RLIMIT_DATA they are 335 MB" in page
        assert page.splitlines()[-3:] == [
            "The first row that fits:", "", f"  farandole run {command} python training_of_test.py"
        ], page  # fmt: skip
    assert run(["estimate", *words, "100MB"]) == 0, "less than the process has"
    page = capsys.readouterr().out
    assert "does not fit into 100 MB: each rank makes the whole model first, and has 332 MB then" in page
    assert "it would fit" not in page


def test_the_process_is_what_is_resident_with_the_modules_of_a_rank() -> None:
    found = analysis.process_before_model()
    assert found.resident_bytes == pytest.approx(resident_bytes(), rel=0.2)
    assert found.data_bytes > 50_000_000, f"torch alone is more: {found}"
    assert {"farandole.train.distribute", "farandole.train.session"} <= set(sys.modules), "of distribute and init"


@pytest.mark.usefixtures("here")
def test_without_a_batch_activations_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "training_of_test:make_model", "--np", "2", "--stage", "3,1"]) == 0
    page = capsys.readouterr().out
    assert "note: activations are unknown: give the batch of a rank with --input or --batch" in page
    assert [line.split()[0] for line in page.splitlines() if line[:2] in ("1 ", "3 ")][:2] == ["1", "3"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["training_of_test:wrong_type"], "returned int, expected an nn.Module"),
        (["training_of_test:raises"], "IndexError: list index out of range (training_of_test.py:26)"),
        (["training_of_test:ends"], "SystemExit(3) (training_of_test.py:29)"),
        (["training_of_test:lazy"], "parameter weight gets its shape in the first forward pass"),
        (["training_of_test:number"], "number is int, expected a function"),
        (["training_of_test:make_modle"], "did you mean 'make_model'?"),
        (["training_of_tset:make_model"], "did you mean 'training_of_test'?"),
        (["none.py:make_model"], "no file 'none.py'"),
        (["training_of_test"], "expected a function as module:function or file.py:function"),
        (["broken_of_test:make_model"], "SyntaxError: invalid syntax (broken_of_test.py:1)"),
        (["training_of_test:make_model", "--input", "32,65"], "the forward pass raised"),
        (["training_of_test:tokens", "--input", "8,64"], "; give ids their type: --input 8,64:int64"),
        (
            ["training_of_test:make_model", "--input", "32,64", "--loss", "training_of_test:loss_alone"],
            "--loss: loss_alone(batch) is called with two arguments, as loss(outputs, batch)",
        ),
        (["training_of_test:make_model", "--input", "32,x"], "expected a shape and a type such as 8,128:int64"),
        (["training_of_test:make_model", "--input", "3:int65"], "did you mean 'int64'?"),
        (["training_of_test:make_model", "--input", "3,64", "--batch", "a:b"], "both give the batch"),
        (["training_of_test:make_model", "--optimizer", "adan"], "did you mean 'adam'?"),
        (["training_of_test:make_model", "--stage", "4"], "--stage 4: '4' is not known"),
        (["training_of_test:make_model", "--np", "0"], "--np: expected a number of at least 1"),
        (["training_of_test:make_model", "--ranks", "2,a"], "expected a number of at least 1"),
        (["training_of_test:make_model", "--memory", "8X"], "'8X' is not a number of bytes"),
        (["training_of_test:no_gradient", "--input", "3,3"], "depends on no trainable parameter"),
    ],
)
def test_bad_input(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    (here / "broken_of_test.py").write_text("def make_model(:\n")
    assert run(["estimate", *words]) == 2, "the exit code of bad input"
    err = capsys.readouterr().err
    assert told in err, err
    assert "Traceback" not in err
