"""What is known about hosts and the links between them, and what a finding is.

Every field of a fact that could not be learnt is None (or empty). The facts of a host are made there, by
`this_host`, and are taken as they are: a host with another version of farandole is not asked for them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...core.vocabulary.errors import LaunchError
from ...core.vocabulary.suggestions import elsewhere_remedy
from ...version import VERSION


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
