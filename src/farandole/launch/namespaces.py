"""The emulated network: hosts on one switch, every link shaped in both directions, every byte counted.

::

    host0 [eth0]--tbf--   --tbf--[port0] switch [port1]--tbf--   --tbf--[eth0] host1

Each end's token bucket shapes what leaves that end: the host's uploads at its own end, its downloads at
the switch's. A pair with a rate of its own has a second, direct link beside the switch. Counters are the
kernel's, of whole frames (headers too), read at the host's end.

Source of the shaping: tc-tbf(8). Its bucket holds 2 ms of the rate, at least one segment.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..core import env
from ..core.env import inherited_environment, read_command_path
from ..core.host.open_sockets import (
    IN_USE,
    PACED,
    SETTINGS,
    USUAL,
    allowed_congestion_controls,
    available_congestion_controls,
)
from ..core.host.process_status import interface_bytes
from ..core.vocabulary.errors import ConfigError, LaunchError
from ..core.vocabulary.units import format_bits_per_second, parse_bits_per_second, parse_seconds
from .job.hosts import CLONE_NEWUSER, HOST_NAMESPACES, HostNamespaces, write_hosts
from .supervise.job_loop import ENDING, handling
from .supervise.process import dying_with_us, preparing
from .supervise.stopped_process import state_of

_NET = "10.211"
_PREFIX = "farandole-hosts-"
_TOOLS = ("ip", "tc", "nsenter")
_MORE_PATH = "/usr/sbin:/sbin"
"""Where ip and tc are; not on the PATH of every user."""
_QUEUE_MILLISECONDS = 50
_LEAST_BUCKET_BYTES = 80_000
"""One segment as the kernel hands it to a device: 64 KiB, and headers for each of its 45 frames. With a smaller
bucket every segment is cut into frames by software, which costs four times the CPU time and which no
network card does."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class LinkBytes:
    """What crossed one link, seen from one host's end."""

    host: str
    interface: str
    sent_bytes: int
    received_bytes: int


