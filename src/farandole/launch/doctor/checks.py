"""Every check: facts in, findings out. Pure functions, none of which may raise whatever the facts are."""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ...core.host.open_sockets import PACED, USUAL
from ...core.vocabulary.units import format_bits_per_second, format_bytes, format_seconds
from .facts import SEVERITIES, ClusterFacts, ClusterFinding, Findings, HostFacts, Interface, LinkFacts, Severity

FAR_SECONDS, OFF_SECONDS = 60.0, 0.5
LITTLE_MEMORY_BYTES, TOO_LITTLE_MEMORY_BYTES = 1_000_000_000, 250_000_000
SMALL_SHARED_BYTES, FULL_SHARED_BYTES = 256 * 2**20, 64 * 2**20
FEW_FILES, TOO_FEW_FILES = 1024, 256
LITTLE_LOCKED_BYTES = 2**30


def check_clocks(facts: ClusterFacts) -> Findings:
    """Clocks agree. Jobs do not need it (only monotonic time counts), but logs and certificates do."""
    for host in facts.hosts:
        offset = host.clock_offset_seconds
        sure = None if offset is None else abs(offset) - (host.clock_error_seconds or 0.0)
        if offset is None or sure is None or sure < OFF_SECONDS:
            continue
        yield ClusterFinding(
            f"the clock of {host.name} is {format_seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}",
            "times in logs of several hosts cannot be compared; certificates and caches may count as outdated",
            "sudo timedatectl set-ntp true",
            "problem" if sure >= FAR_SECONDS else "warning",
            host.name,
        )


def check_memory(facts: ClusterFacts) -> Findings:
    """Memory is free, and /dev/shm is large enough for the ranks of a host to share it."""
    for host in facts.hosts:
        free = host.resources.memory_available_bytes
        if free is not None and free < LITTLE_MEMORY_BYTES:
            yield ClusterFinding(
                f"{host.name} has {format_bytes(free)} of memory left",
                "a rank needs some 300 MB before its model; the kernel kills ranks when memory ends",
                "ps -eo pid,user,rss,args --sort=-rss | head",
                "problem" if free < TOO_LITTLE_MEMORY_BYTES else "warning",
                host.name,
            )
        yield from _shared_memory(host)


def _shared_memory(host: HostFacts) -> Findings:
    size, free = host.resources.shared_memory_bytes, host.resources.shared_memory_free_bytes
    why = "ranks of a host exchange gradients there, and loaders pass samples: they end with a bus error"
    larger = "sudo mount -o remount,size=8G /dev/shm    (in a container: docker run --shm-size=8g)"
    if size == 0:
        fix = "sudo mount -t tmpfs -o size=8G tmpfs /dev/shm"
        yield ClusterFinding(f"{host.name} has no /dev/shm", why, fix, host=host.name)
    elif size is not None and size < SMALL_SHARED_BYTES:
        yield ClusterFinding(
            f"/dev/shm of {host.name} has {format_bytes(size)}", why, larger, "warning", host.name
        )
    elif free is not None and free < FULL_SHARED_BYTES:
        yield ClusterFinding(
            f"/dev/shm of {host.name} has {format_bytes(free)} left", why,
            "ls -laS /dev/shm    (files of programs that are gone may be removed)", host=host.name,
        )  # fmt: skip


def check_limits(facts: ClusterFacts) -> Findings:
    """Enough files may be open; with InfiniBand, memory may be locked."""
    for host in facts.hosts:
        files = host.resources.open_files
        if files is not None and files < FEW_FILES:
            yield ClusterFinding(
                f"{host.name} allows {files} open files",
                "every connection to another rank and every worker of a loader needs some",
                "ulimit -n 65536    (for good: '* - nofile 65536' in /etc/security/limits.conf)",
                "problem" if files < TOO_FEW_FILES else "warning",
                host.name,
            )
        locked = host.resources.locked_memory_bytes
        if host.network.infiniband and locked is not None and locked < LITTLE_LOCKED_BYTES:
            yield ClusterFinding(
                f"{host.name} has InfiniBand ({', '.join(host.network.infiniband[:2])}) but lets processes lock "
                f"{format_bytes(locked)} only",
                "NCCL cannot register its buffers, and fails or goes by TCP",
                "ulimit -l unlimited    (for good: '* - memlock unlimited' in /etc/security/limits.conf)",
                "warning",
                host.name,
            )


