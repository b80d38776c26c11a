"""``cluster.toml``: a cluster on disk, read strictly and written in one piece.

docs/plan/internals.md has the format.

Standard library only: planning reads it without torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from .cluster import CLUSTER_VERSION, OPERATIONS, Cluster, Coefficient, Device, Tier
from .vocabulary.codec_spec import AUTO, CodecSpec
from .vocabulary.config import FieldPath, from_plain, numbers_of, read_mapping
from .vocabulary.errors import ConfigError
from .vocabulary.run_files import write_private
from .vocabulary.text import did_you_mean, upgrade_remedy

_HEAD = """\
# What a cluster gives, for `farandole plan`. See docs/plan/internals.md.
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
    cluster = from_plain(Cluster, values, FieldPath(where))
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


# What the figures of a cluster may be: asked of every file that is read, and before one is written.
#
# [Note: impossible figures] A planner that divides by a bandwidth of zero answers with infinity, and one that
# believes a link faster than its hardware answers with a plan that loses. So every number has a range here, by the
# name of its field, and what contradicts another figure is refused with both.


PRECISIONS = ("fp32", "bf16", "fp16")
SLACK = 1.02
"""How far a measured figure may be above what the hardware promises: rates are rounded, clocks are boosted."""
_POSITIVE = (
    "memory_bytes", "memory_bytes_per_second", "flops", "flops_per_second", "peak_flops_per_second",
    "bytes_per_second", "attention_flops_per_second", "pair_bytes_per_second",
    "line_bytes_per_second", "ratio", "disk_write_bytes_per_second",
    "disk_read_bytes_per_second", "loader_bytes_per_second", "rank_speeds",
)  # fmt: skip
_NOT_NEGATIVE = (
    "launch_seconds",
    "latency_seconds",
    "seconds_per_byte",
    "seconds_per_bucket",
    "price_per_rank_hour",
)
_FROM_ONE = ("compute_slowdown", "exchange_slowdown", "ranks", "rounds", "version")


def check_version(version: Any, path: FieldPath) -> None:
    """Refuse a file of a newer format, before its keys are looked at."""
    if isinstance(version, int) and version > CLUSTER_VERSION:
        (path / "version").refuse(
            f" = {version}, and this farandole reads files up to version {CLUSTER_VERSION}",
            upgrade_remedy(),
        )


def check_cluster(cluster: Cluster, where: str) -> None:
    """Raise `ConfigError` for the first figure that cannot be; `where` names the file.

    See [Note: impossible figures].
    """
    path = FieldPath(where)
    check_version(cluster.version, path)
    for at, name, value in numbers_of(cluster, path, whole=Coefficient):
        _check_number(at, name, value)
    if not cluster.name.strip():
        (path / "name").refuse(" is empty", 'give the cluster a name: name = "two racks"')
    _check_device(cluster.device, path / "device")
    _check_tiers(cluster.tiers, path / "tiers")
    for codec in cluster.codecs:
        at = path / "codecs" / codec
        try:
            is_choice = CodecSpec.parse(codec).name == AUTO
        except ConfigError as problem:
            at.refuse(f": {problem.message}", problem.remedy)
        if is_choice:
            at.refuse(": chooses among codecs, and has no cost of its own", "name the codecs that it chooses from")
    for rank in cluster.rank_speeds:
        if not 0 <= rank < cluster.ranks:
            (path / "rank_speeds" / rank).refuse(f": there are ranks 0 to {cluster.ranks - 1}")


def _check_number(path: FieldPath, name: str, value: Any) -> None:
    if not isinstance(value, Coefficient):
        _check_range(path, name, value)
        return
    for key in ("value", "low", "high"):
        part = getattr(value, key)
        if part is not None:
            _check_range(path if key == "value" else path / key, name, part)
    low, high = value.interval()
    if low > high:
        path.refuse(f": low = {low:g} is above high = {high:g}", "exchange the two")
    if not low <= value.value <= high:
        path.refuse(
            f" = {value.value:g} is outside of its interval from {low:g} to {high:g}",
            "correct low and high, or leave them out",
        )


