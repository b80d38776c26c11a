"""A `ModelProfile` as a JSON file: written whole, and read strictly, with the place of what is wrong.

Its fields are those of the types, so that there is one definition of what a profile says. Keys of activations are
a precision and a recomputation, such as "fp32/none".
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.text import did_you_mean
from .profile import ModelProfile

FORMAT = "farandole model profile"
VERSION = 1
_BETWEEN = "/"
_POSITIVE = ("samples", "count", "experts", "heads", "divides", "rows", "columns", "element_bytes", "sequence")
"""Fields of which 0 says nothing."""
_PARTS = (
    ("fused_flops", "forward_flops"), ("fused_backward_flops", "backward_flops"), ("products", "operations"),
)  # fmt: skip
"""Figures of a unit that are parts of others."""
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def write_profile(profile: ModelProfile, path: str | Path) -> None:
    """Write a profile; a file of that name is replaced. Raises `ConfigError` if it cannot be written."""
    path = Path(path)
    text = json.dumps(profile_to_mapping(profile), indent=1, allow_nan=False) + "\n"
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be written: {problem.strerror}") from None


def read_profile(path: str | Path) -> ModelProfile:
    """Read a profile.

    Raises:
        ConfigError: the file cannot be read, is no profile, or of another version; a field is missing, unknown, of
            another type, or impossible. The error has the field's path.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no text in UTF-8", remedy=_REMEDY) from None
    try:
        mapping = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path}: is no JSON: {problem}", remedy=_REMEDY) from None
    return profile_from_mapping(mapping, str(path))


_REMEDY = "make it again from the model"


def profile_to_mapping(profile: ModelProfile) -> dict[str, Any]:
    """Return a profile as plain values for JSON."""
    return {"format": FORMAT, "version": VERSION, **_plain(profile)}


def profile_from_mapping(mapping: Any, where: str = "profile") -> ModelProfile:
    """Return the profile that `profile_to_mapping` was given; `where` begins the paths of errors."""
    if not isinstance(mapping, dict) or mapping.get("format") != FORMAT:
        raise ConfigError(f'{where}: is no profile of a model: "format" is not {FORMAT!r}', remedy=_REMEDY)
    version = mapping.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(f"{where}: version = {version!r}, expected {VERSION}", remedy=_REMEDY)
    fields = {key: value for key, value in mapping.items() if key not in ("format", "version")}
    profile: ModelProfile = _read(ModelProfile, fields, f"{where}: ")
    _check(profile, where)
    return profile


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_BETWEEN.join(key) if isinstance(key, tuple) else key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _read(kind: Any, value: Any, path: str) -> Any:
    """Return `value` as `kind`; `path` is where it is, with a separator at its end if it is not a field."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _read(inside[0], value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(path, value, "a list")
        return tuple(_read(inside[0], each, f"{path}.{number}") for number, each in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        return _read_mapping(inside, value, path)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, path)
    return _read_plain(kind, value, path)


def _read_mapping(inside: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    made: dict[Any, Any] = {}
    for key, each in value.items():
        name: Any = key
        if typing.get_origin(inside[0]) is tuple:
            name = tuple(key.split(_BETWEEN))
            if len(name) != len(typing.get_args(inside[0])):
                raise ConfigError(f"{path}.{key}: expected a precision and a recomputation such as fp32/none")
        made[name] = _read(inside[1], each, f"{path}.{key}")
    return made


def _read_fields(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    prefix = path if path.endswith(" ") else f"{path}."
    for key in value:
        if key not in fields:
            raise ConfigError(f"{prefix}{key}: is not known", remedy=did_you_mean(key, fields))
    made = {}
    for name, each in fields.items():
        if name in value:
            made[name] = _read(hints[name], value[name], f"{prefix}{name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name}: is missing", remedy=_REMEDY)
    return kind(**made)


def _read_plain(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise _wrong(path, value, _WORDS[kind])
    if kind in (int, float):
        least = 1 if path.replace(" ", ".").rpartition(".")[2] in _POSITIVE else 0
        if not math.isfinite(value) or value < least:
            raise ConfigError(
                f"{path} = {value}, expected {f'at least {least}' if math.isfinite(value) else 'less'}"
            )
    return value


def _wrong(path: str, value: Any, expected: str) -> ConfigError:
    shown = json.dumps(value)
    return ConfigError(f"{path} = {shown if len(shown) < 40 else f'{shown[:36]} ...'}, expected {expected}")


def _check(profile: ModelProfile, where: str) -> None:
    """Raise `ConfigError` where fields contradict each other."""
    if not profile.units:
        raise ConfigError(f"{where}: units: a model has at least one")
    if profile.device not in ("", "cpu", "cuda"):
        raise ConfigError(f"{where}: device = {profile.device!r}, expected 'cpu' or 'cuda'", remedy=_REMEDY)
    for number, unit in enumerate(profile.units):
        path = f"{where}: units.{number}"
        for part_name, whole_name in _PARTS:
            some, whole = getattr(unit, part_name), getattr(unit, whole_name)
            if some > whole * (1 + 1e-6):
                raise ConfigError(f"{path}.{part_name} = {some:g}, more than {whole_name} = {whole:g}")
        for name in ("tensor", "expert"):
            part = getattr(unit, name)
            if part is not None and part.flops > unit.forward_flops * (1 + 1e-6):
                raise ConfigError(
                    f"{path}.{name}.flops = {part.flops:g}, more than the unit's forward_flops = "
                    f"{unit.forward_flops:g}"
                )
            if part is not None and part.parameters > unit.parameters + unit.frozen_bytes:
                raise ConfigError(
                    f"{path}.{name}.parameters = {part.parameters}, more than the unit has: {unit.parameters}"
                )
        if unit.tensor is not None and unit.tensor.saved_bytes > unit.saved_bytes * (1 + 1e-6):
            raise ConfigError(
                f"{path}.tensor.saved_bytes: more than the unit's saved_bytes = {unit.saved_bytes:g}"
            )
    for name in profile.memory.weights:
        if name not in profile.memory.optimizer:
            raise ConfigError(f"{where}: memory.optimizer.{name}: is missing", remedy=_REMEDY)