def check_cores(facts: ClusterFacts) -> Findings:
    """The control group allows the cores that processes see."""
    for host in facts.hosts:
        cores, quota = host.resources.cores, host.resources.core_quota
        if quota is not None and cores is not None and quota < 0.99 * cores:
            yield ClusterFinding(
                f"{host.name} shows {cores} cores, its control group allows {quota:.3g}",
                "threads for all of them are stopped in the middle of a step, and the other ranks wait",
                f"export OMP_NUM_THREADS={max(1, int(quota))}    (or give the container more --cpus)",
                "warning",
                host.name,
            )
    counts = Counter(host.resources.cores for host in facts.hosts if host.resources.cores)
    if len(counts) > 1:
        listed = ", ".join(f"{host.name} {host.resources.cores}" for host in facts.hosts if host.resources.cores)
        yield ClusterFinding(
            f"hosts have different numbers of cores: {listed}",
            "a step is as fast as its slowest rank",
            "give each as many slots as its cores allow: -H " + _slots(facts),
            "note",
        )


def _slots(facts: ClusterFacts) -> str:
    least = min((host.resources.cores or 1 for host in facts.hosts), default=1)
    return ",".join(f"{host.name}:{max(1, (host.resources.cores or 1) // least)}" for host in facts.hosts)


def check_gpus(facts: ClusterFacts) -> Findings:
    """GPUs can be used, are free, and are the same on all hosts."""
    for host in facts.hosts:
        gpus, torch = host.resources.gpus, host.torch
        if gpus and torch.endswith("+cpu"):
            yield ClusterFinding(
                f"{host.name} has {len(gpus)} GPU(s), but torch {torch} is built without them",
                "ranks train on the CPU",
                f"{host.pip_install} --force-reinstall torch=={torch.partition('+')[0]}",
                host=host.name,
            )
        busy = [
            index
            for index, gpu in enumerate(host.resources.gpus)
            if 2 * (gpu.used_bytes or 0) > (gpu.memory_bytes or 1e30)
        ]
        if busy:
            yield ClusterFinding(
                f"GPU {', '.join(map(str, busy))} of {host.name}: more than half of the memory is taken",
                "another process uses it, or a rank of an earlier job is still running",
                "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
                "warning",
                host.name,
            )
    yield from _different_gpus(facts)


def _different_gpus(facts: ClusterFacts) -> Findings:
    kinds = {
        host.name: (
            f"{len(host.resources.gpus)} x {host.resources.gpus[0].name}" if host.resources.gpus else "no GPU"
        )
        for host in facts.hosts
    }
    drivers = {
        host.name: host.resources.gpus[0].driver
        for host in facts.hosts
        if host.resources.gpus and host.resources.gpus[0].driver
    }
    if len(set(kinds.values())) > 1:
        text = ", ".join(f"{name} {what}" for name, what in kinds.items())
        yield ClusterFinding(
            f"hosts have different GPUs: {text}",
            "a step is as fast as its slowest rank, and ranks with and without GPU cannot meet",
            "choose hosts or slots that are alike, with -H, --include or --exclude",
            "warning",
        )
    if len(set(drivers.values())) > 1:
        text = ", ".join(f"{name} {driver}" for name, driver in drivers.items())
        yield ClusterFinding(
            f"hosts have different GPU drivers: {text}",
            "NCCL and CUDA programs may work on one host and fail on another",
            "install the newest of them everywhere, and restart",
            "warning",
        )


# Names: whether every host calls the others what they are, and none takes itself for its loopback.


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


# Interfaces: whether the route to the others takes the right one, and its settings are alike on all hosts.

LEAST_MTU_BYTES = 1280
"""What every network that carries IPv6 must carry (RFC 8200)."""
SLOW_MEGABITS = 100


