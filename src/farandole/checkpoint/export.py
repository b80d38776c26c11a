"""The weights of a checkpoint as plain safetensors files with the names that the model's own code uses.

What `transformers` and `timm` load: ``model.safetensors``, or, above a size, ``model-00001-of-00003.safetensors``
and so on beside ``model.safetensors.index.json``. Every byte that is read is verified. A tensor with two names (a
tied weight) is written under both, so that a strict load finds all names.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..core.vocabulary.errors import CheckpointError
from .directory import FILE_MODE, read_manifest, step_directory, sync_directory
from .listing import damaged_piece, require_file, require_header
from .manifest import Manifest, PieceEntry, TensorEntry
from .shard_file import ITEM_BYTES, digest, dtype_of_safetensors, file_layout, tensor_bytes


# Weights that are stored in few bits, decoded without torch: the form of `parallel.frozen_weight`.
@dataclass(frozen=True, slots=True)
class FrozenEntry:
    """A tensor that a checkpoint stores as packed numbers and scales, and an export as float32."""

    codec: str
    shape: tuple[int, ...]
    packed: TensorEntry
    scales: TensorEntry
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Size of the decoded tensor."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def pieces(self) -> tuple[PieceEntry, ...]:
        """Those of both tensors."""
        return (*self.packed.pieces, *self.scales.pieces)


def frozen_entry(value: Any, tensors: Mapping[str, TensorEntry]) -> FrozenEntry | None:
    """Return what an encoded value says of a frozen weight; None if it is something else."""
    body = value.get("$frozen") if isinstance(value, dict) else None
    try:
        packed, scales = (tensors[body[key]["$tensor"]] for key in ("packed", "scales"))  # type: ignore[index]
        return FrozenEntry(body["codec"], tuple(body["shape"]), packed, scales)  # type: ignore[index]
    except (KeyError, TypeError):
        return None


def decode_frozen(entry: FrozenEntry, packed: bytes, scales: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the elements, float32, of the content of both tensors."""
    blocks = entry.packed.shape[0]
    if entry.scales.dtype == "bfloat16":
        factors = (np.frombuffer(scales, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        factors = np.frombuffer(scales, np.float32)
    if entry.packed.dtype == "uint8":
        pairs = np.frombuffer(packed, np.uint8).reshape(blocks, -1)
        numbers = np.stack((pairs & 15, pairs >> 4), 2).reshape(blocks, -1).astype(np.float32) - np.float32(8)
    else:
        numbers = np.frombuffer(packed, np.int8).reshape(blocks, -1).astype(np.float32)
    flat = (numbers * factors[:, None]).reshape(-1)
    return flat[: int(np.prod(entry.shape, dtype=np.int64))].reshape(entry.shape)


_Entry = TensorEntry | FrozenEntry
INDEX = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """What `export_weights` wrote."""

    files: tuple[Path, ...]
    names: int
    """Tensors."""
    nbytes: int
    """Size of the tensors."""
    left_out: tuple[str, ...]
    """Entries of the state dict that are no tensors."""


def export_weights(
    directory: Path, step: int, output: Path, *, module: str = "model", most_file_bytes: int = 5 * 10**9
) -> ExportedWeights:
    """Write the weights of one module of a checkpoint.

    Args:
        directory: of the run's checkpoints.
        step: which one.
        output: a directory for the files, made if it is missing; or a path that ends with ``.safetensors``, for
            one file.
        module: its name in the checkpoint: ``model``, or the keyword that was given to `fd.save`.
        most_file_bytes: of tensors in a file, in a directory. A larger tensor has a file of its own.

    Raises:
        CheckpointError: the checkpoint is damaged, has no such module or a type that safetensors does not know; or
            the files cannot be written, or are there already. Nothing is left half written.
    """
    manifest = read_manifest(directory, step)
    folder = step_directory(directory, step)
    tensors, left_out = module_tensors(manifest, module)
    for name in {piece.file for _, entry in tensors for piece in entry.pieces}:
        require_file(folder, name, manifest)
        with (folder / name).open("rb") as file:
            require_header(folder / name, file.read(manifest.files[name].header_bytes), manifest)
    whole = output.suffix == ".safetensors"
    parts = [tensors] if whole else _divide(tensors, most_file_bytes)
    target = output.parent if whole else output
    names = [output.name] if whole else _names(len(parts))
    written = _write(target, folder, names, parts)
    nbytes = sum(entry.nbytes for _, entry in tensors)
    return ExportedWeights(tuple(written), len(tensors), nbytes, tuple(left_out))


def module_tensors(manifest: Manifest, module: str) -> tuple[list[tuple[str, _Entry]], list[str]]:
    """Return the tensors of a module by the names of its state dict, and the names of what is no tensor.

    Raises `CheckpointError` if the checkpoint has no such module.
    """
    modules = manifest.shared.get("modules") if isinstance(manifest.shared, dict) else None
    if not isinstance(modules, dict) or module not in modules:
        known = ", ".join(modules) if isinstance(modules, dict) else "none"
        raise CheckpointError(f"the checkpoint has no module {module!r}; it has: {known}", is_input=True)
    tensors: list[tuple[str, _Entry]] = []
    left_out = []
    for name, value in modules[module].items():
        frozen = frozen_entry(value, manifest.tensors)
        if frozen is not None:
            tensors.append((name, frozen))
            continue
        key = value.get("$tensor") if isinstance(value, dict) else None
        if isinstance(key, str) and key in manifest.tensors:
            tensors.append((name, manifest.tensors[key]))
        else:
            left_out.append(name)
    return tensors, left_out


def _divide(tensors: Sequence[tuple[str, _Entry]], most: int) -> list[list[tuple[str, _Entry]]]:
    parts: list[list[tuple[str, _Entry]]] = [[]]
    room = most
    for name, entry in tensors:
        if entry.nbytes > room and parts[-1]:
            parts.append([])
            room = most
        parts[-1].append((name, entry))
        room -= entry.nbytes
    return parts


def _names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write(
    target: Path, folder: Path, names: Sequence[str], parts: Sequence[Sequence[tuple[str, _Entry]]]
) -> list[Path]:
    paths = [target / name for name in names]
    if len(parts) > 1:
        paths.append(target / INDEX)
    aside = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path.exists():
                raise CheckpointError(
                    f"{path} is there already", is_input=True, remedy="remove it, or name another"
                )
        for path, part in zip(aside, parts, strict=False):
            with _create(path) as file:
                _write_file(file, folder, part)
        if len(parts) > 1:
            with _create(aside[-1]) as file:
                file.write(_index(names, parts))
        for from_, to in zip(aside, paths, strict=True):
            from_.rename(to)
        sync_directory(target)
    except OSError as problem:
        raise CheckpointError(f"cannot write to {target}: {problem.strerror or problem}", is_input=True) from None
    finally:
        for path in aside:
            with suppress(OSError):
                path.unlink()
    return paths


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE), "w+b")


