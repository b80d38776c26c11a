"""`fd.find_micro_batch` on several ranks: one answer for all, and errors on all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import farandole as fd
from tests.ranks.pool import ranks, takes

MB = 10**6


def make_model() -> nn.Module:
    return nn.Linear(16, 16)  # narrow: a trial is to take memory, not time


def make_batch(samples: int) -> torch.Tensor:
    """Return 200 MB a sample."""
    return torch.ones(samples * 3_125_000, 16, dtype=torch.float32)


@pytest.mark.full("slow")
@ranks(2)
@takes(150)
def test_all_ranks_take_what_fits_on_the_smallest() -> None:
    world = fd.init(progress=False)
    limit_bytes = (1100 if world.rank else 6000) * MB
    found = fd.find_micro_batch(make_model, make_batch, global_batch=4, limit_bytes=limit_bytes)
    assert found[:3] == (1, 2, 2), f"1 * 2 * 2 samples: {found}"
    own = max(trial.samples for trial in found.trials if trial.fits)
    assert own == (1 if world.rank else 2), f"200 MB in and 200 MB out a sample: {found}"


@pytest.mark.full("slow")
@ranks(2)
@takes(150)
def test_an_error_of_one_rank_is_raised_on_all() -> None:
    world = fd.init(progress=False)
    limit_bytes = MB if world.rank else 4000 * MB
    with pytest.raises(fd.ConfigError, match=r"rank 1: .*a limit of 1 MB is below the"):
        fd.find_micro_batch(make_model, make_batch, global_batch=2, limit_bytes=limit_bytes)


@ranks(2)
def test_ranks_that_disagree_or_cannot_divide() -> None:
    world = fd.init(progress=False)
    with pytest.raises(fd.Mismatch, match="global_batch is 4 on rank 0, 8 on rank 1"):
        fd.find_micro_batch(make_model, make_batch, global_batch=8 if world.rank else 4)
    with pytest.raises(fd.ConfigError, match="global_batch = 3 is not divisible by 2 ranks; take 2 or 4"):
        fd.find_micro_batch(make_model, make_batch, global_batch=3)
