"""Without its package a front end is an ImportError that says what to install; what it cannot divide it names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader

from farandole.core.vocabulary.errors import ConfigError
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
