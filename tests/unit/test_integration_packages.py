"""Without its package a front end is an ImportError that says what to install; what it cannot divide it names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader

from farandole.core.env import PLAN_FILE
from farandole.core.vocabulary.errors import ConfigError
from farandole.integrations.shared import check_job
from farandole.integrations.weighed_batches import divide


@pytest.mark.parametrize(
    ("module", "blocked", "extra"),
    [
        ("accelerate", "accelerate", "accelerate"),
        ("transformers", "transformers", "transformers"),
        ("lightning", "lightning", "lightning"),
    ],
)
def test_a_missing_package_is_named(
    module: str, blocked: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"farandole.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(ImportError, match=rf"{name} needs .*pip install -e \S+\[{extra}\]"):
        importlib.import_module(name)


def test_a_sampler_that_divides_batches_over_ranks_itself_is_refused() -> None:
    kind: Any = type("Whole", (BatchSampler,), {"__module__": "transformers.trainer_pt_utils"})
    samples: Any = [1, 2, 3, 4]
    loader: DataLoader[int] = DataLoader(samples, batch_sampler=kind(range(4), 2, drop_last=False))
    here: Any = None
    with pytest.raises(
        ConfigError, match=r"a Whole, which divides batches over ranks itself.*use a train_sampling_strategy that"
    ):
        divide(loader, None, here)


@pytest.mark.parametrize("key", ["tensor", "pipeline", "expert", "context"])
def test_degrees_beside_data_are_refused_by_name(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(f"{key} = 2\n")
    monkeypatch.setenv(PLAN_FILE, str(file))
    with pytest.raises(
        ConfigError,
        match=rf"plan: {key} = 2 with FarandoleTrainer, which does not train a model that is",
    ):
        check_job("trainer")


def test_stages_of_zero_that_a_front_end_cannot_save_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.toml"
    monkeypatch.setenv(PLAN_FILE, str(file))
    file.write_text("zero = 3\n")
    check_job("trainer")
    check_job("resume")
    with pytest.raises(ConfigError, match=r"plan: zero = 3 with FarandoleStrategy, which does not train"):
        check_job("lightning")
    file.write_text('zero = 2\nweight_codec = "int8"\n')
    with pytest.raises(
        ConfigError, match=r'weight_codec = "int8" with zero = 2 with resume_from_checkpoint: what it keeps'
    ):
        check_job("resume")
