"""``farandole plan`` and ``farandole explain``: files, JSON, exit codes, and errors that name what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import farandole as fd
from farandole.cli.main import run
from farandole.core.cluster_file import read_cluster, write_cluster
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.profile import read_profile, write_profile
from tests.unit.plan.search.models import make_cluster, make_profile

MODEL = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

def make_model():
    return nn.Sequential(*(Block() for _ in range(4)))

def make_batch(samples=8):
    return torch.zeros(samples, 64)
"""

_TWO_PRECISIONS = ("--precision", "fp32", "--fix", "precision=bf16")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model, a profile and a cluster."""
    (tmp_path / "model_to_plan.py").write_text(MODEL)
    write_profile(make_profile(), tmp_path / "model.json")
    write_cluster(make_cluster(), tmp_path / "cluster.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plan_and_explain(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile and a cluster in; the plan, its reasons, the text, the JSON and the page out."""
    line = ["plan", "--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--global-batch", "64"]
    assert run([*line, "--effort", "120", "--fix", "tensor=1", "--out", "plan.toml"]) == 0
    printed = capsys.readouterr()
    assert "Plan: " in printed.out
    assert "farandole explain plan.toml" in printed.err
    plan = Plan.read("plan.toml")
    assert plan.tensor == 1
    assert plan.predicted["global_batch"] == 64
    assert all(float(f"{each:.4g}") == each for name, each in plan.predicted.items() if name != "peak_bytes")
    assert run(["explain", "plan.toml"]) == 0
    assert capsys.readouterr().out == printed.out
    assert run(["explain", "plan.toml", "--json", "--html", "page.html"]) == 0
    page = capsys.readouterr()
    assert "wrote page.html: memory against time, the mesh over the hosts, the schedule, and what" in page.err
    mapping = json.loads(page.out)
    assert mapping["version"] == 1
    assert mapping["best"]["candidate"]["ranks"] == 8
    assert "<svg" in (here / "page.html").read_text()
    batch = ["explain", "plan.toml", "--batch-size"]
    assert run([*batch, "--critical-batch", "512"]) == 0
    assert "The critical batch is 512 samples" in capsys.readouterr().out
    assert run([*batch, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"]
    for wrong in (["explain", "plan.toml", "--critical-batch", "3"], [*batch, "--html", "page.html"],
                  [*batch, "--critical-batch", "-1"]):  # fmt: skip
        assert run(wrong) == 2, wrong
    (here / "plan.profile.json").unlink()
    assert run(batch) == 2
    assert "there is no plan.profile.json beside it" in capsys.readouterr().err
    text = (here / "plan.toml").read_text()
    (here / "plan.toml").write_text(text.replace("stall_seconds = 10.0", "stall_seconds = 5.0"))
    assert run(["explain", "plan.toml"]) == 2
    assert "stall_seconds = 5.0 (10.0 there)" in capsys.readouterr().err


def test_a_model_is_analysed_and_the_plan_is_applied(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Functions in; the plan of one rank is what `fd.distribute` takes, in Python too."""
    words = ["plan", "model_to_plan:make_model", "--batch", "model_to_plan:make_batch", "--cluster", "dgx-a100"]
    assert run([*words, "--gpus", "8", "--json", "--effort", "60"]) == 0
    mapping = json.loads(capsys.readouterr().out)
    assert mapping["request"]["global_batch"] == 64, "8 ranks x 8 samples of the example"
    assert {each["name"] for each in mapping["families"]} >= {"data", "ZeRO-3", "pipeline", "expert", "context"}

    def make_model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

    def make_batch(samples: int = 4) -> torch.Tensor:
        return torch.zeros(samples, 16, dtype=torch.float32)

    answer = fd.find_plan(make_model, make_batch, cluster="a100", ranks=1, fix={"accumulate": 2}, out="one.toml")
    assert answer.plan.accumulate == 2
    assert any("no loss was given" in each for each in answer.warnings)
    with_loss = fd.find_plan(
        make_model, make_batch, cluster="a100", ranks=1, loss=lambda outputs, batch: outputs.square().mean()
    )
    assert not any("no loss was given" in each for each in with_loss.warnings)
    assert read_profile("one.profile.json").device == "cuda", "operations of the cluster's GPUs"
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    fd.init()
    try:
        assert fd.distribute(model, optimizer, answer.plan) == (model, optimizer)
    finally:
        fd.shutdown()
    with pytest.raises(ConfigError, match="find_plan: gaol is not known"):
        fd.find_plan(make_model, make_batch, cluster="a100", ranks=1, gaol="time")
    with pytest.raises(ConfigError, match="a plan has no key 'tensr'"):
        fd.find_plan(make_model, make_batch, cluster="a100", ranks=1, fix={"tensr": 1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "plan: the model, --cluster and --gpus are missing; for example: farandole plan train:make_model"),
        (["--cluster", "cluster.toml"], "plan: the model and --gpus are missing"),
        (["model_to_plan:make_model", "--cluster", "cluster.toml"], "plan: --gpus is missing; say how many"),
        (["--cluster", "cluster.toml", "--gpus", "8"], "plan: the model is missing; name its function"),
        (
            ["nowhere:make_model", "--cluster", "cluster.toml", "--gpus", "8", "--precision", "fp8"],
            "--precision fp8: a model has layers of 8 bits from a library",
        ),
        (
            ["nowhere:make_model", "--cluster", "cluster.toml", "--gpus", "8", "--precision", "tf32"],
            "--precision tf32: a switch of torch for the whole process, torch.set_float32_matmul_precision",
        ),
        (
            ["nowhere:make_model", "--cluster", "cluster.toml", "--gpus", "8", "--precision", "fp4"],
            "--precision fp4: no such precision; expected some of fp32, bf16, fp16, bf16-weights",
        ),
        (
            ["nowhere:make_model", "--cluster", "cluster.toml", "--gpus", "8", "--goal", "fast"],
            "--goal fast: no such goal; expected one of ",
        ),
        (
            ["model_to_plan:make_model", "--cluster", "cluster.toml", "--gpus", "8"],
            "there is no batch to plan for",
        ),
        (["--profile", "model.json", "--cluster", "nowhere.toml", "--gpus", "8"], "nowhere.toml"),
        (["--profile", "model.json", "--cluster", "dgx-a1000", "--gpus", "8"], "dgx-a100"),
        (["--profile", "none.json", "--cluster", "cluster.toml", "--gpus", "8"], "there is no file none.json"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "0"], "--gpus 0: expected at least 1"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "7"], "do not fill hosts of 4"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--goal", "fast"], "--goal fast"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--fix", "tensr=1"], "'tensr'"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--fix", "expert=2"], "mixture"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--memory", "0"], "memory = 0"),
        (
            ["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--set", "a=1"],
            "--set is for --draw alone",
        ),
        (
            ["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--trials", "1"],
            "a profile alone",
        ),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--out", "no/p.toml"], "--out"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--global-batch", "-1"], "-1"),
        (["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--optimizer", "sgd"], "adamw"),
        (
            ["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "-H", "a:4,b:4"],
            "where trials run, and there are none",
        ),
        (
            ["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--measure"],
            "measure has no effect beside a profile",
        ),
        (
            ["model_to_plan:make_model", "--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8"],
            "model has no effect beside a profile",
        ),
        (
            ["--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", *_TWO_PRECISIONS],
            "precision = 'bf16' is fixed, and fp32 may be chosen; leave one of them out",
        ),
        (["--draw", "--goal", "time", "--set", "pipeline=2"], "--goal has no effect with --draw"),
    ],
)
def test_bad_lines(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """Exit code 2 and one error that says what is wrong; no traceback."""
    assert run(["plan", *words, *(["--effort", "20"] if "--profile" in words else [])]) == 2
    error = capsys.readouterr().err
    assert said in error, error
    assert "Traceback" not in error


ATTENTION = """\
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.norm = 4, nn.LayerNorm(64)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    def forward(self, x):
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)

def make_model():
    return nn.Sequential(Block(), Block())

def make_batch(samples=8):
    return torch.zeros(samples, 32, 64)
"""
RECIPE = 'tensor_recipe={ "*.[qkv]" = "columns", "*.o" = "rows" }'


def test_layers_that_nothing_recognises_are_divided_by_the_users_recipe(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is divided is in the prediction; what is not is said; a profile keeps the recipe that it is of."""
    (here / "attention.py").write_text(ATTENTION)
    functions = ["attention:make_model", "--batch", "attention:make_batch"]
    line = ["--cluster", "cluster.toml", "--gpus", "2", "--effort", "10"]

    def planned(*words: str) -> tuple[Plan, str]:
        assert run(["plan", *words, *line, "--out", "plan.toml"]) == 0
        return Plan.read("plan.toml"), " ".join(capsys.readouterr().out.split())

    plan, said = planned(*functions, "--fix", "tensor=2", "--fix", RECIPE)
    assert "whole on every rank" not in said, said
    assert plan.tensor_recipe == {"*.[qkv]": "columns", "*.o": "rows"}
    profile = read_profile("plan.profile.json")
    block = profile.units[0]
    assert block.tensor is not None
    assert (block.tensor.flops, block.tensor.divides) == (block.forward_flops, 4), "by heads, all products"
    assert block.tensor.forward_sums == 2, "of attention and of the perceptron"
    of_profile = ["--profile", "plan.profile.json"]
    assert planned(*of_profile, "--fix", "tensor=2")[0].tensor_recipe == plan.tensor_recipe, "from the profile"
    one, _ = planned(*of_profile, "--fix", "tensor=1")
    assert (one.tensor, one.tensor_recipe) == (1, {}), "a recipe says how, not that"
    for words, told in (
        ([*of_profile, "--fix", 'tensor_recipe={ "*.o" = "rows" }'], "was made with {'*.[qkv]': 'columns'"),
        ([*functions, "--fix", 'tensor_recipe={ "*.out" = "rows" }'], "the pattern '*.out' matches no layer"),
        ([*functions, "--fix", 'tensor_recipe={ "*.o" = "row" }'], "did you mean 'rows'?"),
    ):
        assert run(["plan", *words, *line]) == 2, told
        assert told in capsys.readouterr().err
    less = replace(block.tensor, flops=block.tensor.flops - 4 * 2 * 32 * 64 * 64 - block.fused_flops)
    undivided = [replace(each, divided_by="" if "mlp" not in each.name else "tensor") for each in block.gradients]
    units = (replace(block, tensor=less, gradients=tuple(undivided)), *profile.units[1:])
    write_profile(replace(profile, units=units, tensor_recipe={}), here / "less.json")
    _, said = planned("--profile", "less.json", "--fix", "tensor=2")
    assert "53% of what 0 computes whole on every rank: 0.o.weight, 0.v.weight, 0.k.weight, 0.q.weight" in said


@pytest.mark.full("further")
def test_a_model_that_fits_nowhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with what would make it fit on stdout; the reasons are written, and no plan."""
    line = ["plan", "--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--effort", "60"]
    assert run([*line, "--memory", "20MB", "--out", "plan.toml"]) == 2
    assert "does not fit: the least is" in capsys.readouterr().out
    assert not (here / "plan.toml").exists()
    assert (here / "plan.why.json").exists()


@pytest.mark.full("further")
def test_more_ranks_than_were_measured_are_said_to_be_extrapolated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of 8 ranks for 64: a warning, and the cluster beside the plan is the one that was measured."""
    line = ["plan", "--profile", "model.json", "--cluster", "cluster.toml", "--global-batch", "64"]
    assert run([*line, "--gpus", "64", "--effort", "60", "--memory", "9GB", "--out", "plan.toml"]) == 0
    assert "extrapolated: the cluster's figures are of 8 ranks, and there are 64" in capsys.readouterr().out
    assert read_cluster(here / "plan.cluster.toml").ranks == 8
    assert run(["explain", "plan.toml", "--batch-size", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert run(["simulate", "plan.toml", "--gpus", "64"]) == 0
    assert "the cluster has 8 ranks: for more" in capsys.readouterr().out
    assert run([*line, "--gpus", "8", "--effort", "60", "--out", "plan.toml"]) == 0
    assert "extrapolated" not in capsys.readouterr().out
    assert advice["question"]["ranks"] == 64


def test_batches_of_explain_keep_the_limit_of_the_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --memory allows is all that larger batches may take."""
    line = ["plan", "--profile", "model.json", "--cluster", "cluster.toml", "--gpus", "8", "--effort", "60"]
    line += ["--global-batch", "64", "--fix", "recompute=none", "--out", "plan.toml"]
    largest = []
    for limit in ("700MB", "16GB"):
        assert run([*line, "--memory", limit]) == 0
        capsys.readouterr()
        assert run(["explain", "plan.toml", "--batch-size", "--json"]) == 0
        points = json.loads(capsys.readouterr().out)["points"]
        largest.append(max(each["global_batch"] for each in points))
    assert largest[0] < largest[1]


def test_trials_of_gpus_do_not_run_on_cpus(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What this machine's CPUs take says nothing about which plan is best on GPUs."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    words = ["plan", "model_to_plan:make_model", "--batch", "model_to_plan:make_batch", "--cluster", "dgx-a100"]
    assert run([*words, "--gpus", "2", "--trials", "2"]) == 2
    assert "trials: ranks of the cluster compute on NVIDIA A100-SXM 80 GB" in capsys.readouterr().err
