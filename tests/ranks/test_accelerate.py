"""Accelerate: two ranks of our accelerator train what its own trains on one process, to float rounding."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from farandole.observe.records.run_reader import read_run
from tests.ranks.front_ends import play_both

pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    return play_both("accelerate_script", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.gate_cases("several")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["plain", "metrics", "loaded", "several", "accumulated"])
def test_two_ranks_compute_what_accelerate_does_on_one_process(
    case: str, played: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    stock, ours, _ = played
    if case == "metrics":  # an order of its own: each rank's batches come side by side
        assert sorted(ours[case]) == pytest.approx(sorted(stock[case]), abs=1e-6)
    else:
        assert ours[case] == pytest.approx(stock[case], abs=1e-6)


def test_where_the_time_goes_is_recorded(played: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    rows = read_run(played[2]).timelines[0].steps
    assert {"data", "forward", "backward", "optimizer"} <= {phase.name for row in rows for phase in row.phases}
    assert all(row.samples for row in rows), "a batch that is drawn ahead is counted where it is trained on"


def test_what_is_not_supported_is_named(played: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    words = ("distributed already", "join_uneven_inputs", "DistributedDataParallelKwargs", "fp8")
    said = played[1]["refusals"]
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))
