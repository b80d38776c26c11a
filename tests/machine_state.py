"""What a test must leave as it found it: the kernel's settings, and a home and a cache of the session's own.

Tests write into places of their own: a home, a cache and a temporary directory that go with the session. Only a
test writes there, so what appears there is a test's doing. Interfaces, files in /etc, shared memory and the
account's real home belong to every program of this machine: they are compared once, at the end, and only told.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

State = dict[str, str]

_SETTINGS = [
    "fs/file-max", "fs/inotify/max_user_watches", "fs/pipe-max-size", "kernel/core_pattern", "kernel/hostname",
    "kernel/kptr_restrict", "kernel/numa_balancing", "kernel/perf_event_paranoid", "kernel/pid_max",
    "kernel/randomize_va_space", "kernel/sched_rt_runtime_us", "kernel/shmall", "kernel/shmmax",
    "kernel/threads-max", "kernel/unprivileged_userns_clone", "kernel/yama/ptrace_scope", "net/core/default_qdisc",
    "net/core/netdev_max_backlog", "net/core/rmem_default", "net/core/rmem_max", "net/core/somaxconn",
    "net/core/wmem_default", "net/core/wmem_max", "net/ipv4/ip_forward", "net/ipv4/ip_local_port_range",
    "net/ipv4/ping_group_range", "net/ipv4/tcp_allowed_congestion_control", "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_fin_timeout", "net/ipv4/tcp_keepalive_time", "net/ipv4/tcp_mem", "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_slow_start_after_idle", "net/ipv4/tcp_wmem", "net/ipv6/conf/all/disable_ipv6",
    "net/ipv6/conf/default/disable_ipv6", "net/ipv6/conf/lo/disable_ipv6", "user/max_net_namespaces",
    "user/max_user_namespaces", "vm/max_map_count", "vm/nr_hugepages", "vm/overcommit_memory",
    "vm/overcommit_ratio", "vm/swappiness",
]  # fmt: skip
_HUGE_PAGES = ["enabled", "defrag", "shmem_enabled"]
_FILES = [
    "etc/environment", "etc/fstab", "etc/group", "etc/gshadow", "etc/hostname", "etc/hosts", "etc/ld.so.conf",
    "etc/ld.so.preload", "etc/nsswitch.conf", "etc/passwd", "etc/profile", "etc/resolv.conf", "etc/services",
    "etc/shadow", "etc/subgid", "etc/subuid", "etc/sudoers", "etc/sysctl.conf",
]  # fmt: skip
_DIRECTORIES = [
    "etc/ld.so.conf.d", "etc/modprobe.d", "etc/modules-load.d", "etc/munge", "etc/profile.d",
    "etc/security/limits.d", "etc/slurm", "etc/slurm-llnl", "etc/ssh", "etc/ssh/ssh_config.d",
    "etc/ssh/sshd_config.d", "etc/sudoers.d", "etc/sysctl.d", "run/munge", "run/netns", "run/sshd", "run/slurm",
    "run/slurmd", "run/slurmctld", "var/lib/munge", "var/lib/slurm", "var/log/munge", "var/log/slurm",
    "var/spool/slurm", "var/spool/slurmd", "var/spool/slurmctld",
]  # fmt: skip
SETTLE_SECONDS = 0.5
"""A setting may be another for a moment; what stays longer is compared."""
_OURS = "farandole"
_PLACES = "fd-tests-"
"""Short: sockets lie below, and the name of one has at most 107 letters."""
_LEFT = (f"{_OURS}-", "slurm-", "munge-", "sshd-")
_LEFT_BY_A_KILL = f"{_OURS}-hosts-"
"""Two small files, which the next `farandole emulate` removes. See `launch.namespaces`."""


@dataclass(frozen=True)
class Machine:
    """A machine, and the home of who runs the tests; another in the tests of this."""

    root: Path
    home: Path | None

    def settings(self) -> State:
        """Return the kernel's settings by name; in less than a millisecond, for it is asked after every test."""
        root = str(self.root).rstrip("/")
        found: State = {}
        for name in _SETTINGS:
            _add(found, f"{root}/proc/sys/{name}", _text)
        for name in _HUGE_PAGES:
            _add(found, f"{root}/sys/kernel/mm/transparent_hugepage/{name}", _text)
        return found

    def shared(self) -> State:
        """Return what any other program may change, too: system files, interfaces, the account's home."""
        root = str(self.root).rstrip("/")
        found: State = {}
        for name in _FILES:
            _add(found, f"{root}/{name}", _stamp)
        for name in _DIRECTORIES:
            _add_all(found, f"{root}/{name}", _stamp)
        for name in _interfaces(f"{root}/proc/net/dev"):
            found[f"network interface {name}"] = "there"
        if self.home is not None:
            _add_all(found, f"{self.home}", _presence, ".")
            _add_all(found, f"{self.home}/.ssh", _stamp)
            _add_all(found, f"{self.home}/.cache/{_OURS}", _presence)
        for path in _entries(f"{root}/dev/shm"):
            if _OURS in path:
                found[path] = "there"
        return found

    def changed_settings(self, before: State) -> tuple[State, list[str]]:
        """Return the settings now, and a line for each that is not as `before` and stays so."""
        now = self.settings()
        if now != before:
            time.sleep(SETTLE_SECONDS)
            now = self.settings()
        return now, compare(before, now)