def check_routes(facts: ClusterFacts) -> Findings:
    """Every peer is reached, and not by a bridge of containers or the loopback."""
    for host in facts.hosts:
        cut_off = [peer for peer, route in host.network.routes.items() if not route.interface]
        if cut_off:
            peer = cut_off[0]
            address = host.network.routes[peer].peer_address
            yield ClusterFinding(
                f"{host.name} has no route to {' and '.join(cut_off)} ({address})",
                "its ranks cannot meet the others",
                f"ip route get {address}; then: ip route add {address} dev {_usable(host)}",
                host=host.name,
            )
        chosen = host.network.interface
        if chosen is not None and chosen.is_virtual:
            yield ClusterFinding(
                f"{host.name} reaches the other hosts by {chosen.name}, "
                f"{'the loopback' if chosen.name == 'lo' else 'a bridge or tunnel of containers'}",
                "the others get an address that only this host knows, and wait for it until the time-out",
                f"name the others by their addresses on the network of {_usable(host)}, or: "
                f"ip addr flush dev {chosen.name}",
                host=host.name,
            )
        if chosen is not None and chosen.is_up is False:
            yield ClusterFinding(
                f"{chosen.name} of {host.name}, which leads to the other hosts, is down",
                "nothing arrives",
                f"ip link set {chosen.name} up",
                host=host.name,
            )


def check_socket_variables(facts: ClusterFacts) -> Findings:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where set, name the interface that leads to the others."""
    for host in facts.hosts:
        names = {each.name for each in host.network.interfaces}
        for variable, text in host.network.environment.items():
            # NCCL takes a list of beginnings, =exact names and ^exclusions; gloo takes one name.
            wanted = text.lstrip("=") if variable.startswith("NCCL") else text
            if text.startswith("^") or "," in wanted or not names:
                continue
            exact = not variable.startswith("NCCL") or text.startswith("=")
            there = [name for name in names if name == wanted or (not exact and name.startswith(wanted))]
            chosen = host.network.interface
            if not there:
                yield ClusterFinding(
                    f"{variable}={text} on {host.name}, which has no such interface",
                    "ranks fail when they connect",
                    f"unset {variable}" if chosen is None else f"export {variable}={chosen.name}",
                    host=host.name,
                )
            elif chosen is not None and chosen.name not in there:
                yield ClusterFinding(
                    f"{variable}={text} on {host.name}, but the route to the other hosts takes {chosen.name}",
                    "ranks listen where the others do not call, or take the slower network",
                    f"unset {variable}",
                    "warning",
                    host.name,
                )


def check_mtu(facts: ClusterFacts) -> Findings:
    """The largest frame is the same on all hosts, and large ones arrive."""
    for link in facts.links:
        if link.stalled:
            yield ClusterFinding(
                f"{link.source} -> {link.target}: small messages arrive, large ones do not",
                "something on the way drops large frames, so jobs connect and then stand still",
                f"ping -M do -s 1472 {link.address}; ip link set dev {_by(facts, link.source)} mtu 1400",
                host=link.source,
            )
    chosen = _chosen(facts)
    known = [each.mtu_bytes for each in chosen.values() if each.mtu_bytes]
    if len(set(known)) > 1:
        usual = _usual(known)
        for name, each in chosen.items():
            if each.mtu_bytes not in (None, usual):
                yield ClusterFinding(
                    f"{name} has an MTU of {each.mtu_bytes} on {each.name}, others have {usual}",
                    "frames too large for the receiver are dropped silently: jobs connect and hang",
                    f"ip link set dev {each.name} mtu {usual}",
                    host=name,
                )
    for name, each in chosen.items():
        if each.mtu_bytes is not None and each.mtu_bytes < LEAST_MTU_BYTES:
            yield ClusterFinding(
                f"{name} has an MTU of {each.mtu_bytes} on {each.name}, below {LEAST_MTU_BYTES}",
                "every frame carries little, and IPv6 does not work at all",
                f"ip link set dev {each.name} mtu 1500",
                "warning",
                name,
            )


def check_link_speeds(facts: ClusterFacts) -> Findings:
    """Cards negotiated what they can, and the same on all hosts."""
    chosen = _chosen(facts)
    fastest = max((each.speed_megabits for each in chosen.values() if each.speed_megabits), default=0)
    for name, each in chosen.items():
        if each.duplex == "half":
            yield ClusterFinding(
                f"{each.name} of {name} runs half duplex",
                "it cannot send and receive at once, and collides: a small part of its speed is left",
                f"ethtool -s {each.name} autoneg on",
                host=name,
            )
        speed = each.speed_megabits
        if speed is None:
            continue
        if speed <= SLOW_MEGABITS:
            yield ClusterFinding(
                f"{each.name} of {name} negotiated {speed} Mbit/s",
                "gigabit cards fall back to this with a bad cable or port; all ranks wait in every step",
                f"change the cable or the port, then: ethtool {each.name} | grep Speed",
                "warning",
                name,
            )
        elif speed < fastest:
            yield ClusterFinding(
                f"{each.name} of {name} has {speed} Mbit/s, the fastest host {fastest}",
                "a collective is as fast as the slowest of its hosts",
                f"ethtool {each.name} | grep -E 'Speed|modes'",
                "warning",
                name,
            )


def check_congestion_control(facts: ClusterFacts) -> Findings:
    """TCP decides its rate by what suits bursts. See [Note: bursts and pacing] in `core.host.open_sockets`."""
    if len(facts.hosts) < 2:
        return
    for host in facts.hosts:
        if host.network.congestion_control in PACED:
            yield ClusterFinding(
                f"TCP of {host.name} uses {host.network.congestion_control}",
                "it paces what it sends by a rate learned before a pause; training sends in bursts, and "
                f"some of them then take several times as long as with {USUAL}",
                f"farandole run --set congestion_control={USUAL} -- python train.py   # or: "
                f"sysctl -w net.ipv4.tcp_congestion_control={USUAL}",
                "note",
                host.name,
            )


def _chosen(facts: ClusterFacts) -> dict[str, Interface]:
    return {host.name: each for host in facts.hosts if (each := host.network.interface) is not None}


def _by(facts: ClusterFacts, name: str) -> str:
    chosen = _chosen(facts).get(name)
    return "eth0" if chosen is None else chosen.name


def _usable(host: HostFacts) -> str:
    """Return the interface of a host that others may be behind."""
    real = [
        each.name
        for each in host.network.interfaces
        if each.addresses and not each.is_virtual and each.name != "lo"
    ]
    return real[0] if real else "INTERFACE"


def _usual(values: list[int]) -> int:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


# Whether the hosts are there, with the same farandole, and run the same programs.


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


# Between hosts: whether calls get through in both directions, and whether a link is weaker than the others.

WEAK_SHARE = 0.5
"""Fraction of the median link's rate; a link below it delays all ranks."""
CARD_SHARE = 0.5
"""Fraction of the negotiated speed."""
LONG_ROUND_TRIP_SECONDS = 0.005
SLOW_BITS_PER_SECOND = 100e6
CONNECTION_MEGABITS = 20_000
"""Above it one connection of this measurement may be the limit, and nothing is said about the card."""


