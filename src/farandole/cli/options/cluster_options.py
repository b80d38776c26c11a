"""The options of commands that look at hosts instead of starting a script on them: `doctor` and `test`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...launch.doctor.probe.channel import Target, find_targets
from ...launch.job.hosts import HostSlots, parse_hosts, read_hostfile, select_hosts
from ...launch.start.placing import find_hosts, host_setup
from .host_options import add_ssh_options, read_remote_options


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name hosts, and how to reach them."""
    group = parser.add_argument_group("hosts")
    lists = group.add_mutually_exclusive_group()
    lists.add_argument("-H", "--hosts", metavar="H,H:N", help="hosts, and how many ranks each takes (default: 1)")
    lists.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file of hosts (see docs/launch.md)")
    group.add_argument("--include", metavar="H@H", help="of these hosts only some")
    group.add_argument("--exclude", metavar="H@H", help="use all hosts and slots but these")
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of the hosts' ssh servers")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="ssh key for the hosts")
    add_ssh_options(parser)


def read_cluster(options: argparse.Namespace) -> list[HostSlots]:
    """Return the hosts of the line; an empty list when it names none."""
    hosts: list[HostSlots] = []
    if options.hosts is not None:
        hosts = parse_hosts(with_slots(options.hosts))
    elif options.hostfile is not None:
        hosts = read_hostfile(Path(options.hostfile))
    elif options.include is not None or options.exclude is not None:
        raise ConfigError("--include and --exclude choose from a list of hosts", remedy="add -H or --hostfile")
    return select_hosts(hosts, include=options.include, exclude=options.exclude)


def with_slots(text: str) -> str:
    """Return a list of hosts in which every one says how many ranks it takes; a bare name takes one.

    >>> with_slots("node1,node2:4,[fe80::1]")
    'node1:1,node2:4,[fe80::1]:1'
    """
    pieces = [piece.strip() for piece in text.split(",")]
    return ",".join(
        f"{piece}:1" if piece and (":" not in piece or piece.endswith("]")) else piece for piece in pieces
    )


def read_targets(options: argparse.Namespace, hosts: list[HostSlots]) -> list[Target]:
    """Return how the doctor's probe gets onto each host."""
    remote = read_remote_options(options)
    return find_targets(hosts, find_hosts(remote), remote.ssh, host_setup(remote))
