"""A checkpoint made from weights in another format, by one process and without a world."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ....checkpoint.directory import (
    FILE_MODE,
    commit_manifest,
    make_step_directory,
    remove_leftovers,
    saved_steps,
    shard_name,
    step_directory,
    sync_directory,
)
from ....checkpoint.encoding import encode
from ....checkpoint.lock import DirectoryLock
from ....checkpoint.shard_file import digest, lay_out
from ....comm.messages import bytes_of
from ....core.vocabulary.errors import CheckpointError
from ..later_copy import MemoryFile, box_of, in_file_order
from ..optimizers import Item, local_items
from ..saver import make_manifest
from ..values import TensorsAside
from .sources import Weights, read_dcp, read_safetensors, read_torch

_READERS: Mapping[str, Callable[[Path, str | None], Weights]] = {
    "torch": read_torch, "dcp": read_dcp, "safetensors": read_safetensors,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MadeCheckpoint:
    """What `make_checkpoint` wrote."""

    step: int
    names: int
    """Entries of the state dict."""
    nbytes: int
    """Size of the tensors, tied ones once."""
    left_out: tuple[str, ...]
    """Entries of the source beside the module."""
    is_unwrapped: bool
    """Whether ``module.``, which DistributedDataParallel puts before names, was removed."""


def make_checkpoint(
    source: Path,
    directory: Path,
    *,
    from_: Literal["torch", "dcp", "safetensors"],
    module: str | None = None,
    step: int | None = None,
) -> MadeCheckpoint:
    """Make a checkpoint of the weights in `source`, for `fd.load` of a model alone. They go through memory.

    Args:
        source: a file of `torch.save`, a directory of torch.distributed.checkpoint, or a safetensors file, its
            index or the directory of either.
        directory: of checkpoints. Made if it is missing.
        from_: the format of `source`.
        module: the entry of `source` that holds the state dict; by default it is found, if only one fits.
        step: the number of the checkpoint; by default the one that `source` names, or 0.

    Raises:
        CheckpointError: `source` cannot be read, needs pickle, or has a value without a form in a checkpoint;
            `directory` cannot be written, or has a checkpoint of that step.
    """
    weights = _READERS[from_](source, module)
    number = step if step is not None else weights.step or 0
    aside = TensorsAside(ties=True)
    shared = {"modules": {"model": encode(dict(weights.state), "model", aside)}, "optimizers": {}}
    lock = DirectoryLock(directory, socket.gethostname(), secrets.token_hex(16))
    try:
        if number in saved_steps(directory):
            raise CheckpointError(
                f"{directory} has a checkpoint of step {number} already", is_input=True,
                remedy="give another --step, or another directory",
            )  # fmt: skip
        nbytes = _write(directory, number, aside.tensors, shared)
    except OSError as problem:
        raise CheckpointError(f"cannot write to {directory}: {problem.strerror}", is_input=True) from None
    finally:
        lock.release()
    return MadeCheckpoint(number, len(weights.state), nbytes, weights.left_out, weights.is_unwrapped)


def _write(directory: Path, step: int, tensors: Mapping[str, torch.Tensor], shared: Any) -> int:
    nonce = secrets.token_hex(8)
    name = shard_name(0, 1, nonce)
    make_step_directory(directory, step)
    try:
        file = _write_file(step_directory(directory, step) / name, in_file_order(local_items(tensors)), tensors)
        commit_manifest(directory, make_manifest(step, [{**file, "file": name}], shared, None), nonce)
    finally:
        with suppress(OSError, CheckpointError):
            remove_leftovers(directory, step)
    return int(file["bytes"] - file["header_bytes"])


def _write_file(path: Path, items: Sequence[Item], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    head, pieces, nbytes = lay_out([(name, dtype, offsets, shape) for name, dtype, _, offsets, shape in items])
    hashes = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file, torch.no_grad():
        file.write(head)
        for piece in pieces:
            box = box_of(tensors[piece.tensor], piece.offsets, piece.shape)
            content = bytes_of(box).numpy().data
            hashes.append(digest(content))
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
    described = MemoryFile(nbytes, len(head), digest(head), tuple(pieces), tuple(item[2] for item in items))
    return described.describe(path.name, hashes, {"others": {}})
