"""What the experts of a layer got, counted over passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from farandole.parallel.expert.dispatch import ExpertLoads, Load


def test_a_model_that_moved_to_another_device_is_counted_anew() -> None:
    steps = SimpleNamespace(done=0, after_step=lambda call: None)
    loads = ExpertLoads(cast(Any, SimpleNamespace(rank=1, session=SimpleNamespace(steps=steps))))
    ones = torch.ones(4, dtype=torch.int64)
    loads.add("moe", Load(ones, ones))
    loads.add("moe", Load(ones, ones))
    assert loads._windows["moe"].chosen.tolist() == [2, 2, 2, 2]
    there = torch.ones(4, dtype=torch.int64, device="meta")
    loads.add("moe", Load(there, there))
    assert loads._windows["moe"].chosen.device.type == "meta"
