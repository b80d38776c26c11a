"""Weights in the formats of others, as the state dict of one module. No file runs code when it is read.

[Note: no code from files] Torch's files are loaded with ``weights_only=True``. The metadata of a directory of
torch.distributed.checkpoint is a pickle, too, and torch reads it as such; here an unpickler that knows DCP's own
records reads it. A file that names anything else is refused, with the name.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem

from ...checkpoint.directory import (
    FILE_MODE,
    DirectoryLock,
    commit_manifest,
    make_step_directory,
    read_manifest,
    remove_leftovers,
    saved_steps,
    shard_name,
    step_directory,
    sync_directory,
)
from ...checkpoint.export import find_tensors, read_bytes
from ...checkpoint.manifest import decode, encode
from ...checkpoint.shard_file import digest, lay_out
from ...comm.messages import bytes_of
from ...core.vocabulary.errors import CheckpointError
from .later_copy import MemoryFile, box_of, in_file_order
from .optimizers import Item, local_items
from .reading import read_tensors
from .saver import make_manifest
from .values import TensorsAside, restorer, tensor_names

_ENTRIES = ("model", "state_dict", "model_state_dict", "module")
"""Where training scripts put a model's state dict beside other things."""
_STEPS = ("step", "global_step")
_WRAPPER = "module."
"""What DistributedDataParallel puts before each name."""
_GLOBAL = re.compile(r"GLOBAL (\S+)")


@dataclass(frozen=True, slots=True)
class Weights:
    """The state dict of one module, and what was beside it."""

    state: Mapping[str, Any]
    step: int | None
    """The step that the source names."""
    left_out: tuple[str, ...]
    """Entries beside the module."""
    is_unwrapped: bool
    """Whether ``module.`` was removed from the names."""


def read_torch(path: Path, module: str | None) -> Weights:
    """Return a module of a file that `torch.save` wrote. Raises `CheckpointError`, as for what needs pickle."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the format of old files
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}", is_input=True) from None
    except Exception as problem:  # whatever bytes can do to a parser
        raise _not_of_torch(path, problem, "a file of torch.save with a state_dict") from None
    return _choose(str(path), state, module)


def read_dcp(path: Path, module: str | None) -> Weights:
    """Return a module of a directory of torch.distributed.checkpoint. Raises `CheckpointError`."""
    reader = _DcpReader(path)
    try:
        described = reader.read_metadata()
        if not isinstance(described, metadata.Metadata):
            raise TypeError(f"its .metadata holds a {type(described).__name__}")
        places = described.planner_data if isinstance(described.planner_data, dict) else {}
        keys = {key: tuple(places.get(key, (key,))) for key in described.state_dict_metadata}
        tree = _tree(described, keys)
        chosen = _choose(str(path), tree, module)
        steps = {name: tree[name].key for name in _STEPS if isinstance(tree.get(name), _Place)}
        found = _load(reader, described, _keys(chosen.state) | set(steps.values()))
    except FileNotFoundError as problem:
        raise CheckpointError(
            f"{path}: expected a directory of torch.distributed.checkpoint, with a file .metadata: {problem}",
            is_input=True,
        ) from None
    except CheckpointError:
        raise
    except Exception as problem:  # whatever bytes can do to a parser
        raise _not_of_torch(path, problem, "a directory of torch.distributed.checkpoint") from None
    step = _step({name: found[key] for name, key in steps.items()})
    state = {name: _fill(each, found) for name, each in chosen.state.items()}
    return Weights(state, step, chosen.left_out, chosen.is_unwrapped)


def read_safetensors(path: Path, module: str | None) -> Weights:
    """Return the tensors of a safetensors file, index or directory. Raises `CheckpointError`."""
    if module is not None:
        raise CheckpointError(f"--module {module}: safetensors files have no modules, only tensors", is_input=True)
    state: dict[str, torch.Tensor] = {}
    for name, each in find_tensors(path).items():
        dtype = getattr(torch, each.dtype)
        content = read_bytes(each)
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        state[name] = flat.view(each.shape)
    return _choose(str(path), state, None)


@dataclass(frozen=True, slots=True)
class _Place:
    """An entry of a directory of DCP that was not read yet."""

    key: str
    is_tensor: bool


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the records of DCP's metadata. See [Note: no code from files]."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        (own.__module__, own.__qualname__): own
        for own in (
            metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.MetadataIndex,
            metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
        )
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._KNOWN:
            return self._KNOWN[module, name]
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):  # how Python before 3.11.4 names the member of an enum
            return _member
        if module in ("pathlib", "pathlib._local") and name in ("Path", "PosixPath", "PurePosixPath"):
            return Path
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enum of DCP, and nothing else of any object."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"GLOBAL builtins.getattr of {kind!r} is not allowed")
    return kind[name]


class _DcpReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: metadata.Metadata = _MetadataUnpickler(file).load()
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _tree(described: metadata.Metadata, keys: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the entries in the dicts and lists that they were in when they were saved."""
    tree: dict[str, Any] = {}
    for key, place in keys.items():
        inside = tree
        for part in place[:-1]:
            inside = inside.setdefault(part, {})
        is_tensor = isinstance(described.state_dict_metadata[key], metadata.TensorStorageMetadata)
        inside[place[-1]] = _Place(key, is_tensor)
    return tree


