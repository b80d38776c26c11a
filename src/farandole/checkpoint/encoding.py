"""Values as JSON, so that a checkpoint needs no pickle: an explicit encoding of each type, and a refusal by name.

JSON's own types stand for themselves. Others are a dict with one key that begins with ``$``. Tensors and arrays
are given to the caller, who keeps them by name.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from ..core.vocabulary.errors import CheckpointError

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
