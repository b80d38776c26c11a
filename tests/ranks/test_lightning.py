"""Lightning's Trainer: two ranks of our strategy train what one process of its own trains, to float rounding."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.observe.read.run_reader import read_run
from tests.ranks.front_ends import play_both

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is missing")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    return play_both("lightning_script", tmp_path_factory.mktemp("lightning"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["plain", "accumulated", "uneven", "manual", "manual, uneven"])
def test_two_ranks_train_what_lightning_does_on_one_process(
    case: str, played: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    stock, ours, _ = played
    one, two = (torch.tensor(result[case]["weights"]) for result in (stock, ours))
    assert torch.allclose(one, two, rtol=0, atol=1e-6), (one - two).abs().max()
    assert ours[case]["val"] == pytest.approx(stock[case]["val"], rel=1e-5)


def test_a_checkpoint_is_one_file_and_another_number_of_devices_is_refused(
    played: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    _, ours, _ = played
    assert ours["saved"] == ["model.ckpt"]
    assert "wants 1 processes, and there are 2 ranks; pass devices=2" in ours["refusal"]


def test_the_fits_are_recorded(played: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    rows = read_run(played[2]).timelines[0].steps
    assert len(rows) == 6 + 4 + 6 + 6 + 6
    rows, manual = rows[:16], rows[16:]
    assert [len(row.exchanges) for row in rows] == [1] * 16
    # The first optimizer's step ends a row, so the second's exchange is in the next one.
    assert [len(row.exchanges) for row in manual] == [1] + [2] * 11
    passes = [[phase.name for phase in row.phases].count("backward") for row in manual]
    assert passes == [1] + [2] * 11
    phases = [phase.name for row in rows for phase in row.phases]
    assert {"forward", "loss", "backward", "optimizer", "evaluation"} <= set(phases)
    assert phases.count("forward") == 6 + 6 + 6
    assert all(row.loss is not None for row in rows[1:6])
    unwatched = {phase.name for row in rows[6:10] for phase in row.phases}  # without the callback
    assert {"data", "forward", "backward", "optimizer"} <= unwatched
