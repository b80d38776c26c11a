"""Reading tensors of a checkpoint: DCP's planner says which boxes are needed; all that is read is verified.

[Note: read once a host] What every rank needs whole, as in a replicated training, is divided among the ranks of
each host: each reads and verifies its part, into memory that all of them map. So what was verified is what all
load, and no bytes are hashed twice. That memory belongs to all: what a rank keeps of it is to be a copy.
"""

from __future__ import annotations

import hashlib
import json
import mmap
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

from ...checkpoint.listing import damaged_piece, require_file, require_header
from ...checkpoint.manifest import Manifest, PieceEntry
from ...checkpoint.shard_file import ITEM_BYTES, read_and_hash, tensor_bytes
from ...checkpoint.writer_client import Writer
from ...comm.transport.host_memory import Peer, Unavailable, aligned, file_identity, find_peers
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...parallel.split import PartBox, Split, boxes_here
from .state import OWN_PREFIX

_THREADS = 4
_LEAST_SHARED_BYTES = 16 << 20
"""Less than this is read faster than memory is shared."""
_MORE_BYTES = 4 << 20
"""A save needs some more than its tensors: then it finds this memory large enough."""

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A box of a piece that is read: where in the piece, where in the target, and how much, one number a dimension."""


@dataclass(frozen=True, slots=True)
class _Read:
    tensor: str
    piece: PieceEntry
    target: torch.Tensor
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class SharedRoom:
    """Memory of this host for the tensors that all ranks need whole. See [Note: read once a host]."""

    tensors: Mapping[str, torch.Tensor]
    """Flat and uint8, by name."""
    mine: frozenset[str]
    """Those that this rank reads and verifies."""
    reads_direct: bool
    """Whether no other rank of this host reads the same: the page cache is of no use then."""


NO_ROOM = SharedRoom({}, frozenset(), reads_direct=False)


def shared_room(
    here: World,
    manifest: Manifest,
    references: Mapping[str, torch.Tensor],
    writer: Writer,
    splits: Mapping[str, Split] | None = None,
) -> SharedRoom:
    """Return room for what all ranks need whole; it is empty where there is no gain. To be called by all ranks.

    It lies in the memory of each rank's `writer`, whose pages a later save finds there.
    """
    if here.size == 1:
        return SharedRoom({}, frozenset(), reads_direct=True)
    names = [
        name
        for name, each in references.items()
        if not isinstance(each, DTensor) and not name.startswith(OWN_PREFIX) and name not in (splits or {})
    ]
    sizes = {name: tensor_bytes(manifest.tensors[name].dtype, manifest.tensors[name].shape) for name in names}
    digest_of_names = hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()
    digests = all_gather_json(here, "checkpoint/names", digest_of_names)
    if len(set(digests)) > 1 or sum(sizes.values()) < _LEAST_SHARED_BYTES:
        return NO_ROOM
    try:
        peers = find_peers(here)
    except Unavailable:
        return NO_ROOM
    loads, places = [0] * len(peers), {}
    for name in sorted(names, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        places[name] = owner, loads[owner]
        loads[owner] += aligned(sizes[name])
    memory = _map_all(here, peers, loads, writer)
    if memory is None:
        return NO_ROOM
    me = [peer.rank for peer in peers].index(here.rank)
    return SharedRoom(
        {name: memory[owner][at : at + sizes[name]] for name, (owner, at) in places.items()},
        frozenset(name for name, (owner, _) in places.items() if owner == me),
        reads_direct=True,
    )


def _map_all(
    here: World, peers: Sequence[Peer], loads: Sequence[int], writer: Writer
) -> list[torch.Tensor] | None:
    """Return the memory of all ranks of this host, as uint8 tensors; None, on all ranks, where one cannot."""
    mapped: list[torch.Tensor] = []
    problem, descriptor = "", -1
    try:
        writer.memory(max(loads) + _MORE_BYTES)
        descriptor = writer.descriptor
    except (OSError, ValueError) as reason:
        problem = str(reason)
    seen = all_gather_json(here, "checkpoint/memory", [descriptor, *file_identity(descriptor)])
    try:
        for peer, load in zip(peers, loads, strict=True):
            number, *identity = seen[peer.rank]
            mapped.append(_map(Path(f"/proc/{peer.process}/fd/{number}"), identity, load))
    except OSError as reason:
        problem = problem or str(reason)
    return None if any(all_gather_json(here, "checkpoint/mapped", problem)) else mapped


def _map(path: Path, identity: Sequence[int], nbytes: int) -> torch.Tensor:
    with path.open("r+b", buffering=0) as file:
        if file_identity(file.fileno()) != list(identity):
            raise OSError(f"{path} is not the memory of its rank's writer")
        return torch.frombuffer(mmap.mmap(file.fileno(), max(1, nbytes)), dtype=torch.uint8)


def read_tensors(
    folder: Path,
    manifest: Manifest,
    references: Mapping[str, torch.Tensor],
    room: SharedRoom = NO_ROOM,
    splits: Mapping[str, Split] | None = None,
) -> dict[str, torch.Tensor]:
    """Return what this rank needs of tensors of a checkpoint, in new memory of the CPU or in `room`.

    What other ranks read is in `room` when all ranks have returned.

    Args:
        folder: directory of the checkpoint.
        manifest: its manifest.
        references: the tensors by name, as they are spread here: of a DTensor the local shard is returned.
        room: of the tensors that the ranks of this host read for each other.
        splits: which tensors are parts of the ones in the checkpoint; that part is returned.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    buffers = {
        name: _view(room.tensors[name], manifest.tensors[name].dtype, each.shape)
        if name in room.tensors
        else _buffer(manifest.tensors[name].dtype, each)
        for name, each in references.items()
    }
    reads = [
        each
        for each in _plan(manifest, references, buffers, splits or {})
        if each.tensor not in room.tensors or each.tensor in room.mine
    ]
    for name in sorted({each.piece.file for each in reads}):
        require_file(folder, name, manifest)
        with (folder / name).open("rb") as file:
            require_header(folder / name, file.read(manifest.files[name].header_bytes), manifest)
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(lambda each: _fill(folder, manifest, each, room.reads_direct), reads):
            pass
    return buffers


