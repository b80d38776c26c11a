"""Verification of a checkpoint: every byte of every file against the manifest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..core.vocabulary.errors import CheckpointError
from .directory import read_manifest, saved_steps, step_directory
from .dtypes import tensor_bytes
from .manifest import Manifest
from .shard_file import digest

_THREADS = 4


def verify_checkpoint(directory: Path, step: int) -> Manifest:
    """Return the manifest of a step's checkpoint if all of it is as it was written.

    Raises:
        CheckpointError: it is missing, damaged or of a newer version; the message names the first file and tensor.
    """
    manifest = read_manifest(directory, step)
    folder = step_directory(directory, step)
    for name in manifest.files:
        require_file(folder, name, manifest)
    with ThreadPoolExecutor(_THREADS) as threads:
        for problem in threads.map(lambda name: _verify_file(folder, name, manifest), manifest.files):
            if problem is not None:
                raise problem
    return manifest


def require_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise `CheckpointError` if a file is missing, or has another size."""
    path, expected = folder / name, manifest.files[name].nbytes
    try:
        nbytes = path.stat().st_size
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True) from None
    if nbytes != expected:
        what = "truncated" if nbytes < expected else "longer than it was"
        raise CheckpointError(f"{path} is {what}: {nbytes} bytes, expected {expected}", is_input=True)


def last_good_step(directory: Path, before: int) -> int | None:
    """Return the last step before another whose checkpoint is as it was written; None if there is none."""
    for step in reversed([each for each in saved_steps(directory) if each < before]):
        try:
            verify_checkpoint(directory, step)
        except CheckpointError:
            continue
        return step
    return None


def damaged_piece(path: Path, tensor: str) -> CheckpointError:
    """Return the error for bytes that are not those that were written."""
    return CheckpointError(f"{path} is damaged: the bytes of {tensor!r} have changed", is_input=True)


def require_header(path: Path, content: bytes | memoryview, manifest: Manifest) -> None:
    """Raise `CheckpointError` if a file that begins with `content` has another header than was written."""
    entry = manifest.files[path.name]
    if digest(content[: entry.header_bytes]) != entry.header_sha256:
        raise CheckpointError(f"{path} is damaged: its header has changed", is_input=True)


def _verify_file(folder: Path, name: str, manifest: Manifest) -> CheckpointError | None:
    path = folder / name
    try:
        # Read and not mapped: a disk that fails under a mapping kills the process.
        with path.open("rb") as file:
            require_header(path, file.read(manifest.files[name].header_bytes), manifest)
            for tensor, entry in manifest.tensors.items():
                for piece in entry.pieces:
                    if piece.file != name:
                        continue
                    file.seek(piece.begin)
                    if digest(file.read(tensor_bytes(entry.dtype, piece.shape))) != piece.sha256:
                        return damaged_piece(path, tensor)
    except CheckpointError as problem:
        return problem
    except (OSError, ValueError) as problem:
        return CheckpointError(f"cannot read {path}: {problem}", is_input=True)
    return None
