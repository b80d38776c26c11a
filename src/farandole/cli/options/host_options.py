"""The options that say where ranks start: hosts, host files, parts of them, and elastic jobs."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from pathlib import Path

from ...core.host.paths import is_file
from ...core.vocabulary.errors import ConfigError
from ...launch.doctor.examine import Target, find_targets
from ...launch.elastic.options import ElasticOptions
from ...launch.job.hosts import MOST_SLOTS, HostSlots, parse_hosts, read_hostfile, select_hosts
from ...launch.ssh.remote_shell import HostSetup, SshOptions
from ...launch.start.placing import find_hosts, host_setup
from ...launch.start.request import RemoteOptions


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about hosts."""
    group = parser.add_argument_group("hosts")
    lists = group.add_mutually_exclusive_group()
    lists.add_argument("-H", "--hosts", metavar="H:N,H:N", help="hosts and their numbers of slots")
    lists.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file of hosts (see docs/run/launch.md)")
    lists.add_argument(
        "--host-discovery-script", metavar="FILE", help="elastic: an executable that prints host:slots lines"
    )
    group.add_argument("--include", metavar="H:0,1@H", help="use only these hosts, or these slots of them")
    group.add_argument("--exclude", metavar="H:0,1@H", help="use all hosts and slots but these")
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of the hosts' ssh servers")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="ssh key for the hosts")
    add_ssh_options(parser)


def add_ssh_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about hosts that are reached by ssh."""
    group = parser.add_argument_group("hosts reached by ssh (see docs/run/launch.md)")
    group.add_argument(
        "--ssh-option", dest="ssh_options", action="append", default=[], metavar="NAME=VALUE",
        help="option of ssh, as in its configuration; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--ssh-command", metavar="COMMAND", help='a command to use instead of ssh, e.g. "my-shell {host}"'
    )
    group.add_argument("--python", metavar="FILE", help="Python on the hosts (default: the path of this Python)")
    group.add_argument("--chdir", metavar="DIR", help="working directory on the hosts (default: this one)")
    group.add_argument("--prelude", metavar="TEXT", help="shell text to run first on each host: 'source env.sh'")
    group.add_argument(
        "-x", dest="variables", action="append", default=[], metavar="NAME[=VALUE]",
        help="variable to pass to the ranks; may be given several times",
    )  # fmt: skip


def add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of jobs whose hosts come and go. What is not typed is None."""
    group = parser.add_argument_group("elastic jobs: with --min-np or --host-discovery-script")
    group.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_ranks",
        type=int,
        metavar="N",
        help="wait while there are fewer ranks (default: -np)",
    )
    group.add_argument(
        "--max-np", "--max-num-proc", dest="max_ranks", type=int, metavar="N", help="never more than N ranks"
    )
    group.add_argument(
        "--spares", type=int, metavar="N", help="N more that wait, and take the place of ranks that are lost"
    )
    group.add_argument(
        "--slots-per-host", "--slots", dest="slots_per_host", type=int, metavar="N",
        help="slots of a host without a number",
    )  # fmt: skip
    group.add_argument(
        "--elastic-timeout", dest="elastic_timeout", type=float, metavar="S",
        help="how long to wait for enough hosts (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--reset-limit", type=int, metavar="N", help="how many new generations may follow the first"
    )
    group.add_argument(
        "--blacklist-cooldown-range", dest="cooldown", type=int, nargs=2, metavar=("MIN", "MAX"),
        help="seconds before a failed host is tried again",
    )  # fmt: skip


def read_host_list(options: argparse.Namespace) -> list[HostSlots]:
    """Return the hosts of the command line, an empty list when it names none."""
    hosts: list[HostSlots] = []
    bare_slots = options.slots_per_host
    if bare_slots is not None and not (1 <= bare_slots <= MOST_SLOTS):
        raise ConfigError(f"--slots-per-host {bare_slots}: expected 1 to {MOST_SLOTS}")
    if bare_slots is not None and options.hostfile is None and options.host_discovery_script is None:
        raise ConfigError("--slots-per-host is for lines without a number", remedy="give it with --hostfile")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = read_hostfile(Path(options.hostfile), bare_slots=bare_slots or 1)
    elif options.include is not None or options.exclude is not None:
        raise ConfigError("--include and --exclude choose from a list of hosts", remedy="add -H or --hostfile")
    return select_hosts(hosts, include=options.include, exclude=options.exclude)


