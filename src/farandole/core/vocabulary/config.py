"""From text and tables to frozen dataclasses, strictly: unknown keys are errors with the nearest name.

`build` reads what people type in TOML, JSON and ``--set key=value``, into the tables that keys of a plan may stand
in. `from_plain` reads what `to_plain` wrote. Not here: what the keys mean (the dataclass's own `__post_init__`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from .errors import ConfigError
from .text import did_you_mean
from .units import parse_bytes, parse_seconds

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the oldest supported Python only
    import tomli as tomllib

T = TypeVar("T")
_PLAIN: Final = (bool, int, float, str)

PLAN_TABLES: Final = {
    "": ("version", "predicted"),
    "mesh": (
        "data", "shard", "tensor", "pipeline", "expert", "context", "zero", "shard_within", "tensor_recipe",
        "sequence_parallel", "schedule", "micro_batches", "chunks", "weight_versions", "pipeline_cuts",
        "context_kind",
    ),
    "exchange": (
        "bucket_bytes", "first_bucket_bytes", "codec", "lossy", "codec_for", "weight_codec", "expert_codec",
        "overlap_gather", "route", "connections", "congestion_control", "staging",
    ),
    "memory": ("recompute", "frozen_codec", "offload", "offload_directory", "train_schedule"),
    "precision": ("precision", "bf16_parameters"),
    "sync": (
        "accumulate", "clip_norm", "sync_batch_norm", "buffers", "nonfinite", "timeout_seconds", "stall_seconds",
        "check_every", "on_difference", "on_failure", "sync", "balance", "balance_cap",
    ),
}  # fmt: skip
"""All keys of a plan, by table; "": in none."""


def read_mapping(
    path: Path, *, error: type[ConfigError] = ConfigError, remedy: str = "", is_json: bool | None = None
) -> dict[str, Any]:
    """Read a TOML or JSON file that holds one table; raise `error` when it does not.

    `remedy`: what to do where there is no such file, or another one. `is_json`: None: its ending says so.
    """
    is_json = path.suffix == ".json" if is_json is None else is_json
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"there is no file {path}", remedy=remedy) from None
    except (OSError, ValueError) as problem:
        raise error(f"cannot read {path}: {problem}") from None
    try:
        value = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        kind = "JSON" if is_json else "TOML"
        raise error(f"{path} is not {kind}: {problem}", remedy=remedy) from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, expected a table of keys")
    return value


def build(kind: type[T], values: Mapping[str, Any], *, where: str, error: type[ConfigError] = ConfigError) -> T:
    """Build the dataclass `kind` from `values`, checking names and types; `where` names the source."""
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    arguments = {}
    for name, value in values.items():
        if name not in known:
            raise error(f"{where}: unknown key {name!r}", remedy=did_you_mean(name, known))
        arguments[name] = convert(value, known[name], where=f"{where}: {name}", name=name, error=error)
    return kind(**arguments)


def settle(value: object, *, where: str, error: type[ConfigError]) -> None:
    """Convert the fields of a frozen dataclass that its constructor was given in another type, as `build` does."""
    for name, hint, default in _hints(type(value)):  # type: ignore[arg-type]
        given = getattr(value, name)
        if given is not default and not (hint in _PLAIN and type(given) is hint):
            converted = convert(given, hint, where=f"{where}: {name}", name=name, error=error)
            object.__setattr__(value, name, converted)


def flatten(
    values: Mapping[str, Any], tables: Mapping[str, Collection[str]], *, where: str, error: type[ConfigError]
) -> dict[str, Any]:
    """Return `values` with the keys of its `tables` beside the others.

    `tables`: all keys, by table; those of "" are in none. Raises `error` for a key in another table than its own,
    for one that is there twice, and for an unknown table.
    """
    home = {key: table for table, keys in tables.items() for key in keys}
    is_table = {name: isinstance(value, Mapping) and name in tables for name, value in values.items()}
    flat = {name: value for name, value in values.items() if not is_table[name]}
    for name, value in flat.items():
        if name in tables and name not in home:
            raise error(f"{where}: {name} = {value!r}, expected a table", remedy=f"write its keys below [{name}]")
        if name not in home and isinstance(value, Mapping):
            remedy = did_you_mean(name, [each for each in tables if each])
            raise error(f"{where}: unknown table [{name}]", remedy=remedy)
    for table in (name for name in values if is_table[name]):
        for key, value in values[table].items():
            if key not in home:
                raise error(f"{where}: [{table}] has no key {key!r}", remedy=did_you_mean(key, home))
            if home[key] != table:
                right = f"in [{home[key]}]" if home[key] else "above all tables"
                raise error(f"{where}: {key} is in [{table}], expected it {right}", remedy="move it there")
            if key in flat:
                raise error(
                    f"{where}: {key} = {flat[key]!r}, and {value!r} in [{table}]", remedy="leave one of them out"
                )
            flat[key] = value
    return flat


def parse_settings(settings: Iterable[str], *, error: type[ConfigError] = ConfigError) -> dict[str, str]:
    """Split ``key=value`` settings as given to ``--set``; a later one of the same key wins."""
    values = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise error(f"--set {setting!r}: expected key=value", remedy="such as zero=1: docs/reference/plan.md")
        values[key.strip()] = value.strip()
    return values


def convert(value: Any, hint: Any, *, where: str, name: str, error: type[ConfigError] = ConfigError) -> Any:
    """Return `value` as the type `hint` of the field `name`; raise `error`, with `where`, if it is none."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in options and (value is None or value == "none"):
        return None
    for option in options:
        converted = _convert_one(value, option, name)
        if converted is not None:
            return converted
    wanted = " or ".join(_describe(option, name) for option in options if option is not type(None))
    raise error(f"{where}: expected {wanted}, got {value!r}")