def _buffer(dtype: str, reference: torch.Tensor) -> torch.Tensor:
    local = reference.to_local() if isinstance(reference, DTensor) else reference
    # NumPy asks for huge pages: taking small ones costs as long as reading what goes into them.
    # One element at least: bytes of none, such as a shard without rows, cannot be viewed as another type.
    memory = np.empty(max(tensor_bytes(dtype, tuple(local.shape)), ITEM_BYTES[dtype]), np.uint8)
    return torch.from_numpy(memory).view(getattr(torch, dtype))[: local.numel()].view(local.shape)


def _view(memory: torch.Tensor, dtype: str, shape: torch.Size) -> torch.Tensor:
    if not memory.numel():
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return memory.view(getattr(torch, dtype)).view(shape)


def _plan(
    manifest: Manifest,
    references: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    splits: Mapping[str, Split],
) -> list[_Read]:
    whole = {name: each for name, each in references.items() if name not in splits}
    metadata = Metadata({
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, manifest.tensors[name].dtype)),
            size=torch.Size(manifest.tensors[name].shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
                for piece in manifest.tensors[name].pieces
            ],
        )
        for name in whole
    })  # fmt: skip
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(whole, metadata, is_coordinator=False)
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
    for item in planner.create_local_plan().items:
        assert item.storage_index.offset is not None, f"{item.storage_index.fqn} is a tensor"
        key = item.storage_index.fqn, tuple(item.storage_index.offset)
        boxes.setdefault(key, []).append(
            (tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths))
        )
    for name, split in splits.items():
        for part in boxes_here(references[name], split):
            for piece in manifest.tensors[name].pieces:
                box = _common(piece, part)
                if box is not None:
                    boxes.setdefault((name, piece.offsets), []).append(box)
    pieces = {(name, piece.offsets): piece for name in references for piece in manifest.tensors[name].pieces}
    return [_Read(key[0], pieces[key], buffers[key[0]], tuple(each)) for key, each in boxes.items()]


def _common(piece: PieceEntry, part: PartBox) -> Box | None:
    """Return what a piece has of a part that this rank needs; None if that is nothing."""
    from_, to, count = [], [], []
    for dimension, first in enumerate(part.begin):
        low = max(piece.offsets[dimension], part.offsets[dimension])
        high = min(
            piece.offsets[dimension] + piece.shape[dimension], part.offsets[dimension] + part.shape[dimension]
        )
        if low >= high:
            return None
        from_.append(low - piece.offsets[dimension])
        to.append(first + low - part.offsets[dimension])
        count.append(high - low)
    return tuple(from_), tuple(to), tuple(count)


def _fill(folder: Path, manifest: Manifest, read: _Read, direct: bool) -> None:
    piece, dtype = read.piece, manifest.tensors[read.tensor].dtype
    target = read.target
    straight = _as_one_run(read)
    # Where the piece is one run of bytes in its target it is read into it, else into memory of its own.
    into = torch.empty(piece.shape, dtype=target.dtype) if straight is None else straight
    if not into.numel():
        return
    content = memoryview(into.reshape(-1).view(torch.uint8).numpy().data)
    path = folder / piece.file
    found = read_and_hash(path, piece.begin, content, direct=direct)
    if len(content) != tensor_bytes(dtype, piece.shape) or found != piece.sha256:
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