def read_ssh_options(options: argparse.Namespace) -> SshOptions:
    """Return how hosts are to be reached by ssh."""
    if options.ssh_port is not None and not 1 <= options.ssh_port <= 65535:
        raise ConfigError(f"--ssh-port {options.ssh_port}: expected 1 to 65535")
    key = None if options.ssh_identity_file is None else Path(options.ssh_identity_file)
    if key is not None and not is_file(key):
        raise ConfigError(f"--ssh-identity-file {key}: no such file")
    for text in options.ssh_options:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*[ =][^\n\r\0]+", text):
            raise ConfigError(f"--ssh-option {text!r}: expected NAME=VALUE", remedy="see: man ssh_config")
    return SshOptions(options.ssh_port, key, tuple(options.ssh_options), _read_ssh_command(options.ssh_command))


def read_remote_options(options: argparse.Namespace) -> RemoteOptions:
    """Return all that the line says of hosts reached by ssh."""
    read = RemoteOptions(
        read_ssh_options(options), options.python, options.chdir, options.prelude or "",
        tuple(options.variables),
    )  # fmt: skip
    # Checked here, before anything is made.
    HostSetup(
        "." if read.directory is None else read.directory, "python" if read.python is None else read.python,
        read.prelude,
    )  # fmt: skip
    return read


def _read_ssh_command(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ("ssh",)
    try:
        words = tuple(shlex.split(text))
    except ValueError as problem:
        raise ConfigError(f"--ssh-command {text!r}: {problem}") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"--ssh-command {text!r}: no such command")
    return words


def read_elastic_options(options: argparse.Namespace) -> ElasticOptions | None:
    """Return what is asked of an elastic job; None: the job is not elastic.

    Raises `ConfigError` for bounds that make no sense, and elastic options of a job that is not.
    """
    is_fixed = options.restarts and options.host_discovery_script is None  # whose --min-np is another
    if options.restarts and not is_fixed:
        raise ConfigError(
            "--restarts with --host-discovery-script: an elastic job goes on by itself",
            remedy="leave one of them out: --reset-limit says how often it may",
        )
    if is_fixed or (options.min_ranks is None and options.host_discovery_script is None):
        for name in ("max_ranks", "elastic_timeout", "reset_limit", "cooldown", "spares"):
            if getattr(options, name) is not None:
                spelling = {"max_ranks": "--max-np", "cooldown": "--blacklist-cooldown-range"}.get(
                    name, "--" + name.replace("_", "-")
                )
                raise ConfigError(
                    f"{spelling} is for elastic jobs",
                    remedy="leave it out, or --restarts"
                    if is_fixed
                    else "add --min-np or --host-discovery-script",
                )
        return None
    least = options.min_ranks if options.min_ranks is not None else options.size
    if least is None:
        raise ConfigError("an elastic job needs -np or --min-np", remedy="say how few ranks it may have")
    if options.size is not None and options.size < least:
        raise ConfigError(f"-np {options.size}: expected at least --min-np, {least}")
    if options.size is not None and options.max_ranks is not None and options.size > options.max_ranks:
        raise ConfigError(f"-np {options.size}: expected at most --max-np, {options.max_ranks}")
    script = None if options.host_discovery_script is None else Path(options.host_discovery_script)
    if script is not None and not is_file(script):
        raise ConfigError(f"--host-discovery-script {script}: no such file")
    if options.hosts is not None and len(parse_hosts(options.hosts)) < 2:
        raise ConfigError(
            "Cannot run in fault tolerance mode with fewer than 2 hosts.", remedy="name more hosts after -H"
        )
    spares = options.spares or 0
    most = options.max_ranks
    return ElasticOptions(
        min_ranks=least,
        max_ranks=options.size if spares and most is None else most,
        discovery_script=script,
        elastic_timeout_seconds=600.0 if options.elastic_timeout is None else options.elastic_timeout,
        reset_limit=options.reset_limit,
        cooldown_range_seconds=None if options.cooldown is None else (options.cooldown[0], options.cooldown[1]),
        slots_per_host=options.slots_per_host,
        spares=spares,
    )


# The options of commands that look at hosts instead of starting a script on them: `doctor` and `test`.


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name hosts, and how to reach them."""
    group = parser.add_argument_group("hosts")
    lists = group.add_mutually_exclusive_group()
    lists.add_argument("-H", "--hosts", metavar="H,H:N", help="hosts, and how many ranks each takes (default: 1)")
    lists.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file of hosts (see docs/run/launch.md)")
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
