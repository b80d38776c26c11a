"""The manifest: what a checkpoint consists of, as one JSON file that proves itself; values as JSON.

Its first line holds the hash of all that follows, so that a flipped bit in the manifest is found too::

    {"sha256": "<64 hexadecimal digits>",
    "format": "farandole checkpoint", "version": 1, "step": 100, ...}
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.vocabulary.degrees import ORDER
from ..core.vocabulary.errors import CheckpointError
from .shard_file import ITEM_BYTES, tensor_bytes

FORMAT = "farandole checkpoint"
VERSION = 1
"""Version of the format; a newer one is refused."""
NAME = "manifest.json"
_FIRST = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.[0-9a-f]{16}\.safetensors")
"""The name of a rank's file."""
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint."""

    nbytes: int
    header_bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A box of a tensor: in which file, where, and its hash."""

    file: str
    begin: int
    """In the file, in bytes."""
    offsets: tuple[int, ...]
    """In the tensor."""
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the checkpoint; its pieces cover it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint, without the bytes of its tensors."""

    step: int
    world_size: int
    wall_time: str
    """When it was written, ISO 8601."""
    versions: Mapping[str, str]
    """Versions of farandole and torch that wrote it."""
    plan: Any
    """The plan of the run as JSON, or None."""
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    shared: Any
    """What all ranks have in common, encoded (see `encode`): modules and optimizers."""
    ranks: tuple[Any, ...]
    """What each rank has of its own, encoded."""

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(file.nbytes for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the text of ``manifest.json``."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "time": self.wall_time,
            "versions": dict(self.versions),
            "plan": self.plan,
            "files": {
                name: {"bytes": e.nbytes, "header_bytes": e.header_bytes, "header_sha256": e.header_sha256}
                for name, e in self.files.items()
            },
            "tensors": {name: _tensor_to_json(entry) for name, entry in self.tensors.items()},
            "shared": self.shared,
            "ranks": list(self.ranks),
        }
        text = json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(",", ":"))[1:].encode() + b"\n"
        return b'{"sha256": "' + hashlib.sha256(text).hexdigest().encode() + b'",\n' + text


def parse_manifest(data: bytes, where: str, step: int) -> Manifest:
    """Return the manifest of `step` whose file has the content `data`; `where` names it in errors.

    Raises `CheckpointError` if it is altered, truncated, of another format or step, or of a newer version.
    """
    match = _FIRST.match(data)
    if match is None:
        raise _damaged(where, "it does not begin like a manifest")
    rest = data[match.end() :]
    if hashlib.sha256(rest).hexdigest().encode() != match.group(1):
        raise _damaged(where, "its hash is not the one in its first line")
    try:
        body = json.loads(b"{" + rest)
    except (ValueError, RecursionError) as problem:
        raise _damaged(where, f"it is no JSON: {problem}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT or not isinstance(body.get("version"), int):
        raise _damaged(where, "it is no manifest of a checkpoint")
    if body["version"] > VERSION:
        raise CheckpointError(
            f"{where} has format version {body['version']}, and this farandole knows up to {VERSION}",
            is_input=True,
            remedy="load it with the farandole that saved it, or a newer one",
        )
    try:
        manifest = _from_json(body)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as problem:
        raise _damaged(where, f"{type(problem).__name__}: {problem}") from None
    if manifest.step != step:
        raise _damaged(where, f"it is that of step {manifest.step}")
    return manifest


def _damaged(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where} is damaged: {what}", is_input=True)


def _tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "pieces": [
            {
                "file": piece.file,
                "begin": piece.begin,
                "offsets": list(piece.offsets),
                "shape": list(piece.shape),
                "sha256": piece.sha256,
            }
            for piece in entry.pieces
        ],
    }


def _from_json(body: dict[str, Any]) -> Manifest:
    files = {_require(FILE, name): _file_from_json(name, entry) for name, entry in body["files"].items()}
    tensors = {name: _tensor_from_json(name, entry, files) for name, entry in body["tensors"].items()}
    ranks = tuple(body["ranks"])
    world_size = _count(body["world_size"])
    if len(ranks) != world_size or not ranks:
        raise ValueError(f"{len(ranks)} ranks' values in a world of {world_size}")
    _require_values([body["shared"], *ranks], tensors)
    return Manifest(
        step=_count(body["step"]),
        world_size=world_size,
        wall_time=str(body["time"]),
        versions={str(name): str(value) for name, value in body["versions"].items()},
        plan=body["plan"],
        files=files,
        tensors=tensors,
        shared=_shared_from_json(body["shared"]),
        ranks=tuple(map(_rank_from_json, ranks)),
    )


def _file_from_json(name: str, body: dict[str, Any]) -> FileEntry:
    entry = FileEntry(_count(body["bytes"]), _count(body["header_bytes"]), _require(_HASH, body["header_sha256"]))
    if entry.header_bytes > entry.nbytes:
        raise ValueError(f"the header of {name} has {entry.header_bytes} bytes, and the file {entry.nbytes}")
    return entry


def _shared_from_json(shared: Any) -> Any:
    """Return what ranks have in common; raise `ValueError` where it has not the form that loading asks for."""
    more = ("weight_residuals", "degrees", "loss_scale", "pass_seeds")
    _mapping(shared, "what ranks have in common", "modules", "optimizers", *more)
    for name, module in shared.get("modules", {}).items():
        _mapping(module, f"the module {name!r}")
    for name, optimizer in shared.get("optimizers", {}).items():
        _mapping(optimizer, f"the optimizer {name!r}", *optimizer.keys() - {"groups"})
        groups = optimizer["groups"]
        if not {"state", "other_state", "rest"} <= optimizer.keys() or not isinstance(groups, list):
            raise ValueError(f"the optimizer {name!r} is not whole")
        for group in groups:
            if not isinstance(group["params"], list) or not all(isinstance(each, str) for each in group["params"]):
                raise ValueError(f"the groups of the optimizer {name!r} have no lists of parameters")
    if not shared.get("degrees", {}).keys() <= set(ORDER):
        raise ValueError(f"the degrees of a mesh: {list(shared['degrees'])}")
    counts = [*shared.get("degrees", {}).values(), *shared.get("pass_seeds", {}).values()]
    _counts([*counts, shared.get("rounded_steps", 0)])
    return shared


def _rank_from_json(own: Any) -> Any:
    """Return what a rank has of its own; raise an error where it has not the form that loading asks for."""
    _mapping(own, "a rank's values", "others", "random", "exchange", "tables", "optimizers", "sync")
    _count(own.get("scheduled_steps", 0))
    return own


def _require_values(value: Any, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise an error where an encoded value has no form, or refers to a tensor that is not there."""
    if isinstance(value, list):
        for each in value:
            _require_values(each, tensors)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in ("$tensor", "$numpy") and each not in tensors:
                raise ValueError(f"it refers to a tensor {each!r}, which it has not")
            if key == "$dict" and not all(isinstance(pair, list) and len(pair) == 2 for pair in each):
                raise ValueError(f"names and values that are no pairs: {str(each)[:40]}")
            if key == "$frozen":
                tensor_bytes(each["dtype"], _counts(each["shape"]))
                _ = str.upper(each["codec"]), each["packed"]["$tensor"], each["scales"]["$tensor"]
            _require_values(each, tensors)