def _convert_one(value: Any, option: Any, name: str) -> Any:
    """Return `value` as `option`, or None when it is not one."""
    if typing.get_origin(option) is typing.Literal:
        return value if value in typing.get_args(option) else None
    if option is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if isinstance(value, bool):
        return None
    if typing.get_origin(option) is Mapping:
        return _convert_table(value, typing.get_args(option)[1])
    if typing.get_origin(option) is tuple:
        return _convert_list(value, takes_numbers=name.endswith("_cuts"))
    if option is str:
        return os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    try:
        if option is int:
            parsed = parse_bytes(value) if name.endswith("_bytes") else int(value)
            return parsed if not isinstance(value, float) or parsed == value else None
        if option is float:
            return parse_seconds(value) if name.endswith("_seconds") else float(value)
    except (ValueError, TypeError, OverflowError, ConfigError):
        return None
    return None


def _convert_table(value: Any, kind: type) -> dict[str, Any] | None:
    """Return a table of texts or of numbers, as `kind` says; as one text it is JSON or TOML."""
    value = _read_value(value)
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        return None
    if kind is float:
        numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in value.values())
        return {key: float(each) for key, each in value.items()} if numbers else None
    return dict(value) if all(isinstance(each, str) for each in value.values()) else None


def _convert_list(value: Any, *, takes_numbers: bool) -> tuple[str, ...] | None:
    """Return a list of texts, or of whole numbers too, as a tuple of texts; as one text it is JSON or TOML."""
    value = _read_value(value)
    if not isinstance(value, (list, tuple)):
        return None
    words = [str(each) if takes_numbers and type(each) is int else each for each in value]
    return tuple(words) if all(isinstance(each, str) for each in words) else None


def _read_value(value: Any) -> Any:
    """Return what a text holds as JSON, or as a plan file has it; the text itself where it is neither."""
    if isinstance(value, str):
        for read in (json.loads, lambda text: tomllib.loads(f"value = {text}")["value"]):
            with contextlib.suppress(ValueError, RecursionError):
                return read(value)
    return value


def _describe(option: Any, name: str) -> str:
    if name.endswith(("_bytes", "_seconds")) and option in (int, float):
        return "a whole number of bytes, such as 4MiB" if option is int else "seconds from 0, such as 600 or 10m"
    if typing.get_origin(option) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(option))
    if typing.get_origin(option) is Mapping:
        return "a table of numbers" if typing.get_args(option)[1] is float else "a table of texts"
    if typing.get_origin(option) is tuple:
        return "a list of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(option, str(option))


