"""``farandole run --on SCHEDULER``: the options of schedulers, and what they ask for as a `SubmitSpec`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.vocabulary.errors import ConfigError
from ...launch.schedulers.submission import SCHEDULERS, SubmitSpec
from ...launch.start.request import read_command, script_label


@dataclass(frozen=True)
class Option:
    """An option that only a scheduler reads."""

    name: str
    help: str
    metavar: str = "NAME"
    choices: tuple[str, ...] = ()


OPTIONS = (
    Option("queue", "queue: a partition of Slurm, a local queue of Kueue on Kubernetes"),
    Option("priority", "priority: Slurm's number, a priority class of Kubernetes"),
    Option("partition", "partition of Slurm"),
    Option("qos", "quality of service of Slurm"),
    Option("account", "account of Slurm"),
    Option("time", "time limit of Slurm, e.g. 2:00:00", "TIME"),
    Option("warn-before", "Slurm sends SIGUSR1 this many seconds before the limit (see fd.preempted)", "S"),
    Option("image", "image of the pods on Kubernetes"),
    Option("namespace", "namespace on Kubernetes"),
    Option("kind", "kind of job on Kubernetes (default: trainjob)", choices=("trainjob", "jobset", "job")),
    Option("runtime", "runtime of a TrainJob (default: torch-distributed)"),
)
_SHAPE = ("nodes", "gpus_per_node", "cpus_per_rank")
_ELASTIC = ("--min-np", "--max-np", "--host-discovery-script")


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about schedulers. What is not typed is None."""
    group = parser.add_argument_group("schedulers: with --on")
    group.add_argument("--on", choices=SCHEDULERS, metavar="NAME", help="scheduler: " + ", ".join(SCHEDULERS))
    group.add_argument(
        "-o", dest="output_format", metavar="FORMAT", help="with --dry-run: what to print, e.g. sbatch or yaml"
    )
    group.add_argument("--job-name", metavar="NAME", help="name of the job (default: the script's)")
    group.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: as many as -np needs)")
    group.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs per node; without -np also its number of ranks"
    )
    group.add_argument("--cpus-per-rank", type=int, metavar="N", help="CPUs of each rank (default: 1)")
    for option in OPTIONS:
        group.add_argument(
            f"--{option.name}", help=option.help, choices=option.choices or None,
            metavar=None if option.choices else option.metavar,
        )  # fmt: skip


def refuse_without_scheduler(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for an option of schedulers when none was chosen."""
    typed = [name for name in (*_SHAPE, "output_format", "job_name") if getattr(options, name) is not None]
    typed += [option.name for option in OPTIONS if getattr(options, _attribute(option)) is not None]
    for name in typed:
        spelling = "-o" if name == "output_format" else "--" + name.replace("_", "-")
        raise ConfigError(f"{spelling} is for schedulers", remedy=f"add --on {{{','.join(SCHEDULERS)}}}")


def read_submission(options: argparse.Namespace, arguments: Sequence[str]) -> SubmitSpec:
    """Return what the line asks of a scheduler.

    Options that are neither about the scheduler nor about hosts go to the ``farandole run`` of each node.
    """
    _refuse_elastic(options)
    typed = {option.name: getattr(options, _attribute(option)) for option in OPTIONS}
    for name in ("hosts", "hostfile"):
        value = getattr(options, name)
        if value is not None and options.on != "mpi":
            raise ConfigError(f"--{name}: --on {options.on} chooses the hosts", remedy="leave it out")
        typed[name] = value
    if options.cpus_per_rank is not None and options.cpus_per_rank < 1:
        raise ConfigError(f"--cpus-per-rank {options.cpus_per_rank}: expected at least 1")
    if options.size is not None and options.size < 1:
        raise ConfigError(f"-np {options.size}: expected at least 1")
    # What runs in a pod is in its image; elsewhere the script is here.
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = words if options.on == "kubernetes" and words else read_command(options.command)
    return SubmitSpec(
        command=tuple(command),
        run_options=tuple(_for_each_node(arguments, options.command)),
        size=options.size,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        cpus_per_rank=options.cpus_per_rank,
        name=options.job_name or script_label(command),
        grace_seconds=options.grace,
        options={name: value for name, value in typed.items() if value is not None},
    )


def _refuse_elastic(options: argparse.Namespace) -> None:
    values = (options.min_ranks, options.max_ranks, options.host_discovery_script)
    for spelling, value in zip(_ELASTIC, values, strict=True):
        if value is not None:
            raise ConfigError(
                f"{spelling} with --on {options.on}: a scheduler's job has a fixed number of ranks",
                remedy="leave it out, or use an elastic job on hosts of its own",
            )


def _for_each_node(arguments: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the options of the line that are not about the scheduler, the size, hosts or the dry run."""
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_scheduler_options(ours)
    ours.add_argument("-np", "-n", "--np", "--num-proc")
    ours.add_argument("-H", "--hosts")
    ours.add_argument("-hostfile", "--hostfile")
    ours.add_argument("--dry-run", action="store_true")
    head = list(arguments[: len(arguments) - len(command)])
    if head[-1:] == ["--"]:
        head.pop()
    return ours.parse_known_args(head)[1]


def _attribute(option: Option) -> str:
    return option.name.replace("-", "_")