@dataclass(eq=False)
class Network:
    """Hosts and links. A context manager: made on entering, gone after leaving."""

    host_count: int
    slots: int
    bits_per_second: float | None
    """None: not shaped."""
    between: Mapping[Pair, float] = field(default_factory=dict)
    latency_seconds: float = 0.0
    congestion_control: str | None = None
    """What TCP uses on the hosts. None: see `choose`."""
    hosts: list[HostNamespaces] = field(init=False, default_factory=list)
    hosts_file: Path = field(init=False)
    note: str = field(init=False, default="")
    """What the user should know of these hosts; empty where they are as usual."""
    _keepers: list[NamespaceHolder] = field(init=False, default_factory=list)
    _switch: NamespaceHolder = field(init=False)
    _tcp: CongestionChoice = field(init=False)
    _directory: tempfile.TemporaryDirectory[str] = field(init=False)

    def __enter__(self) -> Network:
        _check_tools()
        self._tcp = choose(self.congestion_control)
        self.note = self._tcp.note
        _sweep()
        self._directory = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-")
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything. May be called twice."""
        while self._keepers:
            self._keepers.pop().end()
        self._directory.cleanup()

    # -- while it lives ------------------------------------------------------------------------

    def set_rate(self, bits_per_second: float, host: int | None = None) -> None:
        """Change the rate of one host's link to the switch, or of all."""
        for index in range(self.host_count) if host is None else [host]:
            for keeper, interface in self._ends(index):
                self._shape(keeper, interface, bits_per_second, self.latency_seconds / 2)

    def cut(self, host: int) -> None:
        """Take the link of `host` to the switch down: frames vanish in both directions."""
        self._ip(self._switch, [f"link set port{host} down"])

    def restore(self, host: int) -> None:
        """Bring a cut link up again."""
        self._ip(self._switch, [f"link set port{host} up"])

    def link_bytes(self) -> list[LinkBytes]:
        """Return what crossed every link since the network was made; not of hosts whose keeper was killed."""
        found = []
        for host in self.hosts:
            try:
                counters = interface_bytes(host.keeper)
            except OSError:
                continue
            for interface, (sent, received) in counters.items():
                if interface != "lo":
                    found.append(LinkBytes(host.name, interface, sent, received))
        return found

    # -- making it -----------------------------------------------------------------------------

    def _make(self) -> None:
        names = [f"host{index}" for index in range(self.host_count)]
        addresses = [f"{_NET}.0.{index + 1}" for index in range(self.host_count)]
        directory = Path(self._directory.name)
        etc_hosts = directory / "etc-hosts"
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for address, name in zip(addresses, names, strict=True):
            # The second spelling is looked up for a peer's address on a socket that speaks IPv6 too.
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        etc_hosts.write_text("\n".join(lines) + "\n")
        self._switch = start_keeper("switch", None)
        self._keepers.append(self._switch)
        self._ip(self._switch, ["link set lo up", "link add bridge type bridge", "link set bridge up"])
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            keeper = start_keeper(name, str(etc_hosts))
            self._keepers.append(keeper)
            self.hosts.append(HostNamespaces(name, address, self.slots, "eth0", keeper.pid))
            self._connect(index)
        for (i, j), rate in self.between.items():
            self._connect_directly(i, j, rate)
        self.hosts_file = directory / "hosts.json"
        write_hosts(self.hosts_file, self.hosts)

    def _connect(self, index: int) -> None:
        host = self.hosts[index]
        port = f"port{index}"
        self._ip(
            self._switch,
            [
                f"link add {port} type veth peer name eth0 netns {host.keeper}",
                f"link set {port} master bridge",
                f"link set {port} up",
            ],
        )
        self._ip(
            self._keepers[-1],
            ["link set lo up", f"address add {host.address}/24 dev eth0", "link set eth0 up"],
        )
        self._choose_congestion_control(self._keepers[-1])
        # A path crosses two links, each delaying what leaves the nearer end: half of the latency at each.
        for keeper, interface in self._ends(index):
            if self.bits_per_second is not None:
                self._shape(keeper, interface, self.bits_per_second, self.latency_seconds / 2)
            else:
                _delay(keeper, interface, self.latency_seconds / 2, "root")

    def _connect_directly(self, i: int, j: int, bits_per_second: float) -> None:
        here, there = self.hosts[i], self.hosts[j]
        mine, theirs = self._keepers[1 + i], self._keepers[1 + j]
        self._ip(mine, [f"link add to{j} type veth peer name to{i} netns {there.keeper}"])
        for keeper, interface, other in ((mine, f"to{j}", there), (theirs, f"to{i}", here)):
            self._ip(keeper, [f"link set {interface} up", f"route add {other.address}/32 dev {interface}"])
            self._shape(keeper, interface, bits_per_second, self.latency_seconds)

    def _choose_congestion_control(self, keeper: NamespaceHolder) -> None:
        if self._tcp.name:
            _run(keeper, ["tee", str(IN_USE)], self._tcp.name)

    def _ends(self, index: int) -> list[tuple[NamespaceHolder, str]]:
        return [(self._keepers[1 + index], "eth0"), (self._switch, f"port{index}")]

    def _shape(
        self, keeper: NamespaceHolder, interface: str, bits_per_second: float, delay_seconds: float
    ) -> None:
        bucket = burst_bytes(bits_per_second)
        rate = f"{int(bits_per_second)}bit"
        limits = ["rate", rate, "burst", str(bucket), "latency", f"{_QUEUE_MILLISECONDS}ms"]
        _run(keeper, ["tc", "qdisc", "replace", "dev", interface, "root", "handle", "1:", "tbf", *limits])
        _delay(keeper, interface, delay_seconds, "parent", "1:1")

    def _ip(self, keeper: NamespaceHolder, lines: Sequence[str]) -> None:
        _run(keeper, ["ip", "-batch", "-"], "\n".join(lines) + "\n")


def _delay(keeper: NamespaceHolder, interface: str, seconds: float, *where: str) -> None:
    if seconds:
        delay = ["delay", f"{seconds * 1e6:.0f}us", "limit", "100000"]
        _run(keeper, ["tc", "qdisc", "replace", "dev", interface, *where, "netem", *delay])


