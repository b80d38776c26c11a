"""The doctor's findings as text: a table of hosts, a matrix of links, and the findings, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ...core.vocabulary.text import in_columns
from ...core.vocabulary.units import format_bits_per_second, format_bytes, format_seconds
from .checks import weakest_link
from .facts import SEVERITIES, ClusterFacts, ClusterFinding, HostFacts, Interface, LinkFacts

MOST_IN_MATRIX = 12
"""Hosts; of more only the weakest links are listed."""


def to_text(facts: ClusterFacts, findings: Sequence[ClusterFinding]) -> str:
    """Return the whole page."""
    parts = [_hosts(facts)] if facts.hosts else []
    if facts.links:
        parts.append(_links(facts))
    parts += [_finding(finding) for finding in findings]
    parts.append(_closing(findings))
    return "\n\n".join(parts)


def to_mapping(facts: ClusterFacts, findings: Sequence[ClusterFinding], seconds: float) -> dict[str, Any]:
    """Return everything as plain values."""
    weakest = weakest_link(facts)
    return {
        "version": 1,
        "healthy": not any(finding.severity == "problem" for finding in findings),
        "seconds": round(seconds, 2),
        "findings": [vars(finding) for finding in findings],
        "hosts": [_host_mapping(host) for host in facts.hosts],
        "links": [vars(link) for link in facts.links],
        "weakest_link": None if weakest is None else vars(weakest),
        "unreachable": [vars(lost) for lost in facts.unreachable],
    }


def _host_mapping(host: HostFacts) -> dict[str, Any]:
    """Return the facts of a host by their names alone, without the groups."""
    mapping, chosen = asdict(host), host.network.interface
    groups = mapping.pop("network") | mapping.pop("resources")
    return {**mapping, **groups, "interface": None if chosen is None else chosen.name}


def _hosts(facts: ClusterFacts) -> str:
    rows = [_row(host) for host in facts.hosts]
    if len(rows) == 1:
        rows = [{name: text for name, text in rows[0].items() if name not in ("address", "clock")}]
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(in_columns(table, left=range(len(table[0]))))


def _row(host: HostFacts) -> dict[str, str]:
    shown, resources, gpus = _shown(host), host.resources, host.resources.gpus
    allowed = "" if resources.core_quota is None else f" ({resources.core_quota:.3g} allowed)"
    return {
        "host": host.name,
        "address": host.address or "-",
        "interface": "-" if shown is None else shown.name + _speed(shown),
        "MTU": "-" if shown is None else _or(shown.mtu_bytes, str),
        "cores": _or(resources.cores, str) + allowed,
        "memory free": _or(resources.memory_available_bytes, format_bytes),
        "/dev/shm": _or(resources.shared_memory_bytes, format_bytes),
        "GPUs": f"{len(gpus)} x {gpus[0].name}" if gpus else "none",
        "python": host.python or "?",
        "torch": host.torch or "none",
        "farandole": host.farandole or "none",
        "commit": (host.commit[:7] + "+" * host.commit.endswith("+")) or "-",
        "clock": _clock(host),
    }


def _shown(host: HostFacts) -> Interface | None:
    """Return the interface that leads to the others; of a host alone, the first that could."""
    real = [each for each in host.network.interfaces if each.addresses and not each.is_virtual and each.is_up]
    return host.network.interface or next(iter(real), None)


def _speed(shown: Interface) -> str:
    return f" ({format_bits_per_second(shown.speed_megabits * 1e6)})" if shown.speed_megabits else ""


def _clock(host: HostFacts) -> str:
    offset, error = host.clock_offset_seconds, host.clock_error_seconds
    if offset is None or error is None:
        return "?"
    if abs(offset) <= max(error, 1e-3):
        return "the same"
    return ("+" if offset > 0 else "") + format_seconds(offset)


def _or(value: Any, show: Callable[[Any], str]) -> str:
    return "?" if value is None else show(value)


def _links(facts: ClusterFacts) -> str:
    weakest = weakest_link(facts)
    if len(facts.hosts) <= MOST_IN_MATRIX:
        parts = [
            f"rate of one connection, from row to column:\n{_matrix(facts, _rate)}",
            f"a small message there and back:\n{_matrix(facts, _round_trip)}",
        ]
    else:
        measured = [link for link in facts.links if link.bits_per_second]
        slow = sorted(measured, key=lambda link: link.bits_per_second or 0)[:10]
        lines = [f"  {link.source} -> {link.target}  {_rate(link)}, {_round_trip(link)}" for link in slow]
        parts = ["\n".join(["the slowest links:", *lines])]
    if weakest is None:
        parts.append("no link could be measured")
    else:
        figures = f"{_rate(weakest)}, {_round_trip(weakest)} there and back"
        parts.append(f"weakest link: {weakest.source} -> {weakest.target}, {figures}")
    return "\n\n".join(parts)


def _matrix(facts: ClusterFacts, show: Callable[[LinkFacts], str]) -> str:
    names = [host.name for host in facts.hosts]
    cells = {(link.source, link.target): show(link) for link in facts.links} | {
        (name, name): "-" for name in names
    }
    rows = [["", *names], *([row, *(cells.get((row, column), "?") for column in names)] for row in names)]
    return "\n".join(in_columns(rows, left=range(len(rows[0]))))


def _rate(link: LinkFacts) -> str:
    return "no call" if link.problem else _or(link.bits_per_second, format_bits_per_second)


def _round_trip(link: LinkFacts) -> str:
    return "no call" if link.problem else _or(link.round_trip_seconds, format_seconds)


def _finding(finding: ClusterFinding) -> str:
    where = f" (on {finding.host})" if finding.host else ""
    return f"{finding.severity}: {finding.what}\n  why: {finding.why}\n  fix{where}: {finding.fix}"


def _closing(findings: Sequence[ClusterFinding]) -> str:
    if not findings:
        return "No findings."
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    listed = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items() if count]
    return ", ".join(listed) + ("." if counts["problem"] else ". Nothing keeps jobs from running.")
