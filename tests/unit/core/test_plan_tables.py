"""Plans in tables: the same as flat ones, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.main import run
from farandole.core.job_plan import read_plan
from farandole.core.vocabulary.config import PLAN_TABLES
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan

DOCS = Path(__file__).parents[3] / "docs" / "reference/plan.md"
TABLES = """\
version = 1
clip_norm = 1.0

[mesh]
tensor = 2
zero = 3
tensor_recipe = { "*.q" = "columns" }

[exchange]
codec = "int8"

[memory]
recompute = "blocks"

[precision]
precision = "bf16"

[sync]
timeout_seconds = "5m"
"""
FLAT = Plan(
    clip_norm=1.0, tensor=2, zero=3, tensor_recipe={"*.q": "columns"}, codec="int8", recompute="blocks",
    precision="bf16", timeout_seconds=300.0,
)  # fmt: skip


def test_every_key_is_in_one_place() -> None:
    keys = [key for table in PLAN_TABLES.values() for key in table]
    assert sorted(keys) == sorted(Plan().to_mapping()), "a key of Plan stands in PLAN_TABLES once"


def test_tables_and_flat_keys_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(TABLES)
    assert Plan.read(path) == FLAT
    path.write_text(FLAT.to_toml())
    assert "[" not in re.sub(r"\[\]", "", path.read_text()), "a plan is written flat"
    assert Plan.read(path) == FLAT


def test_settings_go_before_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(TABLES)
    plan = read_plan(str(path), ["tensor=4", "precision=fp32"])
    assert plan is not None
    assert (plan.tensor, plan.precision, plan.codec) == (4, "fp32", "int8")
    path.write_text("[mesh]\npipeline = 2\n")
    assert run(["plan", str(path), "--draw", "--set", "pipeline=4", "--micro-batches", "4"]) == 0
    assert "4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"memory": {"tensor": 2}}, "x: tensor is in [memory], expected it in [mesh]; move it there"),
        ({"mesh": {"version": 1}}, "x: version is in [mesh], expected it above all tables; move it there"),
        ({"mesh": {"tensor": 2}, "tensor": 4}, "x: tensor = 4, and 2 in [mesh]; leave one of them out"),
        ({"mesh": {"tensor": 2}, "tensor": 2}, "x: tensor = 2, and 2 in [mesh]; leave one of them out"),
        ({"mehs": {"tensor": 2}}, "x: unknown table [mehs]; did you mean 'mesh'?"),
        ({"mesh": {"tenser": 2}}, "x: [mesh] has no key 'tenser'; did you mean 'tensor'?"),
        ({"mesh": 2}, "x: mesh = 2, expected a table; write its keys below [mesh]"),
        ({"mesh": {"tensor": "two"}}, "x: tensor: expected a whole number"),
        ({"version": 9, "mehs": {}}, "plan version 9 is newer than 1"),
    ],
)
def test_what_is_refused(values: Mapping[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=re.escape(told)):
        Plan.from_mapping(values, where="x")


def test_the_example_of_the_page_is_a_plan(tmp_path: Path) -> None:
    example = next(text for text in re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.S) if "[mesh]" in text)
    (tmp_path / "plan.toml").write_text(example)
    assert Plan.read(tmp_path / "plan.toml") != Plan()
