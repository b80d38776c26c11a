"""Checkpoints of earlier versions: what codecs kept goes on, where the layout was written in other words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farandole.train.checkpoint import loader


@pytest.mark.parametrize(
    ("saved", "goes_on"),
    [
        ("elements, auto, hosts 1 x 2, buckets 1 2", True),
        ("elements, auto, hosts 1 x 2, buckets 1 2, switches 0", True),
        ("elements, auto, hosts 1 x 2, buckets 1 2, switches 2", False),
        ("elements, auto, hosts 2 x 1, buckets 1 2, switches 0", False),
    ],
)
def test_each_rank_goes_on_with_what_it_kept_in_the_same_layout(
    saved: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "residual_layout", lambda _: "elements, auto, hosts 1 x 2, buckets 1 2")
    loading: Any = object.__new__(loader._Loading)
    ranks = [{"exchange": {"layout": saved}} for _ in range(2)]
    loading._manifest = SimpleNamespace(ranks=ranks, world_size=2)
    loading._ranks, loading._here = SimpleNamespace(own=0), SimpleNamespace(size=2)
    loading._training = SimpleNamespace(model=None)
    assert loading._keeps_own is goes_on
