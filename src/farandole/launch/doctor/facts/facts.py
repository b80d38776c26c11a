"""What is known about hosts and the links between them.

Every field of a fact that could not be learnt is None (or empty). The facts of a host are made there, by
`this_host`, and are taken as they are: a host with another version of farandole is not asked for them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ....core.vocabulary.errors import LaunchError
from ....core.vocabulary.suggestions import elsewhere_remedy
from ....version import VERSION


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
class Software:
    """The programs of one host, and the commit of its working directory."""

    python: str = ""
    executable: str = ""
    torch: str = ""
    farandole: str = ""
    commit: str = ""
    """With a + if files of it were changed."""
    horovod: str = ""
    horovod_build: str = ""
    """A variable that Horovod's build reads and that is set."""
    horovod_script: str = ""
    """A file of the working directory that imports horovod."""

    @property
    def pip_install(self) -> str:
        """The beginning of the command that installs packages there."""
        return f"{shlex.quote(self.executable or 'python3')} -m pip install"


@dataclass(frozen=True)
class TensorFlowFacts:
    """TensorFlow and Keras on one host. Empty: not installed."""

    tensorflow: Mapping[str, str] = field(default_factory=dict)
    """The versions of its distributions, by name. One is right: all of them write the same folder."""
    keras: str = ""
    tf_keras: str = ""
    keras_backend: str = ""
    uses_legacy_keras: bool = False
    """TF_USE_LEGACY_KERAS is set."""
    cpp_compiler: str = ""
    """Its path; empty: there is none."""

    @property
    def version(self) -> str:
        """The version of TensorFlow; of several distributions, of the first one."""
        return next(iter(self.tensorflow.values()), "")

    @property
    def distribution(self) -> str:
        """What is to be installed by pip to replace it."""
        return next(iter(self.tensorflow), "tensorflow")


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
class HostClock:
    """One host's clock beside the asking one's."""

    offset_seconds: float | None = None
    """This host's time minus the asking one's; None: unknown."""
    error_seconds: float | None = None


@dataclass(frozen=True)
class HostFacts:
    """What one host said of itself."""

    name: str
    """As the list of hosts has it; empty on the host itself."""
    hostname: str = ""
    address: str = ""
    """By which the others reach it."""
    software: Software = Software()
    tensorflow: TensorFlowFacts = TensorFlowFacts()
    network: HostNetwork = HostNetwork()
    resources: Resources = Resources()
    clock: HostClock = HostClock()


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
    interfaces = tuple(
        Interface(**{**each, "addresses": tuple(each["addresses"])}) for each in network["interfaces"]
    )
    return HostFacts(
        name,
        facts["hostname"],
        facts["address"],
        Software(**facts["software"]),
        TensorFlowFacts(**facts["tensorflow"]),
        HostNetwork(**{**network, "interfaces": interfaces, "infiniband": tuple(network["infiniband"])}),
        Resources(**{**resources, "gpus": tuple(Gpu(**gpu) for gpu in resources["gpus"])}),
    )


def to_answer(facts: HostFacts) -> dict[str, Any]:
    """Return what a host says of itself; version and executable stand where every version has them."""
    return {
        "farandole": facts.software.farandole,
        "executable": facts.software.executable,
        "facts": asdict(facts),
    }
