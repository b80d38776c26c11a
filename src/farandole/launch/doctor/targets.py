"""Which hosts to examine, and how the probe gets onto each of them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import farandole

from ...core.errors import ConfigError
from ...core.names import did_you_mean
from ..backend import is_this_machine
from ..host_list import HostSlots
from ..hosts import Host
from ..process import dying_with_us, preparing
from ..ssh.remote_shell import HostSetup, SshOptions, check_name, explain, ssh_command
from .channel import Target

PROBE = "farandole.launch.doctor.probe"


def find_targets(
    hosts: Sequence[HostSlots], emulated: Sequence[Host], ssh: SshOptions, setup: HostSetup
) -> list[Target]:
    """Return a target for each host of the list; of an empty one, the emulated hosts or this machine.

    Raises `ConfigError` for a name that is none, and for a
    host that is not of the emulation.
    """
    if emulated:
        known = {name: host for host in emulated for name in (host.name, host.address)}
        return [_emulated(_named(host.name, known)) for host in hosts] or [_emulated(host) for host in emulated]
    if not hosts:
        return [_here(socket.gethostname())]
    plain = ssh.command == SshOptions().command
    if plain and all(host.port is None and is_this_machine(host.name) for host in hosts):
        return [_here(socket.gethostname())]  # however many names it has
    return [
        _here(host.name)
        if plain and host.port is None and is_this_machine(host.name)
        else _remote(host, ssh, setup)
        for host in hosts
    ]


def _named(name: str, known: dict[str, Host]) -> Host:
    if name not in known:
        raise ConfigError(f"host {name} is not one of the emulated hosts", remedy=did_you_mean(name, known))
    return known[name]


def _here(name: str) -> Target:
    return Target(name, "", [sys.executable, "-m", PROBE], dying_with_us())


def _emulated(host: Host) -> Target:
    return Target(host.name, host.address, [sys.executable, "-m", PROBE], preparing((), host))


def _remote(host: HostSlots, ssh: SshOptions, setup: HostSetup) -> Target:
    name = check_name(host.name)

    def why(code: int | None, said: str) -> tuple[str, str]:
        trouble = explain(name, code, said, setup)
        return trouble.cause, trouble.remedy

    command = ssh_command(name, host.port, ssh)
    paths = [str(Path(farandole.__file__).parents[1])]  # where it lies here; it may be installed there, too
    return Target(name, "", command, dying_with_us(), setup.preamble(paths, PROBE), why)
