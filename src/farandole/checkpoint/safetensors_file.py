"""Reading safetensors files of others: what is in them, checked before a byte of a tensor is used.

A source is a file, an index (``*.index.json``) that names files beside it, or a directory with either of
``model.safetensors`` and ``model.safetensors.index.json``. The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import CheckpointError
from .dtypes import dtype_of_safetensors, tensor_bytes
from .export import INDEX

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
"""What the safetensors library reads at most."""
_WHOLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    dtype: str
    """torch's name of its type."""
    shape: tuple[int, ...]
    path: Path
    begin: int
    """Where its bytes begin in the file."""


def find_tensors(source: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, an index or a directory, by name.

    Raises `CheckpointError` if it is none of them, is damaged, or has a type that torch does not.
    """
    if source.is_dir():
        there = [source / name for name in (_WHOLE, INDEX) if (source / name).is_file()]
        if len(there) != 1:
            found = "both" if there else "neither"
            raise CheckpointError(
                f"{source}: expected {_WHOLE} or {INDEX} in it, found {found}", is_input=True,
                remedy="name the file or the index itself",
            )  # fmt: skip
        source = there[0]
    if source.suffix != ".json":
        return _read_header(source)
    places = _read_index(source)
    files = {name: _read_header(source.parent / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise _invalid(source, f"it places {name} in {file}, which does not have it")
    return {name: files[file][name] for name, file in places.items()}


def read_bytes(tensor: StoredTensor) -> bytearray:
    """Return the content of a tensor. Raises `CheckpointError` if it cannot be read."""
    content = bytearray(tensor_bytes(tensor.dtype, tensor.shape))
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.begin)
            count = file.readinto(content)
    except OSError as problem:
        raise _unreadable(tensor.path, problem) from None
    if count != len(content):
        raise _invalid(tensor.path, "it is truncated")
    return content


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes())
    except OSError as problem:
        raise _unreadable(path, problem) from None
    except (ValueError, RecursionError) as problem:
        raise _invalid(path, f"it is no JSON: {problem}") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise _invalid(path, "expected an index with a weight_map of names to files")
    for file in places.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise _invalid(path, f"{file!r} is no name of a file beside it")
    return places


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(_LENGTH.size)
            count = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else nbytes
            begin = _LENGTH.size + count
            if count > _MOST_HEADER_BYTES or begin > nbytes:
                raise _invalid(path, "expected a safetensors file, which begins with the length of its header")
            text = file.read(count)
    except OSError as problem:
        raise _unreadable(path, problem) from None
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        header.pop("__metadata__", None)
        return _tensors(path, header, begin, nbytes)
    except (KeyError, TypeError, ValueError, RecursionError) as problem:
        raise _invalid(path, f"{type(problem).__name__}: {problem}") from None


def _tensors(path: Path, header: dict[str, Any], begin: int, nbytes: int) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    runs = []
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(type(each) is int and each >= 0 for each in (first, last, *shape)):
            raise ValueError(f"offsets or shape of {name} are no whole numbers")
        dtype = dtype_of_safetensors(entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{path}: {name} is of type {entry['dtype']!r}, which a checkpoint cannot have", is_input=True
            )
        if last - first != tensor_bytes(dtype, shape):
            raise ValueError(f"{name} has {last - first} bytes, expected {tensor_bytes(dtype, shape)}")
        runs.append((first, last))
        found[name] = StoredTensor(dtype, shape, path, begin + first)
    at = 0
    for first, last in sorted(runs):
        if first != at:
            raise ValueError(f"its tensors overlap or leave a gap at byte {min(first, at)}")
        at = last
    if begin + at != nbytes:
        raise ValueError(f"it has {nbytes} bytes, expected {begin + at}")
    return found


def _invalid(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as safetensors: {what}", is_input=True)


def _unreadable(path: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True)
