"""What of a save is copied while training goes on: parameters and optimizer states, until the next optimizer step.

[Note: provably one moment] Only an optimizer's step should change these tensors, and it waits for the copy, by a
hook of torch that all optimizers call. Whatever else writes to them meanwhile, such as ``parameter.data``, a mean
of weights or a library, is seen by the kernel (`PageWatch`): each piece is copied, and then asked for. If it
was written, the save fails by the tensor's name, and later saves copy that at once. Memory that cannot be watched
so (shared or pinned memory, files, devices, older kernels) is copied at once from the first save on.

A watched page costs a fault when it is written. So a piece is watched until it is copied and no longer, and the
steps that write to it find plain memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...checkpoint.shard_file import ITEM_BYTES, Piece, digest, lay_out
from ...checkpoint.writer_client import Writer
from ...comm.device.accelerator import is_in_use
from ...comm.world.world import World
from ...core.host.process_status import PAGE_BYTES, PageWatch, PrivateMemory
from ...core.vocabulary.errors import CheckpointError
from ...parallel.split import Split, boxes_here
from .optimizers import Item

# The copy of a rank's tensors in memory that its writer shares: afterwards training may go on.


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A file in memory, and what the manifest will say of it."""

    nbytes: int
    header_bytes: int
    header_sha256: str
    pieces: tuple[Piece, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shape of the tensor that each piece belongs to."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each piece in the file, in bytes."""
        return [(piece.begin, piece.begin + piece.nbytes) for piece in self.pieces]

    def describe(self, name: str, hashes: Sequence[str], own: Any) -> dict[str, Any]:
        """Return what rank 0 needs for the manifest, as JSON."""
        return {
            "file": name,
            "bytes": self.nbytes,
            "header_bytes": self.header_bytes,
            "header_sha256": self.header_sha256,
            "pieces": [
                [piece.tensor, piece.dtype, shape, piece.offsets, piece.shape, piece.begin, sha256]
                for piece, shape, sha256 in zip(self.pieces, self.shapes, hashes, strict=True)
            ],
            "own": own,
        }


def copy_to_memory(
    items: Sequence[Item],
    tensors: Mapping[str, torch.Tensor],
    writer: Writer,
    later: LaterCopy | None = None,
    splits: Mapping[str, Split] | None = None,
) -> MemoryFile:
    """Copy the boxes `items` of `tensors` to the writer's memory, laid out as their file; some of them `later`.

    `splits` tells which tensors are parts of whole ones.
    """
    parts = splits or {}
    items = in_file_order(items)
    head, pieces, nbytes = lay_out([(name, dtype, offsets, shape) for name, dtype, _, offsets, shape in items])
    memory = writer.memory(nbytes)
    memory[: len(head)] = head
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    for piece in pieces:
        if piece.nbytes:
            target = whole[piece.begin : piece.begin + piece.nbytes]
            source = box_of(tensors[piece.tensor], piece.offsets, piece.shape, parts.get(piece.tensor))
            if later is None or not later.take(piece.tensor, source, target):
                target.view(source.dtype).view(source.shape).copy_(source)
    return MemoryFile(nbytes, len(head), digest(head), tuple(pieces), tuple(item[2] for item in items))


def in_file_order(items: Sequence[Item]) -> list[Item]:
    """Return `items` in the order of their file.

    Torch views bytes as a type only where they begin at a multiple of its item size.
    Types with larger items come first in the file: then each piece begins at such a multiple, and there is still
    no gap, which safetensors would refuse and no hash would cover.
    """
    return sorted(items, key=lambda item: -ITEM_BYTES[item[1]])


def whole_items(tensors: Mapping[str, torch.Tensor]) -> list[Item]:
    """Return one box for each of a rank's own tensors."""
    described = [
        (name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
    ]
    return [(name, dtype, shape, (0,) * len(shape), shape) for name, dtype, shape in described]


def box_of(
    tensor: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], split: Split | None = None
) -> torch.Tensor:
    """Return a view of the box of a tensor that begins at `offsets`, of a DTensor one in the local shard.

    `split` tells which part of a whole tensor it is: the box is one of the whole.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not all(shape):
        return local.new_empty(shape)
    for part in boxes_here(tensor, split):
        places = [at - first for at, first in zip(offsets, part.offsets, strict=True)]
        if all(at >= 0 and at + n <= most for at, n, most in zip(places, shape, part.shape, strict=True)):
            for dimension, (at, first, count) in enumerate(zip(places, part.begin, shape, strict=True)):
                local = local.narrow(dimension, at + first, count)
            return local
    raise AssertionError(f"the box {shape} at {offsets} is not on this rank")


# The writer of this rank, kept from one save to the next: its process runs, and its memory has pages.
#
# The first save pays for the pages: measured, 0.4 s for 500 MB that later ones copy in 0.08 s. So the memory
# stays until the world closes.


class WriterPool:
    """Writers of one world: those in use belong to their users, and one that is free is kept."""

    def __init__(self, here: World) -> None:
        self._free: Writer | None = None
        here.session.call_on_close(self.close)
        here.session.call_in_forked_child(self.forget)

    def take(self) -> Writer:
        """Return a writer that has no other user."""
        writer, self._free = self._free, None
        return Writer() if writer is None else writer

    @property
    def has_free(self) -> bool:
        """Whether `take` returns one that has been used before."""
        return self._free is not None

    def give_back(self, writer: Writer) -> None:
        """Keep a writer for the next user."""
        if self._free is None:
            self._free = writer
        else:
            writer.close()

    def close(self) -> None:
        """End the free writer."""
        writer, self._free = self._free, None
        if writer is not None:
            writer.close()

    def forget(self) -> None:
        """In a forked child: leave the parent's writer alone."""
        writer, self._free = self._free, None
        if writer is not None:
            writer.forget()


LEAST_BYTES = 1 << 20
"""Smaller pieces are copied faster than they are watched."""
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    tensor: str
    source: torch.Tensor
    """Keeps the memory, also when the parameter gets other memory."""
    storage_bytes: int
    begin: int
    end: int
    """Addresses of its whole pages."""
    target: int
    """Address."""


class LaterCopy:
    """The pieces of one save that are copied later. See [Note: provably one moment]."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: of the tensors that change in optimizer steps only."""
        self._names = names
        self.taken: list[str] = []
        """The tensor of each piece."""
        self._pieces: list[_Piece] = []
        self._target: torch.Tensor | None = None
        self._is_over = threading.Event()
        self._process = os.getpid()
        self._watch: PageWatch | None = None
        self._memory: PrivateMemory | None = None
        try:
            self._watch = PageWatch()
            self._memory = PrivateMemory()
        except OSError:
            self._names = frozenset()

    def take(self, name: str, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Copy `source` to `target`, flat uint8 memory, later; return False if that must be at once."""
        if name not in self._names or self._watch is None or self._memory is None:
            return False
        if source.device.type != "cpu" or source.nbytes < LEAST_BYTES or not source.is_contiguous():
            return False
        if is_in_use() and source.is_pinned():
            return False
        address = source.data_ptr()
        begin, end = -(-address // PAGE_BYTES) * PAGE_BYTES, (address + source.nbytes) // PAGE_BYTES * PAGE_BYTES
        if not self._memory.has(begin, end):
            return False
        try:
            self._watch.add(begin, end)
        except OSError:
            return False
        head, tail = begin - address, end - address
        flat = source.view(-1).view(torch.uint8)
        target[:head].copy_(flat[:head])  # the pages at its ends have other data too
        target[tail:].copy_(flat[tail:])
        storage_bytes = source.untyped_storage().nbytes()
        self._pieces.append(_Piece(name, source, storage_bytes, begin, end, target.data_ptr() + head))
        self._target = target
        self.taken.append(name)
        return True

    def copy(self) -> set[str]:
        """Copy all pieces, in another thread than the one that trains; return what was written meanwhile."""
        written: set[str] = set()
        try:
            for piece in self._pieces:
                if not self._copy(piece):
                    written.add(piece.tensor)
        finally:
            self.end()
        return written

    def end(self) -> None:
        """Let optimizers go on. May be called twice."""
        if self._watch is not None and not self._is_over.is_set():
            for piece in self._pieces:
                self._watch.remove(piece.begin, piece.end)
            self._watch.close()
        self._pieces.clear()
        self._target = None
        self._is_over.set()

    def wait(self) -> float:
        """Return when all is copied, and the seconds that took."""
        if self._is_over.is_set() or os.getpid() != self._process:
            return 0.0
        begin = time.monotonic()
        self._is_over.wait()
        return time.monotonic() - begin

    def _copy(self, piece: _Piece) -> bool:
        assert self._watch is not None, "pieces are watched"
        for at in range(piece.begin, piece.end, _CHUNK_BYTES):
            if piece.source.untyped_storage().nbytes() != piece.storage_bytes:
                return False  # its memory was given back: nothing may read it
            count = min(_CHUNK_BYTES, piece.end - at)
            ctypes.memmove(piece.target + at - piece.begin, at, count)  # without the GIL
        is_whole = not self._watch.was_written(piece.begin, piece.end)
        self._watch.remove(piece.begin, piece.end)
        return is_whole


def changed_meanwhile(names: set[str]) -> CheckpointError:
    """Return the error for tensors that were written while they were copied."""
    first, more = min(names), len(names) - 1
    return CheckpointError(
        f"{first}{f' and {more} more' if more else ''} changed after the save began and before the next optimizer "
        "step, by something else than an optimizer's step",
        remedy="it is copied at once in the next saves; change it before the save, or give asynchronous=False",
    )


class LaterCopies:
    """The later copies of one saver's saves, one after the other, which every optimizer's step waits for."""

    def __init__(self, on_wait: Callable[[float], object]) -> None:
        """`on_wait` is called after a step has waited, with the seconds."""
        self._on_wait = on_wait
        self.last: LaterCopy | None = None
        self.at_once: set[str] = set()
        """Tensors that others than optimizers change."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def begin(self, names: frozenset[str]) -> LaterCopy:
        """Return a new one, for tensors of `names`."""
        self.last = LaterCopy(names - self.at_once)
        return self.last

    def finish(self, copy: LaterCopy) -> None:
        """Carry one out, in another thread. Raises `CheckpointError` when tensors were written meanwhile."""
        changed = copy.copy()
        if changed:
            self.at_once |= changed
            raise changed_meanwhile(changed)

    def close(self) -> None:
        """Wait before steps no more. May be called twice."""
        self._hook.remove()

    def _before_step(self, *_: object) -> None:
        seconds = 0.0 if self.last is None else self.last.wait()
        if seconds:
            self._on_wait(seconds)
