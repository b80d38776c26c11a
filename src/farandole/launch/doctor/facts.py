"""What is known about hosts and the links between them, and what a finding is.

Every field of a fact that could not be learnt is None (or empty). The facts of a host are made there, by
`this_host`, and are taken as they are: a host with another version of farandole is not asked for them.
"""

from __future__ import annotations

import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...core.vocabulary.errors import LaunchError
from ...core.vocabulary.text import elsewhere_remedy
from ...version import VERSION
from ..job.placement import available_cores


@dataclass(frozen=True)
class Interface:
    """One network interface of a host."""

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool | None = None
    is_virtual: bool = False
    """A bridge of containers, a loopback and the like: other hosts are hardly behind it."""
    mtu_bytes: int | None = None
    speed_megabits: int | None = None
    """What its card negotiated; None: it does not say (virtual ones, wireless ones)."""
    duplex: str = ""


@dataclass(frozen=True)
class KernelRoute:
    """How one host reaches another: from which of its addresses, by which interface."""

    peer_address: str
    own_address: str = ""
    """Empty: there is no route."""
    interface: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    driver: str = ""


@dataclass(frozen=True)
class HostNetwork:
    """How one host is connected, and what names mean there."""

    interfaces: tuple[Interface, ...] = ()
    routes: Mapping[str, KernelRoute] = field(default_factory=dict)
    """By the peer's name."""
    resolved: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """Names looked up on this host: addresses, () for an unknown name, None after a time-out."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME where they are set."""
    infiniband: tuple[str, ...] = ()
    congestion_control: str = ""
    """What its TCP uses; empty: unknown."""

    @property
    def interface(self) -> Interface | None:
        """The interface that leads to the other hosts; None where there is none, or no other host."""
        chosen = next((route.interface for route in self.routes.values() if route.interface), "")
        return next((each for each in self.interfaces if each.name == chosen), None)


@dataclass(frozen=True)
class Resources:
    """Memory, limits, cores and GPUs that ranks on one host may use."""

    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; 0: there is none."""
    shared_memory_free_bytes: int | None = None
    open_files: int | None = None
    """The soft limit; None: unknown or unlimited. As for locked memory."""
    locked_memory_bytes: int | None = None
    cores: int | None = None
    """That this user's processes may run on."""
    core_quota: float | None = None
    """What its control group may use of them; None: all."""
    gpus: tuple[Gpu, ...] = ()
    gpu_source: str = ""
    """What was asked for GPUs; empty: nothing was there to ask."""


@dataclass(frozen=True)
class HostFacts:
    """What one host said of itself, and how its clock stands to the asking one's."""

    name: str
    """As the list of hosts has it; empty on the host itself."""
    hostname: str = ""
    address: str = ""
    """By which the others reach it."""
    python: str = ""
    executable: str = ""
    torch: str = ""
    farandole: str = ""
    commit: str = ""
    """The commit of its working directory, with a + if files of it were changed."""
    network: HostNetwork = HostNetwork()
    resources: Resources = Resources()
    clock_offset_seconds: float | None = None
    """Its time minus the asking host's; None: unknown."""
    clock_error_seconds: float | None = None

    @property
    def pip_install(self) -> str:
        """The beginning of the command that installs packages there."""
        return f"{shlex.quote(self.executable or 'python3')} -m pip install"


@dataclass(frozen=True)
class LinkFacts:
    """What one host found when it called another."""

    source: str
    target: str
    address: str = ""
    """The target's, as the source used it."""
    problem: str = ""
    """Why no connection came about; empty: it did."""
    round_trip_seconds: float | None = None
    """Round-trip time of a small message."""
    bits_per_second: float | None = None
    """Payload of one TCP connection from source to target; None: not measured."""
    stalled: bool = False
    """Small messages passed and large ones did not."""


