"""``cluster.toml``: a cluster on disk, read strictly and written in one piece.

docs/cluster-file.md has the format.

Standard library only: planning reads it without torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..vocabulary.config import read_mapping
from ..vocabulary.errors import ConfigError
from ..vocabulary.run_files import write_private
from .cluster import Cluster, Coefficient
from .limits import FieldPath, check_cluster, check_version, decode

_HEAD = """\
# What a cluster gives, for `farandole plan`. See docs/cluster-file.md.
# Sources: "measured" here, "preset" from a table and not measured, "fitted" to runs.
"""


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a ``.toml`` or ``.json`` file.

    Raises `ConfigError` with file and path of the field for unknown keys, wrong types, and figures that cannot be:
    ``cluster.toml: tiers.1.collectives.all_reduce.bytes_per_second = 0, expected more than 0``. Entries of lists
    are numbered from 0.
    """
    where = str(path)
    values = read_mapping(
        Path(path), remedy="farandole measure --out cluster.toml writes one of the machines here"
    )
    check_version(values.get("version"), FieldPath(where))
    cluster = decode(Cluster, values, FieldPath(where))
    check_cluster(cluster, where)
    return cluster


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster as TOML, in one piece; `read_cluster` gives an equal one back.

    Raises `ConfigError` for a cluster that could not be read again, and where the file cannot be written.
    """
    if Path(path).suffix == ".json":
        raise ConfigError(f"{path}: a cluster is written as TOML", remedy="name a file that ends in .toml")
    check_cluster(cluster, str(path))
    try:
        write_private(Path(path), _HEAD + to_toml(cluster))
    except (OSError, UnicodeEncodeError) as problem:
        raise ConfigError(
            f"cannot write {path}: {problem}", remedy="name a file in a folder that is there"
        ) from None


# Dataclasses as TOML that people read: one figure a line, tables for what has parts.
#
# Keys without a value, and empty tables, are left out.


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(value: Any) -> str:
    """Return a dataclass as TOML. Lists must hold dataclasses, and figures are inline tables."""
    return "\n".join(_lines(value, "")).strip("\n") + "\n"


def number_text(number: float) -> str:
    """Return the shortest text that reads back as this number; whole numbers without a point.

    >>> number_text(1.25e9), number_text(0.5), number_text(8), number_text(2.5e-05)
    ('1.25e9', '0.5', '8', '2.5e-5')
    """
    if isinstance(number, int):
        return str(number)
    text = repr(number)
    if "e" not in text and len(text) <= 8:
        return text.removesuffix(".0") if abs(number) >= 1 else text
    digits = next(
        (f"{number:.{places}e}" for places in range(17) if float(f"{number:.{places}e}") == number), text
    )
    mantissa, _, exponent = digits.partition("e")
    return f"{mantissa}e{int(exponent)}"


def _lines(value: Any, path: str, head: str = "") -> Iterator[str]:
    """Return the keys of a table, then the tables in it."""
    entries = dict(_entries(value))
    tables = {key: each for key, each in entries.items() if _is_table(each)}
    if head and (head.startswith("[[") or len(tables) < len(entries)):  # else its tables say that it is there
        yield from ("", head)
    yield from (f"{_key(key)} = {_inline(each)}" for key, each in entries.items() if key not in tables)
    for key, each in tables.items():
        inner = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(each, tuple):
            for row in each:
                yield from _lines(row, inner, f"[[{inner}]]")
        else:
            yield from _lines(each, inner, f"[{inner}]")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), each) for key, each in value.items())
        return
    for each in dataclasses.fields(value):
        content = getattr(value, each.name)
        factory = each.default_factory
        is_default = content is None or (factory is not dataclasses.MISSING and content == factory())
        if not is_default:
            yield each.name, content


def _is_table(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, Coefficient)
    )


def _inline(value: Any) -> str:
    if isinstance(value, Coefficient):
        parts = {"value": value.value, "source": value.source, "low": value.low, "high": value.high}
        inside = ", ".join(f"{key} = {_inline(each)}" for key, each in parts.items() if each is not None)
        return f"{{ {inside} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return number_text(value)
    return _text(str(value))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
