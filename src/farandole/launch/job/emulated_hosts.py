"""The hosts that a job may use, as their emulation describes them.

``farandole emulate`` makes hosts of namespaces and passes their description on in a file, whose name is
in the environment; ``farandole run`` places its ranks on them. A rank of such a host enters the host's
namespaces between fork and exec.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...core.environ import env
from ...core.vocabulary.errors import ConfigError, LaunchError

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
HOST_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET
_NAMESPACES = ("mnt", "uts", "net")
T = TypeVar("T")


@dataclass(frozen=True)
class HostNamespaces:
    """One host: how the others reach it, and how many ranks it takes."""

    name: str
    address: str
    slots: int
    interface: str
    keeper: int
    """Process that keeps the host's namespaces alive."""


def write_hosts(path: Path, hosts: Sequence[HostNamespaces]) -> None:
    """Write the description that `read_namespaces` reads."""
    path.write_text(json.dumps([dataclasses.asdict(host) for host in hosts]))


def read_namespaces() -> list[HostNamespaces]:
    """Return the hosts this process was given; an empty list when it was given none."""
    name = env.read_hosts_file()
    if name is None:
        return []
    try:
        return [_read_host(values) for values in json.loads(Path(name).read_text())]
    except (OSError, ValueError, TypeError) as problem:
        raise ConfigError(
            f"{env.HOSTS_FILE}={name} cannot be read: {problem}", remedy="it is set by farandole emulate"
        ) from None


def _read_host(values: Any) -> HostNamespaces:
    wanted = {
        field.name: int if field.name in ("slots", "keeper") else str
        for field in dataclasses.fields(HostNamespaces)
    }
    if not isinstance(values, dict) or values.keys() != wanted.keys():
        raise TypeError(f"expected a host with {', '.join(wanted)}, got {values!r}")
    for name, kind in wanted.items():
        if type(values[name]) is not kind:
            raise TypeError(f"{name}: expected {kind.__name__}, got {values[name]!r}")
    return HostNamespaces(**values)


def entering(host: HostNamespaces) -> Callable[[], None]:
    """Return what makes a forked child a process of `host`. To be made before the fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    doors = [f"/proc/{host.keeper}/ns/{name}" for name in _NAMESPACES]
    if not all(map(os.path.exists, doors)):
        raise LaunchError(f"host {host.name} is gone", remedy="is farandole emulate still running?")
    here = str(Path.cwd())

    def enter() -> None:
        opened = [os.open(door, os.O_RDONLY | os.O_CLOEXEC) for door in doors]
        for door in opened:
            if libc.setns(door, 0):
                os._exit(126)
        os.chdir(here)  # entering a mount namespace leaves us at its root

    return enter


def in_network_of(host: HostNamespaces, make: Callable[[], T]) -> T:
    """Return what `make` makes in the network of `host`, for example a socket; it stays there.

    A thread of its own enters the namespace and ends; this one never leaves ours. Raises what `make` raises.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    made: Future[T] = Future()

    def enter_and_make() -> None:
        try:
            door = os.open(f"/proc/{host.keeper}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if libc.setns(door, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter the network of {host.name}")
            finally:
                os.close(door)
            made.set_result(make())
        except BaseException as problem:
            made.set_exception(problem)

    thread = threading.Thread(target=enter_and_make)
    thread.start()
    thread.join()
    return made.result()
