"""transformers' Trainer with sharded models and optimizers: it saves whole ones, and goes on from them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.ranks.front_ends import ROOT, play_both

pytestmark = [
    pytest.mark.full("further"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing"),
    pytest.mark.timeout(200),
]

CHECKPOINTS = ("whole/checkpoint-3", "whole/checkpoint-6", "whole/checkpoint-9", "whole/last", "best/last")


@pytest.fixture(scope="module", params=[3, 2])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, request.param, play_both("sharded_trainer_script", folder, f"zero={request.param}")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def compare(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(two)
    for name, value in one.items():
        assert value.dtype == two[name].dtype, name
        assert torch.allclose(value, two[name], rtol=0, atol=1e-9), name


def test_models_are_saved_whole_at_each_epoch_and_resumed(played: tuple[Path, int, Any]) -> None:
    from safetensors.torch import load_file

    folder, _, (stock, ours, _) = played
    for name in CHECKPOINTS:
        one, two = (load_file(folder / kind / name / "model.safetensors") for kind in ("stock", "ours"))
        compare(one, two)
        compare(weights(folder / "stock" / name), weights(folder / "ours" / name))
        assert next(iter(two.values())).dtype == torch.float64
        config, theirs = (
            json.loads((folder / kind / name / "config.json").read_text()) for kind in ("ours", "stock")
        )
        assert config == theirs
    compare(weights(folder / "ours" / "whole" / "last"), weights(folder / "ours" / "again" / "last"))
    compare(weights(folder / "ours" / "best" / "last"), weights(folder / "ours" / "best" / "checkpoint-3"))
    assert ours["best"] == pytest.approx(stock["best"], abs=1e-6)


def test_states_of_the_optimizer_are_whole(played: tuple[Path, int, Any]) -> None:
    folder, _, _ = played
    files = [folder / kind / "whole" / "checkpoint-9" / "optimizer.pt" for kind in ("stock", "ours")]
    one, two = (torch.load(file, weights_only=True)["state"] for file in files)
    assert list(one) == list(two)
    for index, values in one.items():
        compare(values, two[index])


def test_no_key_is_said_to_have_no_effect_and_all_ranks_hear_of_a_full_disk(
    played: tuple[Path, int, Any],
) -> None:
    folder, zero, (_, ours, _) = played
    assert "has no effect" not in (folder / "said").read_text()
    if zero == 3:
        assert all("Not a directory" in said for said in ours["unwritable"])


def test_accelerate_saves_the_whole_model_and_refuses_the_rest(played: tuple[Path, int, Any]) -> None:
    from safetensors.torch import load_file

    folder, zero, (_, ours, _) = played
    compare(*(load_file(folder / kind / "accelerated" / "model.safetensors") for kind in ("stock", "ours")))
    assert (
        f"zero = {zero} with save_state and load_state of Accelerate: the optimizer's state is sharded"
        in ours["save_state"]
    )


@pytest.mark.parametrize(
    ("script", "setting", "front_end"),
    [
        ("sharded_trainer", "tensor=2", "FarandoleTrainer"),
        ("accelerate", "pipeline=2", "FarandoleAccelerator"),
        ("lightning", "zero=3", "FarandoleStrategy"),
    ],
)
def test_a_divided_model_is_refused_on_all_ranks_before_it_moves(
    script: str, setting: str, front_end: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(script.removeprefix("sharded_trainer") or "transformers") is None:
        pytest.skip(f"{script} is missing")
    words = ["-m", "farandole", "run", "-np", "2", "--run-dir", str(tmp_path / "run"), "--set", setting, "--"]
    words += [sys.executable, "-m", f"tests.ranks.{script}_script", "ours", str(tmp_path / "ours.json")]
    with (tmp_path / "said").open("w+") as said:
        job = warm.start(ROOT, *words, out=said, err=said, environment={"HF_HUB_OFFLINE": "1"})
        try:
            assert job.wait(100) == 2
        finally:
            job.kill()
            job.wait()
    key, value = setting.split("=")
    refusal = f"plan: {key} = {value} with {front_end}, which does not train a model that is divided so"
    text = (tmp_path / "said").read_text()
    assert refusal in text
    for rank in (0, 1):  # each refuses by itself: the launcher may end the slower one before it comes to it
        log = (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text()
        assert refusal in log or f"stopped rank {rank} after" in text, text


def test_adapters_alone_are_saved(played: tuple[Path, int, Any]) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    folder, _, _ = played
    for name in ("checkpoint-3", "checkpoint-9", "last"):
        files = [folder / kind / "adapted" / name / "adapter_model.safetensors" for kind in ("stock", "ours")]
        assert all("lora" in key for key in load_file(files[1]))
        compare(load_file(files[0]), load_file(files[1]))
        assert not (files[1].parent / "model.safetensors").exists()
