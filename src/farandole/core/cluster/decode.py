"""From tables to the dataclasses of a cluster, strictly: errors name the path of what does not fit.

What the figures may be is in `limits`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ..vocabulary.errors import ConfigError
from ..vocabulary.suggestions import did_you_mean
from .cluster import Coefficient

T = TypeVar("T")
_MOST_CHARACTERS = 80
_FIGURE = '{ value = 1.25e9, source = "measured", low = 1.2e9, high = 1.3e9 }'


@dataclasses.dataclass(frozen=True)
class FieldPath:
    """Where a value is: a file, and the keys that lead to it."""

    where: str
    keys: tuple[str, ...] = ()

    def __truediv__(self, key: str | int) -> FieldPath:
        return FieldPath(self.where, (*self.keys, str(key)))

    def __str__(self) -> str:
        return f"{self.where}: {'.'.join(self.keys)}" if self.keys else self.where

    def refuse(self, problem: str, remedy: str = "") -> NoReturn:
        """Raise `ConfigError`: this path, then `problem`."""
        raise ConfigError(f"{self}{problem}", remedy=remedy)


def decode(kind: type[T], values: Any, path: FieldPath) -> T:
    """Return the dataclass `kind` of a table; `ConfigError` names file and path of what does not fit."""
    table = _table(values, path, "a figure such as " + _FIGURE if kind is Coefficient else "a table")
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in fields:
            (path / name).refuse(": unknown key", did_you_mean(name, fields))
    arguments = {name: _decode(hints[name], value, path / name) for name, value in table.items()}
    for name, each in fields.items():
        is_required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if name not in arguments and (is_required or (kind is Coefficient and name == "source")):
            (path / name).refuse(" is missing", f"add it: {name} = {_example(hints[name])}")
    return kind(**arguments)


def _decode(hint: Any, value: Any, path: FieldPath) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:  # JSON's null
            return None
        return _decode(next(each for each in arguments if each is not type(None)), value, path)
    if origin is typing.Literal:
        if value not in arguments:
            remedy = did_you_mean(value, arguments) if isinstance(value, str) else ""
            path.refuse(f" = {_shown(value)}, expected one of {', '.join(map(repr, arguments))}", remedy)
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            path.refuse(f" = {_shown(value)}, expected a list of tables")
        return tuple(_decode(arguments[0], each, path / number) for number, each in enumerate(value))
    if origin is Mapping:
        return {
            _key(arguments[0], key, path / key): _decode(arguments[1], each, path / key)
            for key, each in _table(value, path, "a table").items()
        }
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type[Any], hint), value, path)
    return _plain(hint, value, path)


def _plain(hint: Any, value: Any, path: FieldPath) -> Any:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            path.refuse(" is too large for a number")
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if type(value) is not hint:
        path.refuse(f" = {_shown(value)}, expected {words[hint]}")
    return value


def _table(value: Any, path: FieldPath, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        path.refuse(f" = {_shown(value)}, expected {expected}")
    return value


def _key(hint: Any, key: str, path: FieldPath) -> Any:
    if hint is not int:
        return key
    if not (key.isascii() and key.isdigit() and str(int(key)) == key):
        path.refuse(": expected the number of a rank as key, from 0")
    return int(key)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _example(hint: Any) -> str:
    """Return what a value of this type may look like in the file."""
    if hint is Coefficient:
        return _FIGURE
    if typing.get_origin(hint) is typing.Literal:
        return f'"{typing.get_args(hint)[0]}"'
    return {int: "8", float: "1.5", bool: "false", str: '"text"'}.get(hint, "{ ... }")
