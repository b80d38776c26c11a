"""Where the ranks of a job go: this machine, hosts of an emulation, this node of several, or hosts over ssh."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.env import (
    CORES,
    ELASTIC,
    ELASTIC_KEY,
    ELASTIC_WORKER,
    HOSTS_FILE,
    NONCE,
    PLAN_FILE,
    RUN_DIRECTORY,
    SECRET,
    TYPED,
    inherited_environment,
    variables,
)
from ...core.launcher_env import NodeInfo
from ...core.rank_variables import DSTACK, KUBERNETES, RANK_NAMES, SKYPILOT, TORCHRUN_NODES
from ...core.slurm import SLURM
from ...core.vocabulary.errors import ConfigError
from ..job.contract import RankSpec
from ..job.hosts import LOOPBACK, MOST_SLOTS, Host, HostFinder, HostSlots, LocalHost, need_ssh, rendezvous_address
from ..job.placement import (
    assign_ranks,
    available_cores,
    bind_ranks,
    crowding_warnings,
    node_places,
    ranks_per_node,
    threads_per_rank,
)
from ..ssh.frames import MOST_BYTES
from ..ssh.remote_shell import HostSetup, SshOptions, check_name, connecting_command
from .request import JobRequest, RemoteOptions


@dataclass(frozen=True)
class PlacedJob:
    """A job whose ranks have their places."""

    request: JobRequest
    places: Sequence[RankSpec]
    hosts: Sequence[Host] = ()
    threads: int = 1
    """Compute threads of each rank; each host over ssh finds its own."""
    address: str = LOOPBACK
    """Where rank 0's host is met; over ssh that is found while the job starts."""
    port: int | None = None
    """The port to meet at; None: a free one."""
    node_rank: int = 0
    """Which of the nodes this is, when a scheduler starts us on each."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What has no effect, and why."""

    @property
    def size(self) -> int:
        """How many ranks there are, as far as this launcher starts them: one more than its last."""
        return self.places[-1].rank + 1

    @property
    def over_ssh(self) -> bool:
        """Whether agents on the hosts start the ranks."""
        return need_ssh(self.hosts)


def check_size(size: int | None, hosts: Sequence[HostSlots] = ()) -> int:
    """Return the number of ranks to start; raise `ConfigError` for one that makes no sense."""
    if size is None:
        return sum(host.slots for host in hosts) or len(available_cores())
    if size < 1:
        raise ConfigError(f"-np {size}: expected at least 1")
    if size > MOST_SLOTS:
        raise ConfigError(f"-np {size}: expected at most {MOST_SLOTS} on one host")
    return size


def find_hosts(remote: RemoteOptions) -> HostFinder:
    """Return what says how hosts are reached when the user said `remote` of them."""
    return HostFinder.of_this_process(always_ssh=remote.ssh.command != SshOptions().command)


def place_job(request: JobRequest) -> PlacedJob:
    """Return the job with its ranks placed on the hosts it names or, when it names none, on those we have."""
    finder = find_hosts(request.remote)
    hosts = finder.find_all(request.hosts)
    if need_ssh(hosts):
        return _place_over_ssh(request, hosts)
    has_no_effect = ("options about ssh have no effect: no host is reached by ssh",)
    notes = has_no_effect if request.remote != RemoteOptions() else ()
    request = replace(request, environment={**chosen_variables(request.remote), **request.environment})
    node = None if finder.emulated else read_node_info()
    if node is None:
        placed = _place_here(request, hosts)
    elif request.hosts:
        raise ConfigError(
            f"hosts were named, and {node.source} says that this is node {node.node_rank} of {node.node_count}",
            remedy="leave -H and --hostfile out: the scheduler has chosen the hosts",
        )
    else:
        placed = _place_on_node(request, node)
    return replace(placed, notes=notes)


def chosen_variables(options: RemoteOptions) -> dict[str, str]:
    """Return what ``-x`` sets, for ranks that inherit the rest."""
    return forwarded_variables({}, [text for text in options.variables if "=" in text])


def command_there(command: Sequence[str], options: RemoteOptions) -> list[str]:
    """Return the command as hosts over ssh are asked for it: with the python of the hosts."""
    command = list(command)
    if options.python is not None and Path(command[0]).name.startswith("python"):
        command[0] = options.python
    elif command[0] in ("python", "python3"):
        # The hosts' own search path may have another python first.
        command[0] = shutil.which(command[0]) or sys.executable
    return command


def _place_here(request: JobRequest, hosts: Sequence[Host]) -> PlacedJob:
    cores = available_cores()
    size = check_size(request.size, hosts)
    hosts = hosts or [LocalHost("", size)]
    places = bind_ranks(assign_ranks(hosts, size), cores, bind=request.bind)
    warnings = _crowding(request, size, len(cores))
    threads, address = threads_per_rank(cores, size), rendezvous_address(hosts)
    return PlacedJob(request, places, hosts, threads, address, warnings=warnings)


def _place_on_node(request: JobRequest, node: NodeInfo) -> PlacedJob:
    """Place the ranks of this node of several."""
    cores = available_cores()
    per_node = ranks_per_node(node, request.size)
    places = bind_ranks(node_places(node, per_node), cores, bind=request.bind)
    return PlacedJob(
        request, places, threads=threads_per_rank(cores, per_node), address=node.address, port=node.port,
        node_rank=node.node_rank, warnings=_crowding(request, per_node, len(cores)),
    )  # fmt: skip


