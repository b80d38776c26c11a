"""Which hosts to examine, and how the probe gets onto each of them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import farandole

from ...job.emulated_hosts import HostNamespaces
from ...job.host_list import HostSlots
from ...job.hosts import EmulatedHost, Host, HostFinder, LocalHost
from ...ssh.link.remote_shell import HostSetup, SshOptions, check_name, explain, ssh_command
from ...supervise.process import dying_with_us, preparing
from .channel import Target

PROBE = "farandole.launch.doctor.probe.probe"


def find_targets(
    hosts: Sequence[HostSlots], finder: HostFinder, ssh: SshOptions, setup: HostSetup
) -> list[Target]:
    """Return a target for each host of the list; of an empty one, the emulated hosts or this machine.

    Raises `ConfigError` for a name that is none, and for a host that is not of the emulation.
    """
    found = finder.find_all(hosts)
    if all(isinstance(host, LocalHost) and host.port is None for host in found):
        return [_here(socket.gethostname())]  # however many names it has
    return [_target(host, ssh, setup) for host in found]


def _target(host: Host, ssh: SshOptions, setup: HostSetup) -> Target:
    if isinstance(host, EmulatedHost):
        return _emulated(host.namespaces)
    is_here = isinstance(host, LocalHost) and host.port is None
    return _here(host.name) if is_here else _remote(host, ssh, setup)


def _here(name: str) -> Target:
    return Target(name, "", [sys.executable, "-m", PROBE], dying_with_us())


def _emulated(host: HostNamespaces) -> Target:
    return Target(host.name, host.address, [sys.executable, "-m", PROBE], preparing((), host))


def _remote(host: HostSlots, ssh: SshOptions, setup: HostSetup) -> Target:
    name = check_name(host.name)

    def why(code: int | None, said: str) -> tuple[str, str]:
        trouble = explain(name, code, said, setup)
        return trouble.cause, trouble.remedy

    command = ssh_command(name, host.port, ssh)
    paths = [str(Path(farandole.__file__).parents[1])]  # where it lies here; it may be installed there, too
    return Target(name, "", command, dying_with_us(), setup.preamble(paths, PROBE), why)
