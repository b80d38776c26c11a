"""What is known about hosts and the links between them. Hosts may say anything: what makes no sense is unknown.

Every field of a fact that could not be learnt is None (or empty), and `HostFacts.nonsense` names what a host said
that cannot be true. So checks never meet a value of another type, a negative size or a NaN. What ends up in lines
to paste (names, versions, paths, addresses) has an alphabet without anything that a shell would read.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.host.packages import TENSORFLOW_DISTRIBUTIONS

_MOST_TEXT = 500
_MOST_ITEMS = 1000
_MOST_BYTES = 2.0**62


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
        return f"{self.executable or 'python3'} -m pip install"


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
    """As the list of hosts has it."""
    hostname: str = ""
    address: str = ""
    """By which the others reach it."""
    software: Software = Software()
    tensorflow: TensorFlowFacts = TensorFlowFacts()
    network: HostNetwork = HostNetwork()
    resources: Resources = Resources()
    clock: HostClock = HostClock()
    nonsense: tuple[str, ...] = ()


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
    """Read what the host `name` said of itself; never raises."""
    reader = _Reader(answer, [])
    variables = reader.mapping("environment").items()
    return HostFacts(
        name,
        reader.text("hostname", _NAME),
        software=Software(**{key: reader.text(key, alphabet) for key, alphabet in _SOFTWARE.items()}),
        tensorflow=TensorFlowFacts(
            tensorflow=_read_distributions(reader),
            **{key: reader.text(key, alphabet) for key, alphabet in _TENSORFLOW.items()},
            uses_legacy_keras=answer.get("uses_legacy_keras") is True,
        ),
        network=HostNetwork(
            interfaces=tuple(_read_interface(part) for part in reader.parts("interfaces")),
            environment={key: _printable(value) for key, value in variables if isinstance(value, str)},
            infiniband=reader.texts("infiniband"),
            congestion_control=reader.text("congestion_control", _WORD),
        ),
        resources=Resources(
            **{key: reader.integer(key, 0) for key in _COUNTS},
            cores=reader.integer("cores", 1, 1_000_000),
            core_quota=reader.number("core_quota", 1e-6, 1e6),
            gpus=tuple(_read_gpu(part) for part in reader.parts("gpus")),
            gpu_source=reader.text("gpu_source"),
        ),
        nonsense=tuple(reader.nonsense),
    )


def read_routes(answer: Mapping[str, Any]) -> dict[str, KernelRoute]:
    """Read how a host reaches its peers; never raises."""
    found = {}
    for peer, values in _Reader(answer, []).mapping("routes").items():
        if isinstance(values, dict):
            part = _Reader(values, [])
            found[peer] = KernelRoute(
                part.address("peer_address"), part.address("own_address"), part.text("interface", _INTERFACE)
            )
    return found


def read_resolved(answer: Mapping[str, Any]) -> dict[str, tuple[str, ...] | None]:
    """Read what names mean on a host; never raises."""
    reader = _Reader(_Reader(answer, []).mapping("resolved"), [])
    return {key: None if value is None else reader.addresses(key) for key, value in reader.answer.items()}


def read_link(source: str, target: str, address: str, answer: Mapping[str, Any]) -> tuple[LinkFacts, float | None]:
    """Read what `source` found when it called `target`, and the rate of the way back; never raises."""
    reader = _Reader(answer, [])
    link = LinkFacts(
        source, target, address,
        problem=reader.text("problem"),
        round_trip_seconds=reader.number("round_trip_seconds", 0.0, 1e6),
        bits_per_second=reader.number("bits_per_second", 0.0, 1e15),
        stalled=answer.get("stalled") is True,
    )  # fmt: skip
    return link, reader.number("bits_per_second_back", 0.0, 1e15)


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_PATH = re.compile(r"/[A-Za-z0-9_./+@-]+")
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_SOFTWARE = {
    "python": _VERSION, "executable": _PATH, "torch": _VERSION, "farandole": _VERSION,
    "commit": re.compile(r"[0-9a-f]+\+?"), "horovod": _VERSION, "horovod_build": _WORD, "horovod_script": _NAME,
}  # fmt: skip
_TENSORFLOW = {
    "keras": _VERSION, "tf_keras": _VERSION, "keras_backend": _WORD, "cpp_compiler": _PATH,
}  # fmt: skip
_COUNTS = (
    "memory_bytes", "memory_available_bytes", "shared_memory_bytes", "shared_memory_free_bytes", "open_files",
    "locked_memory_bytes",
)  # fmt: skip


def _read_distributions(reader: _Reader) -> dict[str, str]:
    part = _Reader(reader.mapping("tensorflow"), reader.nonsense)
    versions = {name: part.text(name, _VERSION) for name in TENSORFLOW_DISTRIBUTIONS}
    return {name: version for name, version in versions.items() if version}


def _read_interface(part: _Reader) -> Interface:
    return Interface(
        part.text("name", _INTERFACE),
        part.addresses("addresses"),
        part.answer.get("is_up") if isinstance(part.answer.get("is_up"), bool) else None,
        part.answer.get("is_virtual") is True,
        part.integer("mtu_bytes", 1, 1 << 20),
        part.integer("speed_megabits", 1, 100_000_000),
        part.text("duplex"),
    )


def _read_gpu(part: _Reader) -> Gpu:
    return Gpu(
        part.text("name"), part.integer("memory_bytes", 0), part.integer("used_bytes", 0), part.text("driver")
    )


@dataclass
class _Reader:
    """Reads one JSON object key by key; notes what makes no sense."""

    answer: Mapping[str, Any]
    nonsense: list[str]

    def text(self, key: str, alphabet: re.Pattern[str] | None = None) -> str:
        value = self.answer.get(key, "")
        if value is None or value == "":
            return ""
        if not isinstance(value, str) or (alphabet is not None and not alphabet.fullmatch(value[:_MOST_TEXT])):
            self._odd(key, value)
            return ""
        return _printable(value)

    def address(self, key: str) -> str:
        value = self.answer.get(key) or ""
        if value == "" or _is_address(value):
            return str(value)
        self._odd(key, value)
        return ""

    def addresses(self, key: str) -> tuple[str, ...]:
        return tuple(value for value in self.texts(key) if _is_address(value))

    def number(self, key: str, least: float, most: float = _MOST_BYTES) -> float | None:
        value = self.answer.get(key)
        if value is None:
            return None
        is_number = type(value) is int or (type(value) is float and math.isfinite(value))
        if not is_number or not least <= value <= most:
            self._odd(key, value)
            return None
        return float(value)

    def integer(self, key: str, least: int, most: float = _MOST_BYTES) -> int | None:
        value = self.number(key, least, most)
        return None if value is None else int(value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.answer.get(key, {})
        if not isinstance(value, dict) or len(value) > _MOST_ITEMS:
            self._odd(key, value)
            return {}
        return {_printable(str(name)): inner for name, inner in value.items()}

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(_printable(value) for value in self._items(key) if isinstance(value, str))

    def parts(self, key: str) -> list[_Reader]:
        return [_Reader(value, self.nonsense) for value in self._items(key) if isinstance(value, dict)]

    def _items(self, key: str) -> Sequence[Any]:
        value = self.answer.get(key, [])
        if not isinstance(value, list) or len(value) > _MOST_ITEMS:
            self._odd(key, value)
            return []
        return value

    def _odd(self, key: str, value: Any) -> None:
        if len(self.nonsense) < 20:
            huge = type(value) is int and abs(value) >= 1 << 64
            self.nonsense.append(f"{key} = {'a huge number' if huge else _printable(str(value)[:60])}")


def _is_address(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    address, percent, zone = value.partition("%")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return not percent or _INTERFACE.fullmatch(zone) is not None


def _printable(text: str) -> str:
    """Return text that can be shown: hosts must not be able to move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text[:_MOST_TEXT])