@dataclass(frozen=True)
class Unreachable:
    """A host that could not be asked."""

    name: str
    cause: str
    remedy: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    """All that is known."""

    hosts: tuple[HostFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    unreachable: tuple[Unreachable, ...] = ()


Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")


@dataclass(frozen=True)
class ClusterFinding:
    """One thing to know. A problem keeps jobs from running well, a warning may, a note does not."""

    what: str
    why: str
    fix: str
    """A line to paste, or to act on."""
    severity: Severity = "problem"
    host: str = ""
    """Where to paste it; empty: it is about several hosts."""


Findings = Iterable[ClusterFinding]
"""What a check returns: it may be a generator."""


def read_host_facts(name: str, answer: Mapping[str, Any]) -> HostFacts:
    """Return the facts of the host `name` from its answer, `to_answer` there.

    Raises:
        LaunchError: it has another version of farandole.
        KeyError, TypeError: the answer is none.
    """
    theirs = str(answer["farandole"])
    if theirs != VERSION:
        python = shlex.quote(str(answer.get("executable") or "python3"))
        raise LaunchError(f"it has farandole {theirs}, here is {VERSION}", remedy=elsewhere_remedy(python))
    facts = answer["facts"]
    network, resources = facts["network"], facts["resources"]
    network["interfaces"] = tuple(
        Interface(**{**each, "addresses": tuple(each["addresses"])}) for each in network["interfaces"]
    )
    network["infiniband"] = tuple(network["infiniband"])
    resources["gpus"] = tuple(Gpu(**gpu) for gpu in resources["gpus"])
    groups = {"network": HostNetwork(**network), "resources": Resources(**resources)}
    return HostFacts(**{**facts, **groups, "name": name})


def to_answer(facts: HostFacts) -> dict[str, Any]:
    """Return what a host says of itself; version and executable stand where every version has them."""
    return {"farandole": facts.farandole, "executable": facts.executable, "facts": asdict(facts)}


# Memory, limits, cores and GPUs of this host, as the kernel, its control group and the GPUs' driver say.


_CGROUP = Path("/sys/fs/cgroup")
_GPU_SECONDS = 12.0
"""A driver that no program keeps loaded takes seconds for each GPU."""
_MORE_PATH = "/usr/sbin:/sbin"
"""Where programs for the network are; not on the PATH of every user."""


def read_memory(cgroup: Path = _CGROUP) -> dict[str, int | None]:
    """Return the memory of this host, or of its control group where that has less."""
    import psutil  # not above: commands that ask for no memory start in milliseconds

    try:
        memory = psutil.virtual_memory()
    except (OSError, ValueError, LookupError):  # no /proc/meminfo, or a strange one
        return {"memory_bytes": None, "memory_available_bytes": None}
    total, available = memory.total, memory.available
    limit, used = _memory_limit(cgroup)
    if limit is not None and used is not None and limit < total:
        total, available = limit, max(0, min(available, limit - used))
    return {"memory_bytes": total, "memory_available_bytes": available}


def _memory_limit(cgroup: Path) -> tuple[int | None, int | None]:
    """Return limit and use of the control group: version 2, or 1. Files that are only cached are not used."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with suppress(OSError, ValueError):
            found = int((cgroup / limit).read_text()), int((cgroup / used).read_text())
            return found[0], max(0, found[1] - _cached_bytes(cgroup / stat))
    return None, None


def _cached_bytes(stat: Path) -> int:
    with suppress(OSError, ValueError):
        words = stat.read_text().split()
        return int(words[words.index("inactive_file") + 1])
    return 0


def read_shared_memory(place: str = "/dev/shm") -> dict[str, int]:
    """Return the size of /dev/shm, 0 where there is none."""
    total = free = 0
    with suppress(OSError):
        total, _, free = shutil.disk_usage(place)
    return {"shared_memory_bytes": total, "shared_memory_free_bytes": free}


def read_limits() -> dict[str, int | None]:
    """Return the soft limits of open files and locked memory, None for none."""

    def soft(limit: int) -> int | None:
        value = resource.getrlimit(limit)[0]
        return None if value == resource.RLIM_INFINITY else value

    return {"open_files": soft(resource.RLIMIT_NOFILE), "locked_memory_bytes": soft(resource.RLIMIT_MEMLOCK)}


def read_cores(cgroup: Path = _CGROUP) -> dict[str, int | float | None]:
    """Return how many cores processes may run on, and what share of them their control group allows."""
    return {"cores": len(available_cores()), "core_quota": _core_quota(cgroup)}


def _core_quota(cgroup: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        wanted = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return None if wanted <= 0 else wanted / int((cgroup / "cpu/cpu.cfs_period_us").read_text())
    return None


def read_gpus() -> dict[str, Any]:
    """Return the GPUs that nvidia-smi, a part of the driver, tells of."""
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    text = ask_command("nvidia-smi", [query, "--format=csv,noheader,nounits"], _GPU_SECONDS)
    if text is None:
        return {"gpus": (), "gpu_source": ""}
    return {"gpus": parse_nvidia_smi(text), "gpu_source": "nvidia-smi"}


def ask_command(name: str, words: Sequence[str], seconds: float) -> str | None:
    """Return what a command prints; None where it is missing, fails or takes longer than `seconds`."""
    command = shutil.which(name) or shutil.which(name, path=_MORE_PATH)
    if command is None:
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return subprocess.run(
            [command, *words],
            capture_output=True, text=True, timeout=seconds, check=True, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    return None


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Read lines of name, total and used MiB, driver; ``[N/A]`` is unknown."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.rsplit(",", 3)]
        if len(words) == 4:
            found.append(Gpu(words[0], _mebibytes(words[1]), _mebibytes(words[2]), words[3]))
    return tuple(found)


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isascii() and text.isdecimal() else None
