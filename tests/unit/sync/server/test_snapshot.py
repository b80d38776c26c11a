"""Snapshots on the disk: the last whole one stays whatever happens to the next; a damaged one is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farandole.core.framing import FrameError
from farandole.sync.server.channel import ServerMessage
from farandole.sync.server.loop import SNAPSHOT, SnapshotWriter, read_snapshot, write_snapshot

SAVED = [ServerMessage({"n": 1}, [torch.arange(5.0), torch.empty(0, 3)]), ServerMessage({}, [torch.tensor(True)])]


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path) == []
    write_snapshot(tmp_path, SAVED)
    for found, expected in zip(read_snapshot(tmp_path), SAVED, strict=True):
        assert found.values == expected.values
        assert all(map(torch.equal, found.tensors, expected.tensors))


def test_one_that_cannot_be_written_leaves_the_last(tmp_path: Path) -> None:
    write_snapshot(tmp_path, SAVED)
    writer = SnapshotWriter(tmp_path)
    writer.begin([ServerMessage({"n": 2}), ServerMessage({}, [torch.zeros(1).to(torch.float8_e5m2)])], {0: 2})
    with pytest.raises(FrameError, match="float8_e5m2"):
        writer.ended(wait=True)
    writer.close()
    assert read_snapshot(tmp_path)[0].values == {"n": 1}
    assert not writer.is_busy


@pytest.mark.parametrize("left_out", [1, 17, 40])
def test_one_that_was_cut_is_an_error(left_out: int, tmp_path: Path) -> None:
    write_snapshot(tmp_path, SAVED[:1])
    path = tmp_path / SNAPSHOT
    path.write_bytes(path.read_bytes()[:-left_out])
    with pytest.raises(FrameError):
        read_snapshot(tmp_path)
