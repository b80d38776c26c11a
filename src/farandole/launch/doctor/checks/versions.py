"""Whether the hosts are there, with the same farandole, and run the same programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..facts import ClusterFacts, ClusterFinding, Findings, HostFacts, Severity


def check_reached(facts: ClusterFacts) -> Findings:
    """Every host of the list answers, and has the version of farandole that is here."""
    for lost in facts.unreachable:
        yield ClusterFinding(
            f"{lost.name}: {lost.cause}",
            "no rank can be started there, and a job that names this host does not start",
            lost.remedy or f"ssh {lost.name} true",
            host=lost.name,
        )


def check_torch(facts: ClusterFacts) -> Findings:
    """Torch is there, the same everywhere."""
    for host in facts.hosts:
        if not host.torch:
            yield ClusterFinding(
                f"{host.name} has no torch for {host.executable or 'its python'}",
                "no rank can train there",
                f"{host.pip_install} torch",
                host=host.name,
            )
    yield from _compare(
        facts.hosts, "torch", lambda host: host.torch,
        severity="problem",
        why="ranks with different torch refuse each other: collectives of two versions need not fit",
        fix=lambda host, usual: f"{host.pip_install} torch=={usual.partition('+')[0]}",
    )  # fmt: skip


def check_python(facts: ClusterFacts) -> Findings:
    """The same minor version of Python: pickled objects and compiled files differ otherwise."""
    return _compare(
        facts.hosts, "Python", lambda host: ".".join(host.python.split(".")[:2]),
        severity="warning",
        why="pickled objects (samples, optimizer states) of one may not be read by the other",
        fix=lambda host, usual: f"make the environment of {host.name} with python{usual}",
    )  # fmt: skip


def check_working_directory(facts: ClusterFacts) -> Findings:
    """The same commit of the working directory."""
    return _compare(
        facts.hosts, "the working directory", lambda host: _short(host.commit),
        severity="warning",
        why="the ranks would run different scripts",
        fix=lambda host, usual: f"git fetch && git checkout {usual.rstrip('+')}"
        + (" && git stash" if host.commit.endswith("+") else ""),
    )  # fmt: skip


def _short(commit: str) -> str:
    return commit[:10] + ("+" if commit.endswith("+") and len(commit) > 10 else "")


def _compare(
    hosts: Sequence[HostFacts],
    what: str,
    value_of: Callable[[HostFacts], str],
    *,
    severity: Severity,
    why: str,
    fix: Callable[[HostFacts, str], str],
) -> Findings:
    """Return a finding for each host whose value is not the usual one: the most frequent, the first of equals."""
    values = {host.name: value_of(host) for host in hosts}
    known = [value for value in values.values() if value]
    if len(set(known)) < 2:
        return []
    usual = Counter(known).most_common(1)[0][0]
    like = [name for name, value in values.items() if value == usual]
    others = f"{' and '.join(like[:2])}{' and others' * (len(like) > 2)} {'have' if len(like) > 1 else 'has'}"
    return [
        ClusterFinding(
            f"{host.name} has {what} {values[host.name]}, {others} {usual}",
            why, fix(host, usual), severity, host.name,
        )
        for host in hosts
        if values[host.name] not in ("", usual)
    ]  # fmt: skip
