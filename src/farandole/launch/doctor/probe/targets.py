"""Which hosts to examine, and how the probe gets onto each of them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import farandole

from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.suggestions import did_you_mean
from ...job.emulated_hosts import EmulatedHost
from ...job.host_access import is_this_machine
from ...job.host_list import HostSlots
from ...ssh.link.remote_shell import HostSetup, SshOptions, check_name, explain, ssh_command
from ...supervise.process import dying_with_us, preparing
from .channel import Target

PROBE = "farandole.launch.doctor.probe.probe"


def find_targets(
    hosts: Sequence[HostSlots], emulated: Sequence[EmulatedHost], ssh: SshOptions, setup: HostSetup
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


def _named(name: str, known: dict[str, EmulatedHost]) -> EmulatedHost:
    if name not in known:
        raise ConfigError(f"host {name} is not one of the emulated hosts", remedy=did_you_mean(name, known))
    return known[name]


def _here(name: str) -> Target:
    return Target(name, "", [sys.executable, "-m", PROBE], dying_with_us())


def _emulated(host: EmulatedHost) -> Target:
    return Target(host.name, host.address, [sys.executable, "-m", PROBE], preparing((), host))


def _remote(host: HostSlots, ssh: SshOptions, setup: HostSetup) -> Target:
    name = check_name(host.name)

    def why(code: int | None, said: str) -> tuple[str, str]:
        trouble = explain(name, code, said, setup)
        return trouble.cause, trouble.remedy

    command = ssh_command(name, host.port, ssh)
    paths = [str(Path(farandole.__file__).parents[1])]  # where it lies here; it may be installed there, too
    return Target(name, "", command, dying_with_us(), setup.preamble(paths, PROBE), why)
