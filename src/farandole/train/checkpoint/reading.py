"""Reading tensors of a checkpoint: DCP's planner says which boxes are needed; all that is read is verified."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from ...checkpoint.dtypes import tensor_bytes
from ...checkpoint.manifest import Manifest, PieceEntry
from ...checkpoint.shard_file import digest
from ...checkpoint.verify import damaged_piece, require_file, require_header
from ...core.vocabulary.errors import CheckpointError

_THREADS = 4

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A box of a piece that is read: where in the piece, where in the target, and how much, one number a dimension."""


@dataclass(frozen=True, slots=True)
class _Read:
    tensor: str
    piece: PieceEntry
    target: torch.Tensor
    boxes: tuple[Box, ...]


def read_tensors(
    folder: Path, manifest: Manifest, references: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what this rank needs of tensors of a checkpoint, in new memory of the CPU.

    Args:
        folder: directory of the checkpoint.
        manifest: its manifest.
        references: the tensors by name, as they are spread here: of a DTensor the local shard is returned.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    buffers = {name: _buffer(manifest.tensors[name].dtype, each) for name, each in references.items()}
    reads = _plan(manifest, references, buffers)
    for name in sorted({each.piece.file for each in reads}):
        require_file(folder, name, manifest)
        with (folder / name).open("rb") as file:
            require_header(folder / name, file.read(manifest.files[name].header_bytes), manifest)
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(lambda each: _fill(folder, manifest, each), reads):
            pass
    return buffers


def _buffer(dtype: str, reference: torch.Tensor) -> torch.Tensor:
    local = reference.to_local() if isinstance(reference, DTensor) else reference
    # NumPy asks for huge pages: taking small ones costs as long as reading what goes into them.
    memory = np.empty(tensor_bytes(dtype, tuple(local.shape)), np.uint8)
    return torch.from_numpy(memory).view(getattr(torch, dtype)).view(local.shape)


def _plan(
    manifest: Manifest, references: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> list[_Read]:
    metadata = Metadata({
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, manifest.tensors[name].dtype)),
            size=torch.Size(manifest.tensors[name].shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
                for piece in manifest.tensors[name].pieces
            ],
        )
        for name in references
    })  # fmt: skip
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(references), metadata, is_coordinator=False)
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
    for item in planner.create_local_plan().items:
        assert item.storage_index.offset is not None, f"{item.storage_index.fqn} is a tensor"
        key = item.storage_index.fqn, tuple(item.storage_index.offset)
        boxes.setdefault(key, []).append(
            (tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths))
        )
    pieces = {(name, piece.offsets): piece for name in references for piece in manifest.tensors[name].pieces}
    return [_Read(key[0], pieces[key], buffers[key[0]], tuple(each)) for key, each in boxes.items()]


def _fill(folder: Path, manifest: Manifest, read: _Read) -> None:
    piece, dtype = read.piece, manifest.tensors[read.tensor].dtype
    target = read.target
    straight = _as_one_run(read)
    # Where the piece is one run of bytes in its target it is read into it, else into memory of its own.
    into = torch.empty(piece.shape, dtype=target.dtype) if straight is None else straight
    if not into.numel():
        return
    content = memoryview(into.reshape(-1).view(torch.uint8).numpy().data)
    path = folder / piece.file
    _read_all(path, piece.begin, content)
    if len(content) != tensor_bytes(dtype, piece.shape) or digest(content) != piece.sha256:
        raise damaged_piece(path, read.tensor)
    if straight is None:
        for from_, to, count in read.boxes:
            _narrow(target, to, count).copy_(_narrow(into, from_, count))


def _as_one_run(read: _Read) -> torch.Tensor | None:
    if len(read.boxes) != 1 or read.boxes[0][2] != read.piece.shape:
        return None
    view = _narrow(read.target, read.boxes[0][1], read.boxes[0][2])
    return view if view.is_contiguous() else None


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    for dimension, (at, count) in enumerate(zip(offsets, counts, strict=True)):
        tensor = tensor.narrow(dimension, at, count)
    return tensor


def _read_all(path: Path, begin: int, content: memoryview) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            at = 0
            while at < len(content):
                count = os.preadv(file.fileno(), [content[at:]], begin + at)
                if not count:
                    raise CheckpointError(f"{path} is truncated", is_input=True)
                at += count
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True) from None
