"""``farandole estimate`` with degrees: what a rank holds of a divided model, and which divisions are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.main import run
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.answer import DividedModel
from farandole.plan.candidate import Candidate
from farandole.plan.cost.held import memory_of_candidate
from farandole.plan.memory import STAGES, Setting, memory_of
from farandole.plan.memory_page import Choice, ProcessMemory
from farandole.plan.profile import ModelProfile
from farandole.train.analysis import analyse as analysis
from farandole.train.analysis.analyse import analyse
from tests.unit.plan.search.models import make_profile

MODEL = """\
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(16, 48)
    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))
"""
DENSE, MIXTURE = make_profile(), make_profile(experts=8)
DIVIDED = 3 * 16 * 17 + 16 * 16 + 32 * 17 + 32 * 16
"""Parameters of a layer that ranks divide: matrices and biases, but not biases that are added to a sum."""
WHOLE = 16 + 16 + 4 * 16
"""Those biases, and two norms."""
WORDS = ["divided_of_test:Model", "--input", "8,24:int64"]


_analysed: dict[str, ModelProfile] = {}


def analyse_once(*functions: Any, **options: Any) -> ModelProfile:
    """Return what `analyse` does: of one model and batch, so that one analysis is enough for all tests."""
    key = str(options)
    if key not in _analysed:
        _analysed[key] = analyse(*functions, **options)
    return _analysed[key]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "process_before_model", ProcessMemory)
    monkeypatch.setattr(analysis, "analyse", analyse_once)
    (tmp_path / "divided_of_test.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "divided_of_test", raising=False)


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], dict[tuple[str, int], Any]]:
    """Return the answer, and its rows in fp32 without recomputation by stage and ranks."""
    line = ["estimate", *WORDS, "--precision", "fp32", "--recompute", "none", *words, "--json"]
    assert run(line) == 0, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    return result, {(row["stage"], row["ranks"]): row for row in result["rows"]}


@pytest.mark.full("further")
@pytest.mark.usefixtures("here")
def test_two_ranks_that_divide_layers_hold_half_of_their_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    result, found = rows(capsys, "--tensor", "2")
    assert result["degrees"] == {"tensor": 2}
    expected = 4 * (6 * (DIVIDED // 2 + WHOLE) + (48 * 16 + 48 * 17) // 2)
    whole = found["0", 8]
    assert whole["weights_bytes"] == whole["gradients_bytes"] == expected
    assert whole["optimizer_bytes"] == pytest.approx(2 * expected, rel=0.02)
    assert sorted({ranks for _, ranks in found}) == [2**i for i in range(1, 11)]
    assert {stage for stage, _ in found} == set(STAGES) - {"hybrid"}
    for ranks in (2, 8, 1024):  # ZeRO divides by the ranks that have the same part
        sharded = found["1", ranks]["optimizer_bytes"]
        assert sharded == pytest.approx(whole["optimizer_bytes"] / (ranks / 2), rel=0.02)
    assert any("stage hybrid is left out" in note for note in result["notes"])


@pytest.mark.full("slow")
@pytest.mark.usefixtures("here")
def test_the_page_says_how_ranks_divide_the_model_and_what_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["estimate", *WORDS, "--pipeline", "2", "--np", "4", "--stage", "1", "--memory", "1kB"]) == 0
    page = capsys.readouterr().out
    assert "of 4 ranks (data 2 x pipeline 2; the stage that needs most)" in page
    assert "does not fit into 1 kB on 4 ranks" in page
    assert "no number of ranks up to 1024 makes it fit with these degrees" in page
    assert run(["estimate", *WORDS, "--pipeline", "2", "--np", "2", "--stage", "3", "--memory", "180kB"]) == 0
    assert "it would fit on 4 ranks, at ZeRO stage 3" in capsys.readouterr().out
    assert run(["estimate", *WORDS, "--pipeline", "2", "--np", "4", "--stage", "3", "--memory", "1MB"]) == 0
    assert capsys.readouterr().out.endswith("run -np 4 --set pipeline=2 --set zero=3 -- python SCRIPT.py\n")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor", "3"], "--tensor 3 does not divide 4 heads or columns of encoder.layers.0; use --tensor 2"),
        (["--pipeline", "12"], "--pipeline 12: 8 layers do not make 12 stages; use --pipeline 8"),
        (["--pipeline", "3"], "a batch of 8 samples does not divide into 6 micro-batches; give a batch of 6"),
        (["--expert", "2"], "--expert 2: the model has no mixture of experts; leave --expert out"),
        (["--context", "5"], "--context 5: sequences of 24 tokens do not divide into 2 x 5 runs; use --context 4"),
        (["--tensor", "2", "--np", "5"], "needs a multiple of 2 ranks, but there are 5; start 4 ranks"),
        (["--tensor", "2", "--stage", "hybrid"], 'shard_within = "host" with tensor = 2 is not there yet'),
        (["--tensor", "2", "--precision", "bf16-weights"], "bf16_parameters = true with tensor = 2"),
        (["--tensor", "0"], "--tensor: expected a number of at least 1"),
        (["--tensor", "64", "--pipeline", "32"], "--tensor 64 --pipeline 32: more than 1024 ranks"),
    ],
)
def test_what_does_not_divide_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert run(["estimate", *WORDS, *words]) == 2, "the exit code of bad input"
    err = capsys.readouterr().err
    assert told in err, err
    assert len(err.splitlines()) == 1, err


@pytest.mark.usefixtures("here")
def test_degrees_need_a_batch_and_no_trials(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", WORDS[0], "--context", "2"]) == 2
    assert "--context needs the batch of a rank; add --input 8,128:int64, or --batch" in capsys.readouterr().err
    assert run(["estimate", *WORDS, "--find", "--expert", "2"]) == 2
    assert "--expert has no effect with --find" in capsys.readouterr().err


def test_experts_leave_out_the_stages_that_do_not_know_them() -> None:
    model = DividedModel(MIXTURE, {"expert": 2}, 8)
    choice, notes = model.possible(Choice(precisions=["fp32"]), 8)
    assert list(choice.stages) == ["0", "3"]
    assert len(notes) == 3, notes
    with pytest.raises(PlanError, match="zero = 1 with expert = 2 is not there yet"):
        model.possible(Choice(stages=["1"]), 8)
    with pytest.raises(ConfigError, match=r"--expert 3 does not divide .* experts of .*; use --expert 2"):
        DividedModel(MIXTURE, {"expert": 3}, 8).refuse([9])


def test_without_degrees_the_planner_holds_what_the_estimate_does() -> None:
    """There is one home of these formulas: both ways lead to `memory_of`."""
    for zero in range(4):
        plan = Plan(zero=zero)
        (mine,) = memory_of_candidate(DENSE, Candidate(plan, 8, 8 * DENSE.samples), 8)
        assert mine == memory_of(DENSE.memory, Setting(str(zero), "fp32", "none", 8))