def _path() -> str:
    return f"{read_command_path() or os.defpath}:{_MORE_PATH}"


def _check_tools() -> None:
    for tool in _TOOLS:
        if shutil.which(tool, path=_path()) is None:
            raise LaunchError(
                f"emulating hosts needs the command {tool!r}", remedy="apt-get install iproute2 util-linux"
            )


def _sweep() -> None:
    """Remove the two small files of those that were killed; their networks are gone already."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        maker = path.name.removeprefix(_PREFIX).partition("-")[0]
        if maker.isdigit() and state_of(maker) in ("", "Z", "X"):  # one may wait for ever to be reaped
            shutil.rmtree(path, ignore_errors=True)


def check_shape(host_count: int, slots: int, between: Mapping[Pair, float]) -> None:
    """Raise `ConfigError` for a network that makes no sense."""
    if not 1 <= host_count <= 200:
        raise ConfigError(f"--hosts {host_count}: expected 1 to 200")
    if not 1 <= slots <= 64:
        raise ConfigError(f"--slots {slots}: expected 1 to 64")
    for i, j in between:
        if i == j or not (0 <= i < host_count and 0 <= j < host_count):
            raise ConfigError(
                f"--rate-between {i},{j}: expected two different hosts of 0 to {host_count - 1}",
            )


def burst_bytes(bits_per_second: float) -> int:
    """Return what a link of this rate passes on at once after a pause: the size of its token bucket."""
    return max(_LEAST_BUCKET_BYTES, int(bits_per_second / 8 / 500))


def has_delay() -> bool:
    """Return whether this kernel can delay packets (netem)."""
    _check_tools()
    keeper = start_keeper("probe", None)
    try:
        _run(keeper, ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except LaunchError:
        return False
    finally:
        keeper.end()
    return True


def describe_rate(bits_per_second: float | None) -> str:
    """Return a link's rate as text."""
    return "not shaped" if bits_per_second is None else format_bits_per_second(bits_per_second)


