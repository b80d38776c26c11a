"""A Trainer that makes whole batches: two ranks train what one process does that adds up the same batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.front_ends import play_both

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")

CASES = [f"{name}, {k}" for name in ("even", "uneven", "of all sizes") for k in (1, 2)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    return play_both("whole_batches_script", tmp_path_factory.mktemp("whole_batches"))


@pytest.mark.full("slow")
@pytest.mark.timeout(200)
def test_two_ranks_train_what_one_process_does_that_adds_up_the_same_batches(
    played: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    stock, ours, _ = played
    for case in (*CASES, "resumed after 1", "resumed after 5"):
        one, two = (torch.tensor(each[case]["weights"], dtype=torch.float64) for each in (stock, ours))
        assert torch.allclose(one, two, rtol=0, atol=1e-10), (case, (one - two).abs().max())
        assert ours[case]["losses"] == pytest.approx(stock[case]["losses"], abs=1e-4), case
        assert ours[case]["eval_loss"] == pytest.approx(stock[case]["eval_loss"], abs=1e-10), case


@pytest.mark.full("slow")
def test_a_loss_that_gathers_rows_needs_equal_batches(
    played: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    _, ours, _ = played
    for name in ("training", "evaluation"):
        told = ours[f"refused {name}"]
        assert "gather_across_devices=True: the epoch has 5 batches of 3 to 4 samples" in told
        assert "dataset.select(range(n))" in told