def this_machine() -> Machine:
    """Return this one. The home is the one of the user's account, wherever HOME leads."""
    try:
        return Machine(Path("/"), Path(pwd.getpwuid(os.getuid()).pw_dir))
    except KeyError:  # a user without an account, as in some containers
        return Machine(Path("/"), None)


def compare(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each difference."""
    return [
        f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


# -- places of our own -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Directories for whatever tests start: a home, a cache of native loops, temporary files."""

    directory: Path

    @property
    def home(self) -> Path:
        """What HOME says."""
        return self.directory / "home"

    @property
    def temporary(self) -> Path:
        """What TMPDIR says."""
        return self.directory

    @property
    def cache(self) -> Path:
        """What XDG_CACHE_HOME says: one for the session, or each test would compile the native loops."""
        return self.directory / "cache"

    def read(self) -> State:
        """Return what lies in the home and the cache; both are to stay as they were."""
        found: State = {}
        _add_all(found, str(self.home), _presence)
        for path in _entries(str(self.home)):
            _add_all(found, path, _presence)
        _add_all(found, str(self.cache), _presence)
        found.pop(str(self.cache / _OURS), None)
        return found

    def left(self) -> list[str]:
        """Return temporary files and directories of ours and of daemons that tests start."""
        found = []
        for path in _entries(str(self.temporary)):
            name = path.rpartition("/")[2]
            if name.startswith(_LEFT) and not name.startswith(_LEFT_BY_A_KILL):
                found.append(path)
        return sorted(found)

    def remove(self) -> None:
        """Remove them."""
        shutil.rmtree(self.directory, ignore_errors=True)


def take_places() -> Places:
    """Make a session's places, and have this process and its children use them; a worker's are its session's."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return Places(Path(os.environ["TMPDIR"]))
    outer = Path(tempfile.gettempdir())
    _sweep(outer)
    places = Places(Path(tempfile.mkdtemp(prefix=f"{_PLACES}{os.getpid()}-", dir=outer)))
    places.directory.chmod(0o711)  # some tests start a program of another user below
    for path in (places.home, places.cache):
        path.mkdir(mode=0o700)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(outer))  # what failed tests wrote is kept, as usual
    os.environ.update(HOME=str(places.home), TMPDIR=str(places.temporary), XDG_CACHE_HOME=str(places.cache))
    tempfile.tempdir = None  # asked again
    return places


def _sweep(outer: Path) -> None:
    """Remove the places of sessions that were killed."""
    for path in outer.glob(f"{_PLACES}*-*"):
        maker = path.name.removeprefix(_PLACES).partition("-")[0]
        with suppress(OSError):
            if path.stat().st_uid == os.geteuid() and not Path("/proc", maker).exists():
                shutil.rmtree(path, ignore_errors=True)


# -- reading ---------------------------------------------------------------------------------------


def _add(found: State, path: str, describe: Callable[[str], str]) -> None:
    try:
        found[path] = describe(path)
    except FileNotFoundError:
        pass
    except OSError as problem:
        found[path] = f"unreadable: {problem.strerror}"


def _add_all(found: State, directory: str, describe: Callable[[str], str], prefix: str = "") -> None:
    for path in _entries(directory):
        name = path.rpartition("/")[2]
        if name.startswith(prefix) and not name.startswith("making-"):  # of a compiler, for a second
            _add(found, path, describe)


def _entries(directory: str) -> list[str]:
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]  # noqa: PTH208 - faster, and asked often
    except OSError:
        return []


def _text(path: str) -> str:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return " ".join(file.read(4096).decode(errors="replace").split())


def _presence(path: str) -> str:
    status = os.lstat(path)
    return f"{stat.filemode(status.st_mode)} of {status.st_uid}:{status.st_gid}"


def _stamp(path: str) -> str:
    status = os.stat(path)  # noqa: PTH116
    if stat.S_ISDIR(status.st_mode) or stat.S_ISSOCK(status.st_mode):
        return _presence(path)
    return f"{_presence(path)}, {status.st_size} bytes, changed {status.st_mtime_ns}"


def _interfaces(file: str) -> list[str]:
    try:
        return [line.partition(":")[0].strip() for line in Path(file).read_text(encoding="ascii").splitlines()[2:]]
    except OSError:
        return []
