"""Checkpoints that are put together by hand: a model of three tensors, in files of two ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from farandole.checkpoint.directory import commit_manifest, make_step_directory, shard_name, step_directory
from farandole.checkpoint.manifest import FileEntry, Manifest, PieceEntry, TensorEntry
from farandole.checkpoint.shard_file import digest, lay_out

NONCE = "0123456789abcdef"
TENSORS: dict[str, tuple[str, np.ndarray]] = {
    "model/rows": ("float32", np.arange(24, dtype=np.float32).reshape(6, 4)),
    "model/columns": ("int64", np.arange(12, dtype=np.int64).reshape(2, 6)),
    "model/number": ("float32", np.array(2.5, np.float32)),
}
"""By name: type, and value."""
BOXES: list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = [
    [("model/rows", (0, 0), (4, 4)), ("model/columns", (0, 0), (2, 2))],
    [("model/rows", (4, 0), (2, 4)), ("model/columns", (0, 2), (2, 4)), ("model/number", (), ())],
]
"""What each rank wrote: name, offsets and shape."""
STATE = {
    "modules": {
        "model": {
            "rows": {"$tensor": "model/rows"},
            "columns": {"$tensor": "model/columns"},
            "tied": {"$tensor": "model/rows"},
            "number": {"$tensor": "model/number"},
            "_extra_state": {"version": 3},
        }
    },
    "optimizers": {
        "optimizer": {
            "state": {"model/rows": {"step": 3.0, "exp_avg": {"$tensor": "model/rows"}}},
            "other_state": {},
            "groups": [{"lr": 0.5, "params": ["model/number", "model/rows"]}],
            "rest": {},
        }
    },
}


def save_by_hand(directory: Path, step: int, *, is_whole: bool = True) -> None:
    """Make a checkpoint of `TENSORS`, or, not whole, what a save leaves that was killed before its manifest."""
    folder = make_step_directory(directory, step)
    files: dict[str, FileEntry] = {}
    pieces: dict[str, list[PieceEntry]] = {name: [] for name in TENSORS}
    for rank, boxes in enumerate(BOXES):
        name = shard_name(rank, len(BOXES), NONCE)
        header, placed, nbytes = lay_out(
            [(tensor, TENSORS[tensor][0], offsets, shape) for tensor, offsets, shape in boxes]
        )
        content = bytearray(header)
        for piece in placed:
            box = tuple(slice(at, at + count) for at, count in zip(piece.offsets, piece.shape, strict=True))
            data = np.ascontiguousarray(TENSORS[piece.tensor][1][box]).tobytes()
            assert len(content) == piece.begin
            content += data
            pieces[piece.tensor].append(PieceEntry(name, piece.begin, piece.offsets, piece.shape, digest(data)))
        assert len(content) == nbytes
        (folder / name).write_bytes(content)
        files[name] = FileEntry(nbytes, len(header), digest(header))
    if not is_whole:
        return
    tensors = {
        name: TensorEntry(dtype, value.shape, tuple(pieces[name])) for name, (dtype, value) in TENSORS.items()
    }
    versions = {"farandole": "1", "torch": "2"}
    manifest = Manifest(
        step, len(BOXES), "2026-01-01T00:00:00+00:00", versions, None, files, tensors, STATE, ({}, {})
    )
    commit_manifest(directory, manifest, NONCE)


def files_of(directory: Path, step: int) -> list[Path]:
    """Return all files of a checkpoint."""
    return sorted(step_directory(directory, step).iterdir())
