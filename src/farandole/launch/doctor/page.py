"""The doctor's findings as text: a table of hosts, a matrix of links, and the findings, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core.vocabulary.units import format_bits_per_second, format_bytes, format_seconds
from .checks.links import weakest_link
from .facts.facts import ClusterFacts, HostFacts, Interface, LinkFacts
from .facts.finding import SEVERITIES, ClusterFinding

MOST_IN_MATRIX = 12
"""Hosts; of more only the weakest links are listed."""


def to_text(facts: ClusterFacts, findings: Sequence[ClusterFinding]) -> str:
    """Return the whole page."""
    parts = [_hosts(facts)] if facts.hosts else []
    parts += ["\n".join(lines) for lines in [_tensorflow(facts)] if lines]
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
        "findings": [finding.to_mapping() for finding in findings],
        "hosts": [_host_mapping(host) for host in facts.hosts],
        "links": [vars(link) for link in facts.links],
        "weakest_link": None if weakest is None else vars(weakest),
        "unreachable": [vars(lost) for lost in facts.unreachable],
    }


def _host_mapping(host: HostFacts) -> dict[str, Any]:
    """Return the facts of a host by their names alone, without the groups."""
    chosen = host.network.interface
    return {
        "name": host.name,
        "hostname": host.hostname,
        "address": host.address,
        **vars(host.software),
        **vars(host.tensorflow),
        **vars(host.network),
        **vars(host.resources),
        "clock_offset_seconds": host.clock.offset_seconds,
        "clock_error_seconds": host.clock.error_seconds,
        "interface": None if chosen is None else chosen.name,
        "interfaces": [vars(each) for each in host.network.interfaces],
        "routes": {peer: vars(route) for peer, route in host.network.routes.items()},
        "gpus": [vars(gpu) for gpu in host.resources.gpus],
    }


def _hosts(facts: ClusterFacts) -> str:
    columns: list[tuple[str, Callable[[HostFacts], str]]] = [
        ("host", lambda host: host.name),
        ("address", lambda host: host.address or "-"),
        ("interface", _interface),
        ("MTU", _mtu),
        ("cores", _cores),
        ("memory free", lambda host: _or(host.resources.memory_available_bytes, format_bytes)),
        ("/dev/shm", lambda host: _or(host.resources.shared_memory_bytes, format_bytes)),
        ("GPUs", _gpus),
        ("python", lambda host: host.software.python or "?"),
        ("torch", lambda host: host.software.torch or "none"),
        ("farandole", lambda host: host.software.farandole or "none"),
        ("commit", lambda host: _commit(host.software.commit)),
        ("clock", _clock),
    ]
    if len(facts.hosts) == 1:
        gone = ("address", "clock")
        columns = [column for column in columns if column[0] not in gone]
    rows = [[name for name, _ in columns], *([show(host) for _, show in columns] for host in facts.hosts)]
    return _table(rows)


def _tensorflow(facts: ClusterFacts) -> list[str]:
    """Return a line for the hosts that have the same of TensorFlow and Keras; nothing where no host has any."""
    alike: dict[str, list[str]] = {}
    for host in facts.hosts:
        found = host.tensorflow
        words = [f"{name} {version}" for name, version in found.tensorflow.items()]
        words += [f"keras {found.keras} on {found.keras_backend or '?'}"] if found.keras else []
        words += [f"tf-keras {found.tf_keras}"] if found.tf_keras else []
        if words:
            words.append(f"C++ compiler {found.cpp_compiler or 'none'}")
            alike.setdefault(", ".join(words), []).append(host.name)
    return [f"{', '.join(names)}: {words}" for words, names in alike.items()]


def _shown(host: HostFacts) -> Interface | None:
    """Return the interface that leads to the others; of a host alone, the first that could."""
    real = [each for each in host.network.interfaces if each.addresses and not each.is_virtual and each.is_up]
    return host.network.interface or next(iter(real), None)


def _interface(host: HostFacts) -> str:
    shown = _shown(host)
    if shown is None:
        return "-"
    return shown.name + (
        f" ({format_bits_per_second(shown.speed_megabits * 1e6)})" if shown.speed_megabits else ""
    )


def _mtu(host: HostFacts) -> str:
    shown = _shown(host)
    return "-" if shown is None else _or(shown.mtu_bytes, str)


def _cores(host: HostFacts) -> str:
    return _or(host.resources.cores, str) + (
        f" ({host.resources.core_quota:.3g} allowed)" if host.resources.core_quota is not None else ""
    )


def _gpus(host: HostFacts) -> str:
    return f"{len(host.resources.gpus)} x {host.resources.gpus[0].name}" if host.resources.gpus else "none"


def _commit(commit: str) -> str:
    return (commit[:7] + ("+" if commit.endswith("+") else "")) or "-"


def _clock(host: HostFacts) -> str:
    offset, error = host.clock.offset_seconds, host.clock.error_seconds
    if offset is None or error is None:
        return "?"
    if abs(offset) <= max(error, 1e-3):
        return "the same"
    return ("+" if offset > 0 else "") + format_seconds(offset)


def _or(value: Any, show: Callable[[Any], str]) -> str:
    return "?" if value is None else show(value)


def _links(facts: ClusterFacts) -> str:
    lines = []
    if len(facts.hosts) <= MOST_IN_MATRIX:
        lines += ["rate of one connection, from row to column:", _matrix(facts, _rate), ""]
        lines += ["a small message there and back:", _matrix(facts, _round_trip), ""]
    else:
        slow = sorted(
            (link for link in facts.links if link.bits_per_second), key=lambda link: link.bits_per_second or 0
        )
        lines += ["the slowest links:"]
        lines += [f"  {link.source} -> {link.target}  {_rate(link)}, {_round_trip(link)}" for link in slow[:10]]
        lines += [""]
    weakest = weakest_link(facts)
    if weakest is None:
        lines.append("no link could be measured")
    else:
        lines.append(
            f"weakest link: {weakest.source} -> {weakest.target}, {_rate(weakest)}, "
            f"{_round_trip(weakest)} there and back"
        )
    return "\n".join(lines)


def _matrix(facts: ClusterFacts, show: Callable[[LinkFacts], str]) -> str:
    names = [host.name for host in facts.hosts]
    links = {(link.source, link.target): link for link in facts.links}
    rows = [["", *names]]
    for source in names:
        cells = [
            "-" if source == target else show(links[source, target]) if (source, target) in links else "?"
            for target in names
        ]
        rows.append([source, *cells])
    return _table(rows)


def _rate(link: LinkFacts) -> str:
    if link.problem:
        return "no call"
    return "?" if link.bits_per_second is None else format_bits_per_second(link.bits_per_second)


def _round_trip(link: LinkFacts) -> str:
    if link.problem:
        return "no call"
    return "?" if link.round_trip_seconds is None else format_seconds(link.round_trip_seconds)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _finding(finding: ClusterFinding) -> str:
    where = f" (on {finding.host})" if finding.host else ""
    return f"{finding.severity}: {finding.what}\n  why: {finding.why}\n  fix{where}: {finding.fix}"


def _closing(findings: Sequence[ClusterFinding]) -> str:
    if not findings:
        return "No findings."
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    listed = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items() if count]
    return ", ".join(listed) + ("." if counts["problem"] else ". Nothing keeps jobs from running.")
