"""Quantities as people write them, and as people read them. Bytes are bytes, times are seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TypeVar

from .errors import ConfigError

T = TypeVar("T")

_BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3,
    "k": 1024, "m": 1024**2, "g": 1024**3,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3,
}  # fmt: skip
_TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "kb/s": 8e3, "mb/s": 8e6, "gb/s": 8e9}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z/]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes: ``25MiB``, ``25m``, ``25MB`` (decimal), ``26214400``.

    >>> parse_bytes("25MiB")
    26214400
    """
    if isinstance(text, int):
        return text
    return int(_parse(text, _BYTE_UNITS, "a number of bytes such as 25MiB"))


def parse_seconds(text: str | float) -> float:
    """Read a duration: ``30``, ``1.5s``, ``200ms``, ``5m``, ``1h``."""
    if isinstance(text, (int, float)):
        return float(text)
    return float(_parse(text, _TIME_UNITS, "a duration such as 30s or 5m"))


def parse_bits_per_second(text: str) -> float:
    """Read the rate of a link: ``200mbit``, ``1gbit``, ``25MB/s``. At least 8 kbit, at most 400 gbit."""
    rate = float(_parse(text, _RATE_UNITS, "a rate such as 200mbit or 1gbit"))
    if not 8e3 <= rate <= 4e11:
        raise ConfigError(f"{text!r} is not a rate between 8kbit and 400gbit")
    return rate


def read_option(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return what `parse` makes of the value of a command line's `option`; an error names the option."""
    try:
        return parse(text)
    except ConfigError as problem:
        raise ConfigError(f"{option} {problem.message}", remedy=problem.remedy) from None


def _parse(text: str, units: dict[str, int] | dict[str, float], wanted: str) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise ConfigError(f"{text!r} is not {wanted}")
    return float(match.group(1)) * units[unit]


def format_bytes(count: float) -> str:
    """Write bytes to be read: ``4.2 MB`` (decimal units, three figures)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}" if abs(count) < 1000 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Write a duration to be read: ``840 µs``, ``12.3 ms``, ``4.20 s``, ``3:05``, ``2:03:05``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_share(share: float, decimals: int | None = None) -> str:
    """Write a fraction as a percentage, with one decimal below 10 % unless `decimals` are given.

    >>> format_share(0.0523), format_share(0.3141), format_share(0.3141, decimals=1)
    ('5.2%', '31%', '31.4%')
    """
    if not math.isfinite(share):
        return "unknown"
    return f"{share:.{(1 if share < 0.0995 else 0) if decimals is None else decimals}%}"


def format_bits_per_second(rate: float) -> str:
    """Write the rate of a link to be read: ``200 Mbit/s``."""
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= scale:
            return f"{rate / scale:.4g} {unit}"
    return f"{rate:.0f} bit/s"


def format_rate(per_second: float) -> str:
    """Write a rate without its unit: ``950``, ``12.3k``, ``4.5M``."""
    for suffix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_second >= scale:
            return f"{per_second / scale:.3g}{suffix}"
    return f"{per_second:.3g}"