def _mapping(value: Any, what: str, *keys: str) -> Any:
    """Return `value` if it is a dict, and those of `keys` that it has are; raise `ValueError` otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {str(value)[:40]!r}, expected names and values")
    for key in keys:
        if key in value:
            _mapping(value[key], f"{what}, {key}")
    return value


def _tensor_from_json(name: str, body: dict[str, Any], files: Mapping[str, FileEntry]) -> TensorEntry:
    dtype, shape = body["dtype"], _counts(body["shape"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"the tensor {name!r} is of the unknown type {dtype!r}")
    pieces = []
    for each in body["pieces"]:
        piece = PieceEntry(
            each["file"], _count(each["begin"]), _counts(each["offsets"]), _counts(each["shape"]),
            _require(_HASH, each["sha256"]),
        )  # fmt: skip
        if len(piece.offsets) != len(shape) or len(piece.shape) != len(shape):
            raise ValueError(f"a piece of {name!r} has other dimensions")
        if any(at + n > most for at, n, most in zip(piece.offsets, piece.shape, shape, strict=True)):
            raise ValueError(f"a piece of {name!r} is outside of it")
        if piece.begin + tensor_bytes(dtype, piece.shape) > files[piece.file].nbytes:
            raise ValueError(f"a piece of {name!r} is outside of its file")
        pieces.append(piece)
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        raise ValueError(f"the pieces of {name!r} do not cover it")
    if _overlap([piece for piece in pieces if math.prod(piece.shape)]):
        raise ValueError(f"pieces of {name!r} overlap, so that they do not cover it")
    return TensorEntry(dtype, shape, tuple(pieces))


def _overlap(pieces: list[PieceEntry]) -> bool:
    """Return whether two boxes have an element in common."""
    pieces = sorted(pieces, key=lambda piece: piece.offsets)
    for index, one in enumerate(pieces):
        for other in pieces[index + 1 :]:
            if other.offsets[0] >= one.offsets[0] + one.shape[0]:
                break  # so do all that follow
            boxes = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
            if all(a < b + n and b < a + m for a, m, b, n in boxes):
                return True
    return False


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of anything")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is no list")
    return tuple(map(_count, values))


def _require(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not as expected")
    return value


# Values as JSON, so that a checkpoint needs no pickle: an explicit encoding of each type, and a refusal by name.
#
# JSON's own types stand for themselves. Others are a dict with one key that begins with ``$``. Tensors and arrays
# are given to the caller, who keeps them by name.


Keep = Callable[[str, Any], Any]
"""Takes the path of a value that is not plain, and the value; returns its JSON, or None if it knows it no more."""
Restore = Callable[[str, Any], Any]
"""Takes a key such as ``$tensor`` and what belongs to it; returns the value."""

_ORDERED = {"$ordered": OrderedDict, "$counter": Counter}
_SEQUENCES = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


def encode(value: Any, path: str, keep: Keep) -> Any:
    """Return `value` as JSON. `path` names it in errors, and what `keep` keeps of it.

    Raises `CheckpointError` for a type without an encoding, naming path and type.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return [encode(each, f"{path}/{index}", keep) for index, each in enumerate(value)]
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(each, f"{path}/{key}", keep) for key, each in value.items()}
        return {"$dict": _pairs(value, path, keep)}
    if type(value) in _SEQUENCES.values():
        kind = next(key for key, of in _SEQUENCES.items() if type(value) is of)
        # Sets have no order; sorted by their text, equal ones are equal in the file.
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return {kind: [encode(each, f"{path}/{index}", keep) for index, each in enumerate(entries)]}
    if type(value) in _ORDERED.values():
        kind = next(key for key, of in _ORDERED.items() if type(value) is of)
        return {kind: _pairs(value, path, keep)}
    if type(value) is defaultdict:
        return {"$dict": _pairs(value, path, keep)}  # its factory is code, and the object's own to make
    if type(value) is deque:
        return {"$deque": [value.maxlen, [encode(each, f"{path}/{i}", keep) for i, each in enumerate(value)]]}
    if type(value) in (bytes, bytearray):
        return {f"${type(value).__name__}": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    kept = keep(path, value)
    if kept is None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"the state at {path} is a {kind}, which has no form in a checkpoint (there is no pickle in it)",
            is_input=True,
            remedy="return tensors, numbers, strings, lists and dicts from state_dict()",
        )
    return kept