def _crowding(request: JobRequest, ranks: int, cores: int) -> tuple[str, ...]:
    """Return what to say of too few cores here; the agent of each host over ssh does it there."""
    return crowding_warnings(ranks, cores, bind=request.bind, remedy="start at most -np {} here")


def _place_over_ssh(request: JobRequest, hosts: Sequence[Host]) -> PlacedJob:
    places = assign_ranks(hosts, check_size(request.size, hosts))
    for place in places:
        check_name(place.host_name)
    request = replace(request, command=command_there(request.command, request.remote))
    return PlacedJob(request, places, hosts)


def host_commands(placed: PlacedJob) -> list[tuple[str, list[RankSpec], list[str]]]:
    """Return, for each host that gets ranks, its name, their places, and the command that connects us to it."""
    found = []
    for host in placed.hosts:
        places = [place for place in placed.places if place.host_name == host.name]
        if places:
            found.append((host.name, places, connecting_command(host, placed.request.remote.ssh)))
    return found


def host_setup(options: RemoteOptions) -> HostSetup:
    """Return what every host is asked to do first; where the user says nothing, all is as here."""
    return HostSetup(options.directory or str(Path.cwd()), options.python or sys.executable, options.prelude)


def variables_there(request: JobRequest) -> dict[str, str]:
    """Return what hosts over ssh are sent of our environment; refuse more than they would take."""
    variables = variables_to_send(request)
    if len(json.dumps([variables, dict(request.environment), request.command])) > MOST_BYTES // 2:
        raise ConfigError(
            f"the command and the environment for the hosts are more than {MOST_BYTES // 2} bytes",
            remedy="put what is large into a file",
        )
    return variables


def variables_to_send(request: JobRequest) -> dict[str, str]:
    """Return the variables of this environment that ranks on other hosts get."""
    return forwarded_variables(inherited_environment(), request.remote.variables)


# Which variables of the launcher's environment ranks elsewhere get (ssh, Ray): a list, and what ``-x`` names.
#
# The rest of their environment is their host's own: PATH and HOME for example are the host's.


FORWARDED = (
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "LANG", "TZ", "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
FORWARDED_PREFIXES = (
    "FARANDOLE_", "HOROVOD_", "OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_",
    "CUDA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "LC_", "KERAS_", "TF_", "JAX_", "XLA_",
)  # fmt: skip
_NOT_TENSORFLOW = (
    "TF_CLI_", "TF_HTTP_", "TF_TOKEN_", "TF_VAR_",
)  # fmt: skip
"""Terraform's: some of them are passwords and tokens. Its other variables that begin with TF_ hold none."""
_OF_A_HOST = RANK_NAMES | {
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",  # names differ from host to host: chosen for each
    "TF_CONFIG",  # of tf.distribute: says which of its hosts this one is
    RUN_DIRECTORY, PLAN_FILE, HOSTS_FILE, NONCE, SECRET, ELASTIC, ELASTIC_KEY, ELASTIC_WORKER, CORES, TYPED,
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def forwarded_variables(environment: Mapping[str, str], asked: Sequence[str] = ()) -> dict[str, str]:
    """Return what is sent to every host: the list's, then ``NAME`` or ``NAME=VALUE`` as asked.

    Raises `ConfigError` for a name that is none, and for one that is not set here.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_HOST
        and (name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
        and not name.startswith(_NOT_TENSORFLOW)
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name) or "\0" in value:
            # Not the value: it may be secret.
            raise ConfigError(f"-x {name!r}: expected NAME or NAME=VALUE")
        if name in RANK_NAMES:
            raise ConfigError(f"-x {name}: every rank is told its own", remedy="leave it out")
        if not equals:
            if name not in environment:
                raise ConfigError(f"-x {name}: it is not set here", remedy=f"-x {name}=VALUE")
            value = environment[name]
        chosen[name] = value
    return chosen


# Which node of a job this is, for launchers that start one command a node and leave the ranks to it.
#
# [Note: rank or node] For one rank `read_rank_variables` answers. Here the launcher knows nodes only: Slurm with
# one task a node, SkyPilot, dstack, Kubeflow Trainer and torchrun's own variables (``PET_*``), an indexed Job of
# Kubernetes. ``farandole run`` on each node then starts that node's ranks with the right numbers. A process that
# is a rank of farandole already is no node: its launcher has used these variables.


NODE_LAUNCHERS = (KUBERNETES, TORCHRUN_NODES, SKYPILOT, DSTACK, SLURM)


def read_node_info(environ: Mapping[str, str] | None = None) -> NodeInfo | None:
    """Return this node's place; None on the only node of a job, and where no launcher speaks of nodes.

    Raises `ConfigError` naming the variable for a value that makes no sense or is missing.
    """
    environ = variables(environ)
    if "FARANDOLE_RANK" in environ:
        return None
    for launcher in NODE_LAUNCHERS:
        if launcher.started_node(environ):
            return launcher.read_node(environ)
    return None