def _fill(value: Any, found: Mapping[str, Any]) -> Any:
    """Return a tree with what was read instead of each `_Place`. DCP numbers the entries of lists."""
    if isinstance(value, _Place):
        return found[value.key]
    filled = {name: _fill(each, found) for name, each in value.items()}
    is_list = all(isinstance(name, int) for name in filled) and sorted(filled) == list(range(len(filled)))
    return [filled[index] for index in range(len(filled))] if is_list else filled


def _keys(value: Any) -> set[str]:
    return {value.key} if isinstance(value, _Place) else {key for each in value.values() for key in _keys(each)}


def _load(reader: _DcpReader, described: metadata.Metadata, wanted: set[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it loads in a single process; about complex32
        for key in wanted:
            entry = described.state_dict_metadata[key]
            state[key] = None
            if isinstance(entry, metadata.TensorStorageMetadata):
                state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        except dcp.CheckpointException as problem:
            raise next(iter(problem.failures.values()))[0] from None
    return state


def _choose(where: str, state: Any, module: str | None) -> Weights:
    """Return the state dict in `state`: all of it, or the entry that `module` or convention names."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{where} holds a {type(state).__name__}, expected a state_dict or a dict that has one",
            is_input=True,
        )
    inside = _find(state)
    if module is None and not inside and _is_state_dict(state):
        return _weights(where, state, None, ())
    names = [module] if module is not None else [name for name in inside if name.rpartition(".")[2] in _ENTRIES]
    if len(names) != 1 or names[0] not in inside:
        listed = ", ".join(map(str, inside)) or "none"
        asked = f"no state_dict under {module!r}" if module is not None else "which state_dict is not clear"
        raise CheckpointError(
            f"{where}: {asked}; those in it: {listed}", is_input=True,
            remedy="name one with --module" if inside else "give a file with a model's state_dict",
        )  # fmt: skip
    found = inside[names[0]]
    left_out = [str(name) for name in state if name not in _STEPS and state[name] is not found]
    if names[0] not in state:  # it is inside of one: its neighbours are left out, and that one is not
        outer = next(name for name in left_out if names[0].startswith(f"{name}."))
        left_out.remove(outer)
        left_out += [f"{outer}.{name}" for name, value in state[outer].items() if value is not found]
    return _weights(where, found, _step(state), tuple(left_out))


def _find(state: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    """Return the state dicts in `state`, and those one level deeper with names such as ``app.model``."""
    found = {str(name): each for name, each in state.items() if _is_state_dict(each) and not _is_extra(name)}
    for outer, values in state.items():
        if isinstance(values, Mapping) and str(outer) not in found and not _is_extra(outer):
            deeper = {f"{outer}.{name}": each for name, each in values.items() if _is_state_dict(each)}
            found |= deeper
    return found


def _weights(where: str, state: Mapping[Any, Any], step: int | None, left_out: tuple[str, ...]) -> Weights:
    if not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{where}: expected names of parameters as the keys of a state_dict", is_input=True)
    is_wrapped = all(name.startswith(_WRAPPER) for name in state)
    plain = {name.removeprefix(_WRAPPER): value for name, value in state.items()} if is_wrapped else dict(state)
    return Weights(plain, step, left_out, is_wrapped)


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(each, torch.Tensor) or (isinstance(each, _Place) and each.is_tensor) for each in value.values()
    )


def _is_extra(name: Any) -> bool:
    return isinstance(name, str) and name.endswith("_extra_state")


def _step(state: Mapping[str, Any]) -> int | None:
    for name in _STEPS:
        value = state.get(name)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
            value = int(value)
        if type(value) is int and value >= 0:
            return value
    return None


def _not_of_torch(path: Path, problem: Exception, expected: str) -> CheckpointError:
    named = _GLOBAL.search(str(problem)) if isinstance(problem, pickle.UnpicklingError) else None
    if named is not None:
        return CheckpointError(
            f"{path} needs pickle: it names {named.group(1)}, which could run code, and is not loaded",
            is_input=True,
            remedy="save a state_dict of tensors: torch.save(model.state_dict(), ...)",
        )
    said = str(problem).strip().splitlines() or [""]
    return CheckpointError(
        f"{path}: expected {expected}; it cannot be read: {type(problem).__name__}: {said[0][:200]}", is_input=True
    )


# A checkpoint made from weights in another format, by one process and without a world.


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


# A checkpoint in torch's own formats: a file of `torch.save`, or a directory of torch.distributed.checkpoint.


def convert_checkpoint(directory: Path, step: int, output: Path, *, to: Literal["torch", "dcp"]) -> None:
    """Write modules, optimizers and the step of a checkpoint in a format of torch, by one process.

    What each rank has of its own (loaders, schedulers, generators of random numbers, residuals) is left out.

    Args:
        directory: of the run's checkpoints.
        step: which one.
        output: file or directory to write; it must not be there.
        to: ``torch``: a file that ``torch.load(..., weights_only=True)`` reads, with state dicts as `Module` and
            `Optimizer` have them; ``dcp``: a directory, with optimizers' states by names of parameters, as
            `torch.distributed.checkpoint.state_dict.get_state_dict` has them.

    Raises:
        CheckpointError: the checkpoint is damaged, or `output` cannot be written or is there already.
    """
    if output.exists():
        raise CheckpointError(f"{output} is there already", is_input=True, remedy="remove it, or name another")
    state = read_whole(directory, step, numbered=to == "torch")
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if to == "torch":
            torch.save(state, aside)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it saves in a single process
                dcp.save(state, checkpoint_id=aside, no_dist=True)
        aside.rename(output)
    except (OSError, RuntimeError, dcp.CheckpointException) as problem:
        raise CheckpointError(f"cannot write {output}: {problem}", is_input=True) from None
    finally:
        with suppress(OSError):
            aside.unlink()
        shutil.rmtree(aside, ignore_errors=True)


def read_whole(directory: Path, step: int, *, numbered: bool) -> dict[str, Any]:
    """Return modules' and optimizers' states by their names in the checkpoint, and ``step``.

    Args:
        directory: of the run's checkpoints.
        step: which one.
        numbered: whether parameters of optimizers have numbers, as in ``Optimizer.state_dict``; else names.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    manifest = read_manifest(directory, step)
    wanted = {name: manifest.tensors[name] for name in set(tensor_names(manifest.shared))}
    references = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in wanted.items()
    }
    tensors = read_tensors(step_directory(directory, step), manifest, references)
    shared = decode(manifest.shared, restorer(tensors))
    optimizers = {name: _optimizer(each, numbered) for name, each in shared["optimizers"].items()}
    return {**shared["modules"], **optimizers, "step": step}


def _optimizer(saved: Mapping[str, Any], numbered: bool) -> dict[str, Any]:
    names = [name for group in saved["groups"] for name in group["params"]]
    key: dict[str, int | str] = (
        {name: index for index, name in enumerate(names)}
        if numbered
        else {name: name.removeprefix("model/") for name in names}
    )
    groups = [{**group, "params": [key[name] for name in group["params"]]} for group in saved["groups"]]
    state = {key[name]: value for name, value in saved["state"].items()}
    return {"state": {**state, **saved["other_state"]}, "param_groups": groups, **saved["rest"]}