def decode(value: Any, restore: Restore) -> Any:
    """Return the value that `encode` encoded. Raises `CheckpointError` for an encoding it does not know."""
    if isinstance(value, list):
        return [decode(each, restore) for each in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: decode(each, restore) for key, each in value.items()}
    if len(value) != 1:
        raise CheckpointError(f"a value of a checkpoint with the keys {sorted(value)}", is_input=True)
    key, body = marks[0], value[marks[0]]
    try:
        return _decode_marked(key, body, restore)
    except (IndexError, OverflowError, RuntimeError, TypeError, ValueError) as problem:
        raise CheckpointError(f"a value {key} of a checkpoint cannot be read: {problem}", is_input=True) from None


def _decode_marked(key: str, body: Any, restore: Restore) -> Any:
    if key in _SEQUENCES:
        return _SEQUENCES[key](decode(body, restore))
    if key in _ORDERED or key == "$dict":
        kind: Any = _ORDERED.get(key, dict)
        return (
            kind((decode(name, restore), decode(each, restore)) for name, each in body)
            if key != "$counter"
            else (Counter({decode(name, restore): decode(each, restore) for name, each in body}))
        )
    if key == "$deque":
        return deque(decode(body[1], restore), maxlen=body[0])
    if key == "$float":
        return float(body)
    if key == "$complex":
        return complex(float(body[0]), float(body[1]))
    if key == "$bytes":
        return base64.b64decode(body, validate=True)
    if key == "$bytearray":
        return bytearray(base64.b64decode(body, validate=True))
    return restore(key, body)


def _pairs(value: Any, path: str, keep: Keep) -> list[Any]:
    return [
        [encode(key, f"{path}/{key}", keep), encode(each, f"{path}/{key}", keep)] for key, each in value.items()
    ]
