"""Every bit of a checkpoint counts: one that is altered or cut is found out, and the one before it is offered."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from farandole.checkpoint.directory import step_directory
from farandole.checkpoint.manifest import NAME
from farandole.checkpoint.verify import last_good_step, verify_checkpoint
from farandole.core.vocabulary.errors import CheckpointError
from tests.unit.checkpoint.made import files_of, save_by_hand


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_by_hand(tmp_path, step)
    return tmp_path


def test_a_whole_one_is_verified(directory: Path) -> None:
    assert verify_checkpoint(directory, 2).step == 2


def test_random_flips_and_cuts_are_all_found(directory: Path) -> None:
    draw = random.Random(5)
    files = files_of(directory, 2)
    assert len(files) == 3
    for number in range(600):
        path = draw.choice(files)
        before = path.read_bytes()
        if number % 4:
            at = draw.randrange(len(before))
            after = bytearray(before)
            after[at] ^= 1 << draw.randrange(8)
            what = f"bit {at} of {path.name}"
        else:
            after = bytearray(before[: draw.randrange(len(before))])
            what = f"{path.name} cut to {len(after)} bytes"
        path.write_bytes(after)
        with pytest.raises(CheckpointError) as raised:
            verify_checkpoint(directory, 2)
        assert raised.value.exit_code == 2, what
        assert path.name in str(raised.value), what
        path.write_bytes(before)
    verify_checkpoint(directory, 2)


@pytest.mark.parametrize("number", range(3))
def test_without_one_of_its_files_it_is_no_checkpoint(directory: Path, number: int) -> None:
    files_of(directory, 2)[number].unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        verify_checkpoint(directory, 2)
    assert last_good_step(directory, 3) == 1


def test_a_manifest_of_another_step_is_none_of_this_one(directory: Path) -> None:
    one, two = (step_directory(directory, step) / NAME for step in (1, 2))
    two.write_bytes(one.read_bytes())
    with pytest.raises(CheckpointError, match="step 1"):
        verify_checkpoint(directory, 2)


def test_a_newer_version_is_refused(directory: Path) -> None:
    path = step_directory(directory, 2) / NAME
    import hashlib

    body = path.read_bytes().partition(b"\n")[2].replace(b'"version":1', b'"version":2', 1)
    path.write_bytes(b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body)
    with pytest.raises(CheckpointError, match=r"format version 2.*newer"):
        verify_checkpoint(directory, 2)