def _check_range(path: FieldPath, name: str, number: float) -> None:
    shown = f" = {number:g}" if isinstance(number, float) else f" = {number}"
    if not math.isfinite(number):
        path.refuse(f"{shown}, expected a finite number", "leave out what is not known, if it is optional")
    if name in _POSITIVE and number <= 0:
        path.refuse(f"{shown}, expected more than 0", "measure it again: farandole measure")
    if name in _NOT_NEGATIVE and number < 0:
        path.refuse(f"{shown}, expected 0 or more", "measure it again: farandole measure")
    if name in _FROM_ONE and number < 1:
        path.refuse(f"{shown}, expected at least 1")


def _check_device(device: Device, path: FieldPath) -> None:
    if not device.compute:
        (path / "compute").refuse(" is empty", "add rates of a precision: [[device.compute.fp32]]")
    for group in ("compute", "attention_flops_per_second", "peak_flops_per_second"):
        for precision in getattr(device, group):
            if precision not in PRECISIONS:
                (path / group / precision).refuse(": unknown precision", did_you_mean(precision, PRECISIONS))
    for precision, rate in device.attention_flops_per_second.items():
        _check_peak(rate, precision, device, path / "attention_flops_per_second" / precision, path)
    for precision, rates in device.compute.items():
        at = path / "compute" / precision
        if not rates:
            at.refuse(" has no rates", "leave it out, or add one")
        for number, (before, after) in enumerate(pairwise(rates), start=1):
            if after.flops <= before.flops:
                (at / number / "flops").refuse(
                    f" = {after.flops:g} follows {before.flops:g}: sizes must grow", "sort them by flops"
                )
        for number, each in enumerate(rates):
            _check_peak(each.flops_per_second, precision, device, at / number / "flops_per_second", path)


def _check_peak(rate: Coefficient, precision: str, device: Device, at: FieldPath, path: FieldPath) -> None:
    peak = device.peak_flops_per_second.get(precision)
    if peak is not None and rate.value > SLACK * peak:
        at.refuse(
            f" = {rate.value:g} is beyond the device's peak of {peak:g} "
            f"({path / 'peak_flops_per_second' / precision})",
            "correct one of them",
        )


def _check_tiers(tiers: tuple[Tier, ...], path: FieldPath) -> None:
    if not tiers:
        path.refuse(" is empty", 'add the ranks of a host: [[tiers]] with name = "host" and ranks')
    for number, (before, after) in enumerate(pairwise(tiers), start=1):
        if after.ranks <= before.ranks:
            (path / number / "ranks").refuse(
                f" = {after.ranks}, but the tier inside of it has {before.ranks}: tiers must grow",
                "order tiers from the innermost; the last has all ranks",
            )
        if after.ranks % before.ranks:
            (path / number / "ranks").refuse(
                f" = {after.ranks}, which {before.ranks} ranks of the tier inside of it do not divide",
                "every host, or switch, must have equally many ranks",
            )
    for number, tier in enumerate(tiers):
        _check_tier(tier, path / number)


def _check_tier(tier: Tier, path: FieldPath) -> None:
    for operation, cost in tier.collectives.items():
        at = path / "collectives" / operation
        if operation not in OPERATIONS:
            at.refuse(": unknown operation", did_you_mean(operation, OPERATIONS))
        line, rate = tier.line_bytes_per_second, cost.bytes_per_second
        if line is not None and rate.value > SLACK * line.interval()[1]:
            (at / "bytes_per_second").refuse(
                f" = {rate.value:g} is beyond what the link gives: {path / 'line_bytes_per_second'} = "
                f"{line.value:g}",
                "correct one of them",
            )
    line, pair = tier.line_bytes_per_second, tier.pair_bytes_per_second
    if line is not None and pair is not None and pair.value > SLACK * line.interval()[1]:
        (path / "pair_bytes_per_second").refuse(
            f" = {pair.value:g} is beyond what the link gives: {path / 'line_bytes_per_second'} = {line.value:g}",
            "correct one of them",
        )
    missing = [operation for operation in OPERATIONS if operation not in tier.collectives]
    if tier.ranks > 1 and missing:
        (path / "collectives" / missing[0]).refuse(
            " is missing", f"each of {', '.join(OPERATIONS)} needs latency_seconds and bytes_per_second"
        )
