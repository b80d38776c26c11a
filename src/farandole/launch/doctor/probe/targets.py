"""Which hosts to examine, and how the probe gets onto each of them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from ...job.host_list import HostSlots
from ...job.hosts import EmulatedHost, Host, HostFinder, LocalHost
from ...ssh.link.remote_shell import HostSetup, SshOptions, ssh_command
from ...supervise.process import preparing
from .channel import PROBE, Target

_PROBE_HERE = [sys.executable, "-m", PROBE]


def find_targets(
    hosts: Sequence[HostSlots], finder: HostFinder, ssh: SshOptions, setup: HostSetup
) -> list[Target]:
    """Return a target for each host of the list; of an empty one, the emulated hosts or this machine.

    Raises `ConfigError` for a name that is none, and for a host that is not of the emulation.
    """
    found = finder.find_all(hosts)
    if all(isinstance(host, LocalHost) and host.port is None for host in found):
        return [Target(socket.gethostname(), "", _PROBE_HERE)]  # however many names it has
    return [_target(host, ssh, setup) for host in found]


def _target(host: Host, ssh: SshOptions, setup: HostSetup) -> Target:
    if isinstance(host, EmulatedHost):
        here = preparing((), host.namespaces)
        return Target(host.namespaces.name, host.namespaces.address, _PROBE_HERE, here)
    if isinstance(host, LocalHost) and host.port is None:
        return Target(host.name, "", _PROBE_HERE)
    return Target(host.name, "", ssh_command(host.name, host.port, ssh), setup=setup)