def _write_file(file: BinaryIO, folder: Path, tensors: Sequence[tuple[str, _Entry]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, entry in tensors:
        kind, shape = file_layout(entry.dtype, entry.shape)
        if shape != entry.shape:
            raise CheckpointError(
                f"{name} is of type {entry.dtype}, which safetensors does not know", is_input=True
            )
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    file.write(_LENGTH.pack(len(text)) + text)
    for _, entry in tensors:
        for part in _content(folder, entry):
            file.write(part)
    file.flush()
    os.fsync(file.fileno())


def _content(folder: Path, entry: _Entry) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in their order."""
    if isinstance(entry, FrozenEntry):
        packed, scales = (b"".join(_content(folder, each)) for each in (entry.packed, entry.scales))
        yield memoryview(decode_frozen(entry, packed, scales).reshape(-1).view(np.uint8).data)
        return
    pieces = sorted(entry.pieces, key=lambda piece: piece.offsets)
    if _are_rows(entry, pieces):
        for piece in pieces:
            yield memoryview(_read(folder, entry, piece))
        return
    item = ITEM_BYTES[entry.dtype]
    whole = np.empty((*entry.shape, item), np.uint8)
    for piece in pieces:
        box = tuple(slice(at, at + count) for at, count in zip(piece.offsets, piece.shape, strict=True))
        whole[box] = np.frombuffer(_read(folder, entry, piece), np.uint8).reshape(*piece.shape, item)
    yield memoryview(whole.reshape(-1).data)


def _are_rows(entry: _Entry, pieces: Sequence[PieceEntry]) -> bool:
    """Return whether the pieces, in this order, are the tensor's bytes in theirs."""
    return all(piece.shape[1:] == entry.shape[1:] for piece in pieces)


def _read(folder: Path, entry: _Entry, piece: PieceEntry) -> bytes:
    path = folder / piece.file
    count = int(np.prod(piece.shape, dtype=np.int64)) * ITEM_BYTES[entry.dtype]
    with path.open("rb") as file:
        file.seek(piece.begin)
        content = file.read(count)
    if len(content) != count or digest(content) != piece.sha256:
        raise damaged_piece(path, "the tensor")
    return content


def _index(names: Sequence[str], parts: Sequence[Sequence[tuple[str, _Entry]]]) -> bytes:
    places: Mapping[str, str] = {name: file for file, part in zip(names, parts, strict=True) for name, _ in part}
    total = sum(entry.nbytes for part in parts for _, entry in part)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode() + b"\n"


# Reading safetensors files of others: what is in them, checked before a byte of a tensor is used.
#
# A source is a file, an index (``*.index.json``) that names files beside it, or a directory with either of
# ``model.safetensors`` and ``model.safetensors.index.json``. The format: https://huggingface.co/docs/safetensors.


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
