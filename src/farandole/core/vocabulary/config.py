"""From text to a frozen dataclass, strictly: unknown keys are errors with the nearest name.

One reader for TOML, JSON and ``--set key=value``, and the tables that keys of a plan may stand in. Not here: what
the keys mean (that is the dataclass's own `__post_init__`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

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
        "sync", "balance", "balance_cap",
    ),
}  # fmt: skip
"""All keys of a plan, by table; "": in none."""


def read_mapping(path: Path, *, error: type[ConfigError] = ConfigError, remedy: str = "") -> dict[str, Any]:
    """Read a TOML or JSON file (by its ending) that holds one table; raise `error` when it does not.

    `remedy`: what to do where there is no such file, or another one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"there is no file {path}", remedy=remedy) from None
    except (OSError, ValueError) as problem:
        raise error(f"cannot read {path}: {problem}") from None
    try:
        value = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        kind = "JSON" if path.suffix == ".json" else "TOML"
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
            raise error(f"--set {setting!r}: expected key=value", remedy="such as --set zero=1 (docs/plan.md)")
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