def _run(keeper: NamespaceHolder, command: list[str], standard_input: str = "") -> None:
    entered = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net", *command]
    environment = inherited_environment({"PATH": _path()})
    done = subprocess.run(
        entered, input=standard_input, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        given = "; ".join(standard_input.strip().splitlines())
        what = f"`{shlex.join(command)}`{given and f', given {given!r},'}"
        error = "; ".join((done.stderr or done.stdout).strip().splitlines()) or f"exit code {done.returncode}"
        raise LaunchError(
            f"an emulated host cannot be made: {what} failed: {error}", remedy=_remedy(command, error)
        )


def _remedy(command: list[str], error: str) -> str:
    """Name what the kernel lacks, where it says that it lacks something."""
    if "Unknown device type" in error:
        return "this kernel lacks veth or bridge: modprobe -a veth bridge"
    if "qdisc kind is unknown" in error:
        module = "sch_netem" if "netem" in command else "sch_tbf"
        return f"this kernel lacks {module}: modprobe {module}"
    return ""


# Which congestion control emulated hosts use, of those that this machine lets a network namespace have.


class CongestionChoice(NamedTuple):
    """What TCP of the hosts uses. `name` empty: what new namespaces have. `note`: why it is not the usual one."""

    name: str
    note: str


def choose(asked: str | None, settings: Path = SETTINGS) -> CongestionChoice:
    """Return what is asked for, else cubic, else one that does not pace, else what is there.

    A machine's own choice may be any: the same emulated link should mean the same on all of them. Raises
    `ConfigError` for one that is asked for and cannot be had.
    """
    if asked is not None:
        _check(asked, settings)
        return CongestionChoice(asked, "")
    allowed = allowed_congestion_controls(settings)
    if USUAL in allowed:
        return CongestionChoice(USUAL, "")
    steady = next((name for name in allowed if name not in PACED), "")
    return CongestionChoice(
        steady,
        f"TCP of the hosts uses {steady or 'what this machine uses'}, not {USUAL}: this machine allows namespaces "
        f"only {' '.join(allowed) or 'what it does not say'} (net.ipv4.tcp_allowed_congestion_control)",
    )


def _check(name: str, settings: Path) -> None:
    available, allowed = available_congestion_controls(settings), allowed_congestion_controls(settings)
    if name not in available:
        raise ConfigError(
            f"--congestion-control {name!r}: expected one that this kernel has: {', '.join(available) or 'none'}",
            remedy="others may be modules, as tcp_bbr is: modprobe tcp_bbr",
        )
    if allowed and name not in allowed:
        raise ConfigError(
            f"--congestion-control {name!r}: this kernel has it, and allows network namespaces only "
            f"{', '.join(allowed)}",
            remedy=f"choose one of them, or allow it: sysctl -w net.ipv4.tcp_allowed_congestion_control="
            f"'{' '.join(allowed)} {name}'",
        )


# The namespace holder: an idle process that owns one host's namespaces.
#
# [Note: nothing is left] The namespaces of an emulated host have no name in the file system. They live as long as
# a process is in them: the holder and the host's ranks. The holder dies with its maker (PR_SET_PDEATHSIG), the
# ranks with their launcher, and the kernel then takes interfaces, links and shaping away. So there is nothing to
# clean up after a kill -9, now or at the next start.


_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


@dataclass(frozen=True)
class NamespaceHolder:
    """A process in namespaces of its own."""

    pid: int

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def become_root_here() -> None:
    """Enter a user namespace in which this process may make networks; for those who are not root.

    Raises `LaunchError` with the one line that says what is missing.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        raise LaunchError(
            f"emulating hosts needs root or user namespaces, and this kernel refuses them: "
            f"{os.strerror(ctypes.get_errno())}",
            remedy="run as root, or: sysctl -w user.max_user_namespaces=1000 "
            "(and kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)",
        )
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - one write call, as the kernel asks
                file.write(text)
    except OSError as problem:
        raise LaunchError(f"emulating hosts needs root: {problem}", remedy="run as root") from None


def start_keeper(name: str, hosts_file: str | None) -> NamespaceHolder:
    """Start a keeper whose host is called `name`, with `hosts_file` instead of /etc/hosts."""
    libc = ctypes.CDLL(None, use_errno=True)
    die_with_us = dying_with_us()
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(here)
            problem = _live(libc, die_with_us, name, hosts_file)
            os.write(there, problem.encode() or b"ready")
            os.close(there)
            while not problem:
                signal.pause()
        finally:
            os._exit(1)
    os.close(there)
    answer = os.read(here, 4096).decode()
    os.close(here)
    if answer != "ready":
        os.waitpid(pid, 0)
        raise LaunchError(
            f"this machine cannot make host {name}: {answer or 'its keeper died'}",
            remedy="network namespaces are needed (root, or user namespaces; not inside most containers)",
        )
    return NamespaceHolder(pid)


def _live(libc: ctypes.CDLL, die_with_us: Callable[[], None], name: str, hosts_file: str | None) -> str:
    """Take the namespaces; return what went wrong, or nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    die_with_us()
    os.setsid()
    if libc.unshare(HOST_NAMESPACES):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    socket.sethostname(name)
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    if hosts_file is not None and libc.mount(hosts_file.encode(), b"/etc/hosts", None, _MS_BIND, None):
        return f"mount /etc/hosts: {os.strerror(ctypes.get_errno())}"
    return ""


# Run a command on the first host of an emulated network, play the script, count the bytes.


# What happens to the links while a command runs: ``--script "30s:100mbit,60s:1=cut,70s:1=restore"``.
#
# Entries are separated by commas, each ``TIME:WHAT`` or ``TIME:HOST=WHAT`` with WHAT a rate, ``cut`` or
# ``restore``. Times count from the start of the command. Without a host all links are meant.

_EXPECTED = (
    'expected TIME:RATE, TIME:cut or TIME:restore, for one host TIME:HOST=..., e.g. "30s:100mbit,60s:1=cut"'
)


@dataclass(frozen=True, order=True)
class LinkChange:
    """One change of one link, or of all."""

    seconds: float
    what: str
    """"cut", "restore" or "rate"."""
    host: int | None = None
    bits_per_second: float | None = None

    def apply(self, network: Network) -> None:
        """Do it."""
        hosts = range(network.host_count) if self.host is None else [self.host]
        for host in hosts:
            if self.what == "cut":
                network.cut(host)
            elif self.what == "restore":
                network.restore(host)
            else:
                assert self.bits_per_second is not None, "a change of rate has one"
                network.set_rate(self.bits_per_second, host)

    def to_text(self) -> str:
        """Say it in a line."""
        which = "all links" if self.host is None else f"the link of host{self.host}"
        if self.what == "rate":
            return f"{which}: {describe_rate(self.bits_per_second)}"
        return f"{which}: {self.what}"


def parse_script(text: str, host_count: int) -> list[LinkChange]:
    """Read a script; return its changes in order of time."""
    return sorted(
        (_parse_change(entry.strip(), host_count) for entry in text.split(",") if entry.strip()),
        key=lambda change: change.seconds,
    )


def _parse_change(entry: str, host_count: int) -> LinkChange:
    when, colon, rest = entry.partition(":")
    if not colon or not rest:
        raise ConfigError(f"--script {entry!r}: {_EXPECTED}")
    host_text, equals, what = rest.rpartition("=")
    host = None
    if equals:
        digits = host_text.removeprefix("host")
        if not digits.isdecimal() or int(digits) >= host_count:
            raise ConfigError(f"--script {entry!r}: there is no host {host_text!r}, only 0 to {host_count - 1}")
        host = int(digits)
    try:
        seconds = parse_seconds(when)
        if what in ("cut", "restore"):
            return LinkChange(seconds, what, host)
        return LinkChange(seconds, "rate", host, parse_bits_per_second(what))
    except ConfigError as problem:
        raise ConfigError(f"--script {entry!r}: {problem.message}", remedy=_EXPECTED) from None


_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class EmulatedRun:
    """How the command ended, and what crossed the links."""

    exit_code: int
    seconds: float
    links: list[LinkBytes]


def run_session(
    network: Network,
    command: Sequence[str],
    changes: Sequence[LinkChange],
    *,
    stdout: int | None = None,
    typed_command: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> EmulatedRun:
    """Run `command` as a process of host0 that knows all hosts; return when it has ended.

    Signals are passed on to it, and it dies with this process. `typed_command` is what the user typed: the run's
    records keep it.
    """
    typed = {} if not typed_command else {env.TYPED: json.dumps(list(typed_command))}
    environment = env.inherited_environment({env.HOSTS_FILE: str(network.hosts_file), **typed})
    before = network.link_bytes()
    begin = time.monotonic()
    try:
        child = subprocess.Popen(
            list(command),
            env=environment,
            stdout=stdout,
            start_new_session=True,
            preexec_fn=preparing((), network.hosts[0]),  # noqa: PLW1509 - forked from a process with one thread
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise LaunchError(f"cannot start {command[0]!r} on host0: {problem}") from None
    waiting = list(changes)
    with handling(ENDING, lambda number, _: child.send_signal(number)):
        try:
            while child.poll() is None:
                now = time.monotonic() - begin
                while waiting and waiting[0].seconds <= now:
                    change = waiting.pop(0)
                    change.apply(network)
                    say(f"{now:.1f} s: {change.to_text()}")
                time.sleep(_TICK_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    seconds = time.monotonic() - begin
    code = child.returncode
    links = _since(before, network.link_bytes())
    for host in sorted({link.host for link in before} - {link.host for link in links}):
        say(f"{host} is gone: the process that kept it was killed, and what crossed its links is not known")
    return EmulatedRun(code if code >= 0 else 128 - code, seconds, links)


def _since(before: list[LinkBytes], after: list[LinkBytes]) -> list[LinkBytes]:
    earlier = {(link.host, link.interface): link for link in before}
    return [
        LinkBytes(b.host, b.interface, b.sent_bytes - a.sent_bytes, b.received_bytes - a.received_bytes)
        for b in after
        if (a := earlier.get((b.host, b.interface))) is not None
    ]
