"""sentence-transformers' Trainer, where it is installed: two ranks train as one process with their batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.front_ends import play_both

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None or importlib.util.find_spec("datasets") is None,
    reason="sentence-transformers or datasets is missing",
)

CASES = (
    "whole rounds", "uneven", "without duplicates", "two data sets", "resumed", "accumulated", "gathered",
)  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    return play_both("sentence_script", tmp_path_factory.mktemp("sentences"))


@pytest.mark.full("slow")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_one_process_does_with_their_batches(
    case: str, played: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    stock, ours, _ = played
    one, two = (torch.tensor(each[case]["weights"], dtype=torch.float64) for each in (stock, ours))
    assert torch.allclose(one, two, rtol=0, atol=1e-10), (one - two).abs().max()
    assert ours[case]["losses"] == pytest.approx(stock[case]["losses"], abs=1e-4)
    assert ours[case]["eval_loss"] == pytest.approx(stock[case]["eval_loss"], abs=1e-10)


@pytest.mark.full("slow")
def test_what_cannot_be_right_is_refused(played: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    _, ours, _ = played
    assert "gather_across_devices=True: the epoch has 5 batches of 3 to 4 samples" in ours["gathered unevenly"]
    assert "gather_across_devices=True with several data sets" in ours["gathered of two"]
    assert "parameters that are not the model's" in ours["own parameters"]
