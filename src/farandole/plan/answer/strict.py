"""Frozen dataclasses to plain values and back, strictly: a wrong value is an error with the path to it."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.suggestions import did_you_mean


def to_plain(value: Any) -> Any:
    """Return dicts, lists, texts and numbers; of a plan the keys that are not as by default."""
    if isinstance(value, Plan):
        default = Plan()
        keys = [key for key, each in value.to_mapping().items() if each != getattr(default, key)]
        return {"version": value.version} | {key: to_plain(getattr(value, key)) for key in keys}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    return value


def from_plain(kind: Any, value: Any, path: str) -> Any:
    """Return `value` as `kind`; raise `PlanError` with the path of what is missing, unknown or of another type."""
    if kind is Plan:
        return Plan.from_mapping(_table(value, path), where=path)
    if dataclasses.is_dataclass(kind):
        return _record(kind, _table(value, path), path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return from_plain(next(each for each in arguments if each is not type(None)), value, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise PlanError(f"{path} = {value!r}, expected one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _tuple(arguments, value, path)
    if origin is not None and issubclass(origin, Mapping):
        table = _table(value, path)
        return {
            from_plain(arguments[0], key, f"{path}: a key"): from_plain(arguments[1], each, f"{path}.{key}")
            for key, each in table.items()
        }
    return _scalar(kind, value, path)


def _record(kind: Any, table: Mapping[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    for key in table:
        if key not in names:
            raise PlanError(f"{path}: unknown key {key!r}", remedy=did_you_mean(key, names))
    missing = [name for name in names if name not in table]
    if missing:
        raise PlanError(f"{path}: {missing[0]} is missing")
    return kind(**{name: from_plain(hints[name], table[name], f"{path}.{name}") for name in names})


def _tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise PlanError(f"{path} = {_short(value)}, expected a list")
    if arguments[-1] is Ellipsis:
        return tuple(from_plain(arguments[0], each, f"{path}.{i}") for i, each in enumerate(value))
    if len(value) != len(arguments):
        raise PlanError(f"{path} has {len(value)} values, expected {len(arguments)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(from_plain(kind, each, f"{path}.{i}") for i, (kind, each) in enumerate(pairs))


def _table(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{path} = {_short(value)}, expected a table")
    return value


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return tuple(value) if isinstance(value, list) else value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind is not float and type(value) is kind:
        return value
    wanted = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}[kind]
    raise PlanError(f"{path} = {_short(value)}, expected {wanted}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
