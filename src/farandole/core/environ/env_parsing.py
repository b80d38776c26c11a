"""Numbers and switches in variables: read from a mapping, and refused by name where they make no sense."""

from __future__ import annotations

from collections.abc import Mapping

from ..vocabulary.errors import ConfigError


def read_number(environ: Mapping[str, str], name: str, default: int, least: int) -> int:
    """Return a whole number; raise `ConfigError` naming the variable for one below `least`, or none."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a whole number") from None
    if value < least:
        raise ConfigError(f"{name}={value}: expected at least {least}")
    return value


def read_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return a number of seconds; raise `ConfigError` naming the variable for one below 0, or none."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={text}: expected at least 0 seconds")
    return value


def read_switch(environ: Mapping[str, str], name: str) -> bool:
    """Return whether the variable is on; raise `ConfigError` naming it for what is neither on nor off."""
    text = environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{name}={text!r}: expected 1 or 0")