def check_connections(facts: ClusterFacts) -> Findings:
    """A call on a fresh port gets through, in both directions."""
    failed = {(link.source, link.target) for link in facts.links if link.problem}
    for link in facts.links:
        if not link.problem:
            continue
        one_way = (link.target, link.source) not in failed
        what = (
            f"{link.source} cannot call {link.target} on a port of {link.address or 'no address'}: {link.problem}"
        )
        if one_way:
            what += f" ({link.target} can call {link.source})"
        yield ClusterFinding(what, _why(link), _fix(facts, link), host=link.target)


def _why(link: LinkFacts) -> str:
    if link.problem in ("timed out", "refused", "reset"):
        return "ranks listen on ports that the system chooses: a firewall in between stops every job at its start"
    return "ranks of these hosts cannot connect"


def _fix(facts: ClusterFacts, link: LinkFacts) -> str:
    caller = next((host.address for host in facts.hosts if host.name == link.source), "") or link.source
    if link.problem in ("timed out", "refused", "reset"):
        return f"sudo ufw allow from {caller}    (or: sudo firewall-cmd --zone=trusted --add-source={caller})"
    return f"on {link.source}: ping -c 3 {link.address or link.target}; ip route get {link.address or link.target}"


def weakest_link(facts: ClusterFacts) -> LinkFacts | None:
    """Return the link with the lowest rate; None when none was measured."""
    measured = [link for link in facts.links if link.bits_per_second]
    return min(measured, key=lambda link: link.bits_per_second or 0.0, default=None)


