"""Whether the hosts are there, and run the same programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..facts.facts import ClusterFacts, HostFacts
from ..facts.finding import ClusterFinding, Severity


def check_reached(facts: ClusterFacts) -> list[ClusterFinding]:
    """Every host of the list answers."""
    return [
        ClusterFinding(
            f"{lost.name}: {lost.cause}",
            "no rank can be started there, and a job that names this host does not start",
            lost.remedy or f"ssh {lost.name} true",
            host=lost.name,
        )
        for lost in facts.unreachable
    ]


def check_farandole(facts: ClusterFacts) -> list[ClusterFinding]:
    """The same farandole everywhere: ranks of two versions refuse each other."""
    return _compare(
        facts.hosts, "farandole", lambda host: host.farandole,
        severity="problem",
        why="ranks of two versions refuse each other when they meet",
        fix=lambda host, usual: f"{host.executable or 'python3'} -m pip install farandole=={usual}",
    )  # fmt: skip


def check_torch(facts: ClusterFacts) -> list[ClusterFinding]:
    """Torch is there, the same everywhere."""
    missing = [
        ClusterFinding(
            f"{host.name} has no torch for {host.executable or 'its python'}",
            "no rank can train there",
            f"{host.executable or 'python3'} -m pip install torch",
            host=host.name,
        )
        for host in facts.hosts
        if not host.torch
    ]
    have = [host for host in facts.hosts if host.torch]
    return missing + _compare(
        have, "torch", lambda host: host.torch,
        severity="problem",
        why="ranks with different torch refuse each other: collectives of two versions need not fit",
        fix=lambda host, usual: f"{host.executable or 'python3'} -m pip install torch=={usual.partition('+')[0]}",
    )  # fmt: skip


def check_python(facts: ClusterFacts) -> list[ClusterFinding]:
    """The same minor version of Python: pickled objects and compiled files differ otherwise."""
    return _compare(
        facts.hosts, "Python", lambda host: ".".join(host.python.split(".")[:2]) if host.python else "",
        severity="warning",
        why="pickled objects (samples, optimizer states) of one may not be read by the other",
        fix=lambda host, usual: f"make the environment of {host.name} with python{usual}",
    )  # fmt: skip


def check_working_directory(facts: ClusterFacts) -> list[ClusterFinding]:
    """The same commit of the working directory."""
    return _compare(
        facts.hosts, "the working directory", lambda host: _short(host.commit),
        severity="warning",
        why="the ranks would run different scripts",
        fix=lambda host, usual: f"git fetch && git checkout {usual.rstrip('+')}"
        + (" && git stash" if host.commit.endswith("+") else ""),
    )  # fmt: skip


def _short(commit: str) -> str:
    return commit[:10] + ("+" if commit.endswith("+") and len(commit) > 10 else "") if commit else ""


def _compare(
    hosts: Sequence[HostFacts],
    what: str,
    value_of: Callable[[HostFacts], str],
    *,
    severity: Severity,
    why: str,
    fix: Callable[[HostFacts, str], str],
) -> list[ClusterFinding]:
    """Return a finding for each host whose value is not the usual one: the most frequent, the first of equals."""
    said = {host.name: value_of(host) for host in hosts}
    known = [value for value in said.values() if value]
    if len(set(known)) < 2:
        return []
    counts = Counter(known)
    usual = max(counts, key=lambda value: (counts[value], -known.index(value)))
    like = [name for name, value in said.items() if value == usual]
    return [
        ClusterFinding(
            f"{host.name} has {what} {said[host.name]}, {' and '.join(like[:2])}{' and others' * (len(like) > 2)} "
            f"{'have' if len(like) > 1 else 'has'} {usual}",
            why, fix(host, usual), severity, host.name,
        )
        for host in hosts
        if said[host.name] not in ("", usual)
    ]  # fmt: skip