@functools.cache
def _hints(kind: Any) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, type and default of each field."""
    hints = typing.get_type_hints(kind)
    return tuple((each.name, hints[each.name], each.default) for each in dataclasses.fields(kind))


# Tables that a program wrote, or that people fill in as they see it: dataclasses as plain values and back, where
# every value has its type already, and an error has the path to what does not fit.

_MOST_CHARACTERS = 80
_BETWEEN = "/"
"""Between the parts of a key that is a tuple."""
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_EXAMPLES = {int: "8", float: "1.5", bool: "false", str: '"text"'}


@dataclasses.dataclass(frozen=True)
class FieldPath:
    """Where a value is: a file, and the keys that lead to it."""

    where: str
    """Empty: the keys alone say it."""
    keys: tuple[str, ...] = ()
    error: type[ConfigError] = ConfigError
    """What `refuse` raises."""
    remedy: str = ""
    """What to do about any of its fields; empty: as the problem says."""
    needs_all: bool = False
    """Whether fields that have a default must be there, too."""

    def __truediv__(self, key: object) -> FieldPath:
        text = _BETWEEN.join(key) if isinstance(key, tuple) else str(key)
        return dataclasses.replace(self, keys=(*self.keys, text))

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, ".".join(self.keys))))

    def refuse(self, problem: str, remedy: str = "") -> NoReturn:
        """Raise: this path, then `problem`."""
        raise self.error(f"{self}{problem}", remedy=remedy or self.remedy)


def to_plain(value: Any, special: Mapping[type, Callable[[Any], Any]] | None = None) -> Any:
    """Return dicts, lists, texts and numbers; `special`: what makes them of some types."""
    if special and type(value) in special:
        return special[type(value)](value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name), special) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            _BETWEEN.join(key) if isinstance(key, tuple) else key: to_plain(each, special)
            for key, each in value.items()
        }
    return [to_plain(each, special) for each in value] if isinstance(value, (tuple, list)) else value


def from_plain(
    kind: type[T],
    value: Any,
    path: FieldPath,
    special: Mapping[type, Callable[[Mapping[str, Any], str], Any]] | None = None,
) -> T:
    """Return the dataclass `kind` of a table.

    A field may ask to be there although it has a default (metadata "is_required"), and a type may say what one
    looks like (`EXAMPLE`). `special`: what makes some types of a table and its path.

    Raises the path's error for a key that is unknown or missing, and a value of another type or not finite.
    """
    return typing.cast(T, _read(kind, value, path, special or {}))


def numbers_of(
    value: Any, path: FieldPath, *, whole: type, name: str = ""
) -> Iterator[tuple[FieldPath, str, Any]]:
    """Return every number below `value` with its path and the name of its field; objects of type `whole`, too."""
    if isinstance(value, whole) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        yield path, name, value
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from numbers_of(getattr(value, each.name), path / each.name, whole=whole, name=each.name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from numbers_of(each, path / key, whole=whole, name=name)
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from numbers_of(each, path / number, whole=whole, name=name)


def _read(hint: Any, value: Any, path: FieldPath, special: Mapping[type, Callable[..., Any]]) -> Any:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint in special:
        return special[hint](_table(hint, value, path), str(path))
    if dataclasses.is_dataclass(hint):
        return _record(hint, _table(hint, value, path), path, special)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inside:
            return None
        return _read(next(each for each in inside if each is not type(None)), value, path, special)
    if origin is typing.Literal:
        if value not in inside:
            path.refuse(f" = {_shown(value)}, expected one of {', '.join(map(repr, inside))}")
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            path.refuse(f" = {_shown(value)}, expected a list")
        kinds = inside[:1] * len(value) if inside[-1] is Ellipsis else inside
        if len(kinds) != len(value):
            path.refuse(f" has {len(value)} values, expected {len(kinds)}")
        return tuple(
            _read(kind, each, path / i, special) for i, (kind, each) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        table = _table(hint, value, path)
        return {
            _key(inside[0], key, path / key): _read(inside[1], each, path / key, special)
            for key, each in table.items()
        }
    return _scalar(hint, value, path)


def _record(
    kind: Any, table: Mapping[str, Any], path: FieldPath, special: Mapping[type, Callable[..., Any]]
) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    for name in table:
        if name not in fields:
            (path / name).refuse(": unknown key", did_you_mean(name, fields))
    for name, each in fields.items():
        has_default = each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING
        if name not in table and (path.needs_all or each.metadata.get("is_required") or not has_default):
            (path / name).refuse(" is missing", path.remedy or f"add it: {name} = {_example(hints[name])}")
    return kind(**{name: _read(hints[name], value, path / name, special) for name, value in table.items()})


def _scalar(hint: Any, value: Any, path: FieldPath) -> Any:
    if hint is Any:
        return tuple(value) if isinstance(value, list) else value
    if type(value) is int and hint in (int, float):
        try:
            as_float = float(value)
        except OverflowError:
            path.refuse(" is too large for a number")
        value = as_float if hint is float else value
    if type(value) is not hint:
        path.refuse(f" = {_shown(value)}, expected {_WORDS[hint]}")
    if hint is float and not math.isfinite(value):
        path.refuse(f" = {value}, expected a finite number", "leave out what is not known, if it is optional")
    return value


def _table(hint: Any, value: Any, path: FieldPath) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        example = getattr(hint, "EXAMPLE", "")
        path.refuse(f" = {_shown(value)}, expected {f'a figure such as {example}' if example else 'a table'}")
    return value


def _key(hint: Any, key: str, path: FieldPath) -> Any:
    inside = typing.get_args(hint)
    if hint is int:
        if not (key.isascii() and key.isdigit() and len(key) < _MOST_CHARACTERS and str(int(key)) == key):
            path.refuse(": expected a whole number from 0 as key")
        return int(key)
    if typing.get_origin(hint) is tuple:
        if len(parts := tuple(key.split(_BETWEEN))) != len(inside):
            path.refuse(f": expected {len(inside)} parts as key, with {_BETWEEN} between them")
        return parts
    if inside and key not in inside:
        path.refuse(f": expected one of {', '.join(map(repr, inside))} as key")
    return key


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _example(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return f'"{typing.get_args(hint)[0]}"'
    return str(_EXAMPLES.get(hint) or getattr(hint, "EXAMPLE", "{ ... }"))
