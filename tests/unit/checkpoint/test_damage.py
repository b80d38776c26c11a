"""Every bit of a checkpoint counts: one that is altered or cut is found out, and the one before it is offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.checkpoint.directory import step_directory
from farandole.checkpoint.listing import verify_checkpoint
from farandole.checkpoint.manifest import NAME
from farandole.core.vocabulary.errors import CheckpointError
from tests.unit.checkpoint.damages import damage
from tests.unit.checkpoint.made import save_by_hand


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_by_hand(tmp_path, step)
    return tmp_path


def test_a_whole_one_is_verified(directory: Path) -> None:
    assert verify_checkpoint(directory, 2).step == 2


@pytest.mark.full("further")
def test_random_flips_and_cuts_are_all_found_and_the_one_before_is_offered(tmp_path: Path) -> None:
    """`benchmarks/checkpoint_crashes.py damage` has 10,000."""
    found = damage(tmp_path, 300, seed=5)
    assert not found["faults"]
    assert found["flips"] == 225


def test_a_manifest_of_another_step_is_none_of_this_one(directory: Path) -> None:
    one, two = (step_directory(directory, step) / NAME for step in (1, 2))
    two.write_bytes(one.read_bytes())
    with pytest.raises(CheckpointError, match="step 1"):
        verify_checkpoint(directory, 2)
