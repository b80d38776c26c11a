"""transformers' Trainer: two ranks of ours train what the stock one trains on one process, to float rounding."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.core.vocabulary.events import SETUP_LOOP
from farandole.observe.records.run_reader import read_run
from tests.ranks.front_ends import play_both

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing"),
    pytest.mark.full("slow"),
]

CASES = (
    "tokens, 1",
    "tokens, 2",
    "means, 1",
    "means, 2",
    "subclass, 1",
    "subclass, 2",
    "resumed",
    "whole",
    "twice",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    return play_both("transformers_script", tmp_path_factory.mktemp("trainer"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_the_stock_trainer_does_on_one(
    case: str, played: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    stock, ours, _ = played
    one, two = (torch.tensor(result[case]["weights"]) for result in (stock, ours))
    assert torch.allclose(one, two, rtol=0, atol=1e-6), (one - two).abs().max()
    assert ours[case]["losses"] == pytest.approx(stock[case]["losses"], abs=1e-4)


def test_gradients_travel_once_a_step_and_metrics_count_each_sample_once(
    played: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    stock, ours, _ = played
    assert [ours[f"tokens, {k}"]["exchanges"] for k in (1, 2)] == [6, 4]
    for k in (1, 2):
        for name in ("hits", "count"):
            assert ours[f"means, {k}"][name] == stock[f"means, {k}"][name]
    assert ours["means, 1"]["count"] == 17


@pytest.mark.parametrize("count", [13, 16, 17])
@pytest.mark.parametrize("name", ["points", "keywords", "tokens"])
def test_an_evaluation_has_the_loss_of_one_process(
    name: str, count: int, played: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    stock, ours = (result[f"{name} evaluated, {count}"] for result in played[:2])
    assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-6)
    if name != "tokens":  # of rows of different lengths: a mean of the means of batches, in one process too
        assert [*ours["losses"], ours["streamed"]] == pytest.approx([stock["mean"]] * 3, abs=1e-6)


def test_a_checkpoint_is_written_once_and_holds_each_ranks_random_state(
    played: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    _, ours, _ = played
    assert "model.safetensors" in ours["resumed"]["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(ours["resumed"]["files"])


def test_means_of_means_are_refused(played: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    _, ours, _ = played
    assert "average_tokens_across_devices=False" in ours["refusal"]


def test_a_trainer_of_the_users_own_keeps_its_methods_and_says_what_its_loss_is(
    played: tuple[dict[str, Any], dict[str, Any], Path],
) -> None:
    stock, ours, _ = played
    for k in (1, 2):
        assert ours[f"subclass, {k}"]["logged"] == stock[f"subclass, {k}"]["logged"] > 0
    assert "OwnLossByUs has a compute_loss of its own" in ours["unknown loss"]
    assert "set OwnLossByUs.loss_is_scaled_for_ga = True" in ours["unknown loss"]


def test_the_run_is_recorded(played: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    run = read_run(played[2])
    rows = run.timelines[0].steps
    assert len(rows) == 6 + 6 + 4 + 4 + 6 + 4 + 2 + 4 + 6 + 6
    assert sum(len(row.exchanges) for row in rows) == len(rows)
    assert sum(row.samples for row in rows) >= 6 * 2 * 9  # its part of six trainings of two epochs
    assert all(row.samples for row in rows), "the batch that is drawn ahead is counted where it is trained on"
    phases = {phase.name for row in rows for phase in row.phases}
    assert {"evaluation", "checkpoint", "data", "forward", "optimizer"} <= phases
    assert run.timelines[0].setup[SETUP_LOOP] == "transformers", "fixes are arguments of its Trainer"