def check_rates(facts: ClusterFacts) -> Findings:
    """No link is much weaker than the others or its cards, and messages do not take long."""
    measured = [link for link in facts.links if link.bits_per_second]
    yield from _weak_links(measured)
    yield from _below_card(facts, measured)
    slowest = weakest_link(facts)
    if slowest is not None and (rate := slowest.bits_per_second or 0.0) < SLOW_BITS_PER_SECOND:
        yield ClusterFinding(
            f"the weakest link carries {format_bits_per_second(rate)}",
            "gradients of 10 million parameters take "
            f"{format_seconds(40e6 * 8 / rate)} a step over it when nothing is made small",
            "farandole run --set codec=auto --set lossy=true -- python train.py",
            "note",
        )
    for link in facts.links:
        if link.round_trip_seconds is not None and link.round_trip_seconds > LONG_ROUND_TRIP_SECONDS:
            yield ClusterFinding(
                f"{link.source} -> {link.target}: {format_seconds(link.round_trip_seconds)} there and back",
                "small exchanges cost a round trip each; hosts of one room need less than a millisecond",
                f"ping -c 10 {link.address or link.target}    (wireless? another building? a VPN?)",
                "warning",
                link.source,
            )


def _weak_links(measured: list[LinkFacts]) -> Findings:
    if len(measured) < 2:
        return
    usual = statistics.median(_rate(link) for link in measured)
    best = max(_rate(link) for link in measured)
    if len(measured) == 2:
        usual = best  # of two directions the faster one shows what is possible
    weak = {(link.source, link.target): link for link in measured if _rate(link) < WEAK_SHARE * usual}
    for (source, target), link in weak.items():
        if (target, source) not in weak or source < target:
            yield ClusterFinding(
                f"{_both_ways(link, weak)}, others {format_bits_per_second(usual)}",
                "every exchange of all ranks waits for the weakest link",
                f"on {link.source} and {link.target}: cable, port, `ethtool -S INTERFACE`; "
                "what else uses the link",
                "warning",
            )


def _both_ways(link: LinkFacts, weak: Mapping[tuple[str, str], LinkFacts]) -> str:
    back = weak.get((link.target, link.source))
    if back is None:
        return f"{link.source} -> {link.target} carries {format_bits_per_second(_rate(link))}"
    rates = f"{format_bits_per_second(_rate(link))} and {format_bits_per_second(_rate(back))}"
    return f"{link.source} <-> {link.target} carries {rates}"


def _rate(link: LinkFacts) -> float:
    return link.bits_per_second or 0.0


def _below_card(facts: ClusterFacts, measured: list[LinkFacts]) -> Findings:
    speeds = {
        host.name: each.speed_megabits
        for host in facts.hosts
        if (each := host.network.interface) is not None and each.speed_megabits and not each.is_virtual
    }
    for link in measured:
        if link.source not in speeds or link.target not in speeds:
            continue
        card = min(speeds[link.source] or 0, speeds[link.target] or 0)
        rate = _rate(link)
        if card <= CONNECTION_MEGABITS and rate < CARD_SHARE * card * 1e6:
            yield ClusterFinding(
                f"{link.source} -> {link.target} carries {format_bits_per_second(rate)}, "
                f"its cards negotiated {format_bits_per_second(card * 1e6)}",
                "another user of the network, a slower switch on the way, or errors that cost retransmissions",
                "ethtool -S INTERFACE | grep -iE 'err|drop'; nstat -z TcpRetransSegs",
                "warning",
            )


Check = Callable[[ClusterFacts], Findings]

CHECKS: tuple[Check, ...] = (
    check_reached, check_torch, check_python, check_working_directory, check_routes, check_socket_variables,
    check_connections, check_mtu, check_link_speeds, check_rates, check_congestion_control, check_peer_names,
    check_own_names, check_host_names, check_clocks, check_gpus, check_memory, check_limits, check_cores,
)  # fmt: skip


def judge(facts: ClusterFacts) -> list[ClusterFinding]:
    """Return what all checks find, the worst first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
