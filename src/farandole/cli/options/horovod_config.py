"""The configuration file of horovodrun (``--config-file``, YAML): sections of keys, each a flag of the table.

Its tables are derived from `horovod_flags.FLAGS`; ``controller: gloo`` stands beside them. Unknown keys
and wrong types are errors that name the file, the key and the nearest known one.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, NamedTuple

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.suggestions import did_you_mean, install_command
from .horovod_flags import FLAGS, Flag

MOST_CHARACTERS = 1 << 15
"""Longest file: all keys need a tenth of it, and a YAML parser takes seconds for odd and long ones."""
_CONTROLLERS = ("gloo", "mpi")
_RETIRED = {"logging.hide_timestamp": "logging.with_timestamp"}
"""Keys of old files that Horovod does not read any more either."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class ConfigFile(NamedTuple):
    """What a configuration file says."""

    values: dict[str, Any]
    """By flag name."""
    controller: str | None
    notes: list[str]


def read_config_file(path: Path) -> ConfigFile:
    """Read a configuration file; raise `ConfigError` for what it must not say, or without PyYAML."""
    content = _load(path)
    by_key = {flag.config: flag for flag in FLAGS if flag.config}
    sections = {key.partition(".")[0] for key in by_key}
    values: dict[str, Any] = {}
    notes = []
    controller = None
    for section, keys in content.items():
        if section == "controller":
            controller = _controller(keys, path)
            continue
        if section not in sections:
            known = [*sections, "controller"]
            raise ConfigError(
                f"{path}: unknown key {reprlib.repr(section)}", remedy=did_you_mean(str(section), known)
            )
        if keys is None:
            continue  # a section with no key under it
        if not isinstance(keys, dict):
            raise ConfigError(f"{path}: {section}: expected keys with values, got {reprlib.repr(keys)}")
        for key, value in keys.items():
            name = f"{section}.{key}"
            if name in _RETIRED:
                notes.append(f"{path}: {name} has no effect; use {_RETIRED[name]}")
            elif name not in by_key:
                known = [each.partition(".")[2] for each in by_key if each.startswith(f"{section}.")]
                raise ConfigError(
                    f"{path}: unknown key {str(key)!r} in {section}", remedy=did_you_mean(str(key), known)
                )
            elif value is not None:
                values[by_key[name].name] = _value(by_key[name], value, f"{path}: {name}")
    return ConfigFile(values, controller, notes)


def _load(path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"--config-file {path} needs PyYAML", remedy=f"install it with: {install_command('horovod')}"
        ) from None
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read {path}: {problem}") from None
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{path} is longer than {MOST_CHARACTERS} characters", remedy="is it a configuration of horovodrun?"
        )
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(problem).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected sections of keys")
    return content


def _controller(value: Any, path: Path) -> str:
    if value not in _CONTROLLERS:
        raise ConfigError(
            f"No such controller supported: {value if isinstance(value, str) else reprlib.repr(value)}",
            remedy=f"{path}: controller is gloo or mpi",
        )
    return str(value)


def _value(flag: Flag, value: Any, where: str) -> Any:
    fits = isinstance(value, flag.kind) or (flag.kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and flag.kind is not bool):
        raise ConfigError(f"{where}: expected {_KINDS[flag.kind]}, got {reprlib.repr(value)}")
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{where}: expected one of {', '.join(flag.choices)}, got {reprlib.repr(value)}")
    return flag.kind(value)
