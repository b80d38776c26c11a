"""How soon a link is looked at again: from what the next probe costs, not from what the last one did."""

from __future__ import annotations

import pytest

from farandole.comm.autotune.probe import probe_seconds
from farandole.core.link import LinkModel


@pytest.mark.parametrize("bits_per_second", [1e7, 1e8, 1e9, 1e10])
def test_a_probe_of_any_link_is_short(bits_per_second: float) -> None:
    link = LinkModel(bits_per_second / 8, 2e-4, 1e-9, 2e-4)
    assert 0.001 < probe_seconds(link, 2) < (0.7 if bits_per_second < 1e8 else 0.15)
