"""The plan's key `predicted`: what the planner expected. It is carried along, checked, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from farandole.core.job_plan import read_plan
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import NAMES, TERMS, Plan
from farandole.plan.candidate import Term

PREDICTED = {
    "step_seconds": 1e-5, "low_seconds": 9e-6, "high_seconds": 2e-5, "peak_bytes": 3e9, "ranks": 4,
    "compute": 8e-6,
}  # fmt: skip


def test_it_survives_toml_and_json(tmp_path: Path) -> None:
    plan = Plan(predicted=PREDICTED)
    for name, text in (("plan.toml", plan.to_toml()), ("plan.json", json.dumps(plan.to_mapping()))):
        (tmp_path / name).write_text(text)
        assert Plan.read(tmp_path / name).predicted == PREDICTED, name
    typed = read_plan(str(tmp_path / "plan.toml"), ["accumulate=2"])
    assert typed is not None, "there is a plan"
    assert typed.predicted == PREDICTED, "--set of another key leaves it"


def test_plans_that_differ_in_it_alone_are_equal() -> None:
    assert Plan(predicted=PREDICTED) == Plan(), "they train the same"
    assert Plan(predicted=PREDICTED).differences(Plan()) == {}
    assert Plan(predicted=PREDICTED) != Plan(accumulate=2)


def test_terms_are_those_of_the_planner() -> None:
    assert get_args(Term) == TERMS
    assert set(TERMS) < set(NAMES)


@pytest.mark.parametrize(
    ("predicted", "problem"),
    [
        ({"step_second": 1}, "predicted.step_second is unknown"),
        ({"compute": 1.0}, "predicted has no step_seconds"),
        ({"step_seconds": 0}, "predicted.step_seconds = 0.0, expected more than 0"),
        ({"step_seconds": float("nan")}, "predicted.step_seconds = nan, expected a finite number"),
        ({"step_seconds": float("inf")}, "predicted.step_seconds = inf, expected a finite number"),
        ({"step_seconds": 1, "data": -1}, "predicted.data = -1.0, expected a finite number from 0"),
        (
            {"step_seconds": 1, "low_seconds": 2},
            "predicted.low_seconds = 2.0, expected at most step_seconds = 1.0",
        ),
        ({"step_seconds": 1, "high_seconds": 0.5}, "predicted.high_seconds = 0.5, expected at least step_seconds"),
        ({"step_seconds": 1, "ranks": 1.5}, "predicted.ranks = 1.5, expected a whole number"),
        ({"step_seconds": "1"}, "predicted: expected a table of numbers"),
        ({"step_seconds": True}, "predicted: expected a table of numbers"),
        ([1.0], "predicted: expected a table of numbers"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(predicted: Any, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_mapping({"predicted": predicted}, where="plan.toml")
    assert problem in str(caught.value), "the message names the key, the value and what is expected"
