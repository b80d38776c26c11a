"""Published tables beside predictions for a library's models: how far off presets may be."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.programs.told_tables import TABLES, mean_error, told

WITHIN = {
    "megatron": 0.12, "megatron-degrees": 0.20, "recomputation": 0.10, "selective": 0.10, "resnet": 0.10,
    "torchtitan": 0.10, "fms": 0.15, "foundry-a100": 0.10, "foundry-a100-40": 0.10, "foundry-h100": 0.15,
}  # fmt: skip
"""Mean errors. Not in it: DeepSpeed's ZeRO-3 of 2021, whose exchanges took several times what ours do."""


@pytest.mark.full("slow")
@pytest.mark.timeout(900)
def test_tables_are_told_and_intervals_hold_nine_of_ten_rows() -> None:
    rows = {table: told(table) for table in WITHIN}
    errors = {table: mean_error(found) for table, found in rows.items()}
    assert {table for table, error in errors.items() if error > WITHIN[table]} == set(), errors
    every = list(chain.from_iterable(rows.values()))
    outside = [(each.row.name, each.error) for each in every if not each.is_inside]
    assert len(outside) <= len(every) // 10, outside
    assert set(TABLES) - set(WITHIN) == {"megatron-zero"}
