"""Names: whether every host calls the others what they are, and none takes itself for its loopback."""

from __future__ import annotations

import ipaddress

from ..facts import ClusterFacts, ClusterFinding, Findings, HostFacts


def check_peer_names(facts: ClusterFacts) -> Findings:
    """The names of the list mean, on every host, the host they mean here."""
    for host in facts.hosts:
        for other in facts.hosts:
            if other.name == host.name or _address(other.name) or other.name not in host.network.resolved:
                continue
            finding = _peer_name(host, other, host.network.resolved[other.name])
            if finding is not None:
                yield finding


def _peer_name(host: HostFacts, other: HostFacts, answers: tuple[str, ...] | None) -> ClusterFinding | None:
    line = f"{other.address or 'ADDRESS'} {other.name}"
    fix = f"echo '{line}' | sudo tee -a /etc/hosts"
    if answers is None:
        return ClusterFinding(
            f"{host.name} asks for the name {other.name} and gets no answer in time",
            "every lookup holds a start-up by seconds: a name server is set that does not answer",
            fix, "warning", host.name,
        )  # fmt: skip
    if not answers:
        return ClusterFinding(
            f"{host.name} does not know the name {other.name}",
            "scripts and tools that use names cannot connect; farandole itself passes on addresses",
            fix, "warning", host.name,
        )  # fmt: skip
    if all(_is_loopback(answer) for answer in answers):
        return ClusterFinding(
            f"{host.name} takes {other.name} for {answers[0]}, which is itself",
            "what is sent to that name never leaves the host",
            _without_loopback(other.name, fix), "problem", host.name,
        )  # fmt: skip
    theirs = {address for each in other.network.interfaces for address in each.addresses} | {other.address} - {""}
    if theirs and not {_plain(answer) for answer in answers} & {_plain(address) for address in theirs}:
        return ClusterFinding(
            f"{host.name} takes {other.name} for {', '.join(answers[:3])}, but that host has "
            f"{other.address or ', '.join(sorted(theirs)[:3])}",
            "what is sent to that name goes to another host",
            f"sudo sed -i -E '/[[:space:]]{_escaped(other.name)}\\b/d' /etc/hosts; {fix}", "problem", host.name,
        )  # fmt: skip
    return None


def _without_loopback(name: str, fix: str) -> str:
    """Return the line that takes a name from the loopback's line of /etc/hosts, then does `fix`."""
    return f"sudo sed -i -E '/^(127|::1)/s/[[:space:]]{_escaped(name)}\\b//' /etc/hosts; {fix}"


def _escaped(name: str) -> str:
    return name.replace(".", "\\.")


def check_own_names(facts: ClusterFacts) -> Findings:
    """A host's own name does not mean its loopback. Debian's installer writes 127.0.1.1 there."""
    for host in facts.hosts:
        if not host.hostname or host.hostname == "localhost" or host.hostname not in host.network.resolved:
            continue
        answers = host.network.resolved[host.hostname]
        address = host.address or "ADDRESS"
        if answers is None or not answers:
            yield ClusterFinding(
                f"{host.name} {'does not know' if answers is not None else 'gets no answer for'} its own name "
                f"{host.hostname}",
                "torch's gloo looks its own name up when no interface is named",
                f"echo '{address if len(facts.hosts) > 1 else '127.0.0.1'} {host.hostname}' | "
                "sudo tee -a /etc/hosts",
                "warning",
                host.name,
            )
        elif len(facts.hosts) > 1 and all(_is_loopback(answer) for answer in answers):
            yield ClusterFinding(
                f"{host.name} takes its own name {host.hostname} for {answers[0]}, its loopback",
                "scripts that tell others their own name's address (torchrun, gloo without an interface) send "
                "them to themselves; farandole run names the interface",
                _without_loopback(host.hostname, f"echo '{address} {host.hostname}' | sudo tee -a /etc/hosts"),
                "warning",
                host.name,
            )


def check_host_names(facts: ClusterFacts) -> Findings:
    """No two hosts call themselves the same."""
    first: dict[str, str] = {}
    for host in facts.hosts:
        if not host.hostname:
            continue
        if host.hostname in first:
            yield ClusterFinding(
                f"{first[host.hostname]} and {host.name} both call themselves {host.hostname}",
                "reports and logs cannot tell them apart, and ranks take each other for neighbours",
                f"sudo hostnamectl set-hostname {host.hostname}-2",
                "warning",
                host.name,
            )
        first.setdefault(host.hostname, host.name)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def _is_loopback(text: str) -> bool:
    found = _address(text)
    return found is not None and found.is_loopback


def _plain(text: str) -> str:
    return str(_address(text) or text)
