"""What this host can say of itself, None for what it cannot learn."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....core.environ.env import read_ssh_connection, set_variables
from ....core.host.commit import working_directory_commit
from ....core.host.congestion import congestion_control
from ....core.host.interfaces import towards
from ....core.host.packages import package_version
from ....core.vocabulary.errors import LaunchError
from ....version import VERSION
from .facts import HostFacts, HostNetwork, Resources, Software, TensorFlowFacts
from .horovod import read_horovod
from .interfaces import read_interfaces
from .machine import read_cores, read_gpus, read_limits, read_memory, read_shared_memory
from .tensorflow import read_tensorflow

_SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def read_this_host() -> HostFacts:
    """Return everything that needs no other host."""
    software = Software(
        python=platform.python_version(),
        executable=sys.executable,
        torch=package_version("torch"),
        farandole=VERSION,
        commit=working_directory_commit() or "",
        **read_horovod(),
    )
    network = HostNetwork(
        interfaces=tuple(read_interfaces()),
        environment=set_variables(_SOCKET_INTERFACES),
        infiniband=_names(Path("/sys/class/infiniband")),
        congestion_control=congestion_control() or "",
    )
    resources: dict[str, Any] = {
        **read_memory(), **read_shared_memory(), **read_limits(), **read_cores(), **read_gpus(),
    }  # fmt: skip
    address = read_ssh_connection()[1]
    tensorflow = TensorFlowFacts(**read_tensorflow())
    return HostFacts("", socket.gethostname(), address, software, tensorflow, network, Resources(**resources))


def read_routes(peers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return by which address and interface each peer, a name and an address, is reached."""
    found = {}
    for name, address in peers.items():
        own = None
        with suppress(LaunchError, OSError, ValueError):
            own = towards([address])
        found[name] = {
            "peer_address": address,
            "own_address": own.address if own is not None else "",
            "interface": own.interface if own is not None else "",
        }
    return found


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in directory.iterdir() if path.is_dir()))
    except OSError:
        return ()
