"""``farandole run``: start a script on several processes, watch it, summarise it. Takes horovodrun's line too."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.env import BACKEND, RECORD, VERBOSE, inherited_environment
from ...core.job_plan import read_plan, refuse_plan
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.rules import check
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_seconds
from ...launch.job.contract import GRACE_SECONDS
from ...launch.output import OutputStyle, PrefixName
from ...launch.schedulers.submission import SCHEDULERS, SubmitSpec
from ...launch.start.placing import PlacedJob, place_job
from ...launch.start.request import Ending, JobRequest, RemoteOptions, read_command, script_label
from ...launch.start.start import no_status, start_job
from ...launch.supervise.job_loop import Outcome
from ...version import VERSION
from ..main import parser
from ..options.horovod_flags import add_horovod_flags
from ..options.horovod_settings import HorovodSettings, add_general_flags, read_settings
from ..options.host_options import (
    add_elastic_options,
    add_host_options,
    read_elastic_options,
    read_host_list,
    read_remote_options,
)
from ..options.job_options import (
    add_backend_option,
    add_job_options,
    add_record_option,
    read_request,
)

_MOST_GRACE_SECONDS = 86_400.0
_EXAMPLES = """\
  farandole run -np 4 -- python train.py --lr 0.1
  farandole run -np 2 --set accumulate=4 -- python train.py
  farandole run -np 4 --plan plan.toml --run-dir runs/first -- python train.py
  farandole run -np 4 --dry-run -- python train.py
  farandole run -np 4 --grace 120 -- python train_large.py
  farandole run -np 4 --restarts 3 -- python train_with_checkpoints.py
  farandole run -np 8 -H a:4,b:4 -- python train.py
  farandole run -H a:4,b:4 --prelude 'source env.sh' -x MY_TOKEN -- python train.py
  farandole run -np 4 --as-horovod python train_with_horovod.py
  farandole run -np 2 --backend farandole -- python train_with_ddp.py
  farandole run --on slurm -np 8 --nodes 2 --time 2:00:00 -- python train.py
  farandole run -H localhost:2 --fusion-threshold-mb 32 --timeline-filename t.json python train.py

Options of horovodrun keep their meaning; docs/run/launch.md says what each does here.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("run", "Start a script on several processes, watch it, summarise it.", _EXAMPLES)
    made.usage = "farandole run [-np N] [-H HOST:N,...] [options] [--] COMMAND"
    made.add_argument("--baseline", metavar="RUN", help="run of one process to compute the speedup against")
    made.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    made.add_argument("--quiet", action="store_true", help="no progress line and no closing summary")
    made.add_argument(
        "--verbose", action="store_true", help="print where each rank runs, and all that codec auto decides by"
    )
    made.add_argument(
        "--grace", type=_grace, default=GRACE_SECONDS, metavar="SECONDS",
        help=f"time for the ranks to save and end after SIGTERM (default: {GRACE_SECONDS:g})",
    )  # fmt: skip
    made.add_argument(
        "--restarts", "--max-restarts", type=_restarts, default=0, metavar="N",
        help="start all ranks again when one has failed, at most N times, from the last checkpoint",
    )  # fmt: skip
    made.add_argument(
        "--as-horovod", action="store_true", help="resolve the script's `import horovod` to farandole.horovod"
    )
    made.add_argument(
        "-v", "--version", action="version", version=f"farandole {VERSION}", help="print the version"
    )
    made.add_argument(
        "-cb", "--check-build", action="store_true", help="print what is available, and start nothing"
    )
    add_job_options(made)
    add_backend_option(made)
    add_record_option(made)
    add_host_options(made)
    add_elastic_options(made)
    add_scheduler_options(made)
    output = made.add_argument_group("output")
    output.add_argument("--output-filename", metavar="DIR", help="keep DIR/rank.R/stdout and stderr of each rank")
    output.add_argument(
        "--output-prefix", choices=("own", "horovod"), default="own",
        help='lines begin with "[0] ", or as with horovodrun with "[0]<stdout>:"',
    )  # fmt: skip
    output.add_argument(
        "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        help="horovodrun's prefix, after the time",
    )  # fmt: skip
    add_general_flags(made)
    add_horovod_flags(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    if options.check_build:
        print(check_build())
        return 0
    if options.on not in (None, "ray"):
        return _submit(options, arguments)
    settings = read_settings(options)
    if not options.quiet and not options.json:
        _say(settings.notes)
    if options.on == "ray":
        return _end(options, _run_on_ray(options, settings, arguments))
    refuse_without_scheduler(options)
    hosts, elastic = read_host_list(options), read_elastic_options(options)
    if elastic is not None and options.backend == "farandole":
        raise ConfigError(
            "--backend farandole in an elastic job: ranks that wait in shared memory cannot be freed",
            remedy="leave out --backend, or --min-np and --host-discovery-script",
        )
    request = replace(_read_request(options, settings), hosts=hosts, elastic=elastic)
    request = replace(request, remote=read_remote_options(options), typed_command=("farandole", "run", *arguments))
    status = no_status if options.quiet else _latest_progress
    if request.elastic is not None:
        if request.plan is not None:
            check({**vars(request.plan), "elastic": True})
        from ...launch.start.elastic import start_elastic

        if options.dry_run:
            raise ConfigError("--dry-run: who runs where in an elastic job is not known before it runs")
        return _end(options, start_elastic(request, request.elastic, status=status))
    placed = place_job(request)
    if not options.quiet:
        _say(placed.notes)
    if options.dry_run:
        from ...launch.start.start import dry_run

        described = dry_run(placed)
        print(json.dumps(described.to_mapping()) if options.json else described.to_text())
        return 0
    if request.ending.restarts:
        _check_restarts(placed)
    if options.verbose:
        _say(_places(placed))
    return _end(options, start_job(placed, status=status))


def _check_restarts(placed: PlacedJob) -> None:
    """Refuse restarts that cannot be."""
    if len(placed.places) < placed.places[0].size:
        raise ConfigError(
            "--restarts where each node starts its own ranks: one launcher has to start all of them",
            remedy="leave it out, or name the hosts with -H or --hostfile",
        )
    least = placed.request.ending.least_ranks
    if least is not None and not 1 <= least <= placed.size:
        raise ConfigError(f"--min-np {least}: expected 1 to {placed.size}, the number of ranks")


def _grace(text: str) -> float:
    """Return a time as an option has it; more than a day is a mistake."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_GRACE_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, more than 0 and at most 86400")
    return seconds


def _restarts(text: str) -> int:
    """Return a number as an option has it."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def _submit(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from ...launch.schedulers.submission import submit

    spec = read_submission(options, arguments)
    if options.plan is None or options.on != "kubernetes":  # whose file of a plan is in its image
        plan = read_plan(options.plan, options.settings)  # refused here, and not in the queue
        refuse_plan(plan, spec.size or (spec.nodes or 0) * (spec.gpus_per_node or 0) or None)
    return submit(options.on, spec, output_format=options.output_format, dry_run=options.dry_run)


def _run_on_ray(
    options: argparse.Namespace, settings: HorovodSettings, arguments: Sequence[str]
) -> tuple[Outcome, Path]:
    from ...launch.start.start import start_on_ray

    request = replace(_read_request(options, settings), remote=RemoteOptions(variables=tuple(options.variables)))
    spec = read_submission(options, arguments)
    if options.dry_run or options.output_format is not None:
        raise ConfigError("--dry-run: where ranks run on Ray is not known before", remedy="leave it out")
    return start_on_ray(request, spec)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        write_notice(line)


def _latest_progress(directory: Path) -> str | None:
    from ...observe.records.progress import latest_progress

    return latest_progress(directory)


def _read_request(options: argparse.Namespace, settings: HorovodSettings) -> JobRequest:
    """Return the job that the options describe, but for its hosts."""
    request = read_request(options, settings)
    environment = dict(request.environment)
    if options.as_horovod and options.backend == "farandole":
        raise ConfigError(
            "--as-horovod --backend farandole: Horovod's operations are exchanged without torch's process groups",
            remedy="leave one of them out",
        )
    if options.as_horovod:
        from ...horovod.as_horovod import horovod_environment

        environment |= horovod_environment(inherited_environment())
    if options.backend is not None:
        environment[BACKEND] = options.backend
    # Ranks of an elastic job wait for each other in `fd.init`, which a script then calls.
    environment[RECORD] = "1" if options.record and read_elastic_options(options) is None else "0"
    if options.verbose:
        environment[VERBOSE] = "1"
    directory = None if options.output_filename is None else Path(options.output_filename)
    prefix: PrefixName = "horovod with time" if options.prefix_output_with_timestamp else options.output_prefix
    style = OutputStyle(prefix, directory)
    ending = Ending(options.grace, options.restarts, options.min_ranks if options.restarts else None)
    return replace(request, environment=environment, style=style, ending=ending)


def _places(placed: PlacedJob) -> list[str]:
    """Return a line a rank, and one of the variables all are told."""
    lines = [
        f"rank {place.rank} on {place.host_name or 'this machine'}, local rank {place.local_rank} of "
        f"{place.local_size}, cores {','.join(map(str, place.cores)) or 'any'}"
        for place in placed.places
    ]
    told = " ".join(f"{name}={shlex.quote(value)}" for name, value in placed.request.environment.items())
    return [*lines, f"all are told: {told}"] if told else lines


def _end(options: argparse.Namespace, ended: tuple[Outcome, Path]) -> int:
    outcome, directory = ended
    _summarise(options, directory, outcome)
    return outcome.exit_code


def _what_next(directory: Path) -> str:
    """Return the last lines of a run: the verdict where it is known at once, the directory, the next command."""
    from ...observe.diagnose.verdict import brief_verdict

    shown = os.path.relpath(directory) if directory.is_relative_to(Path.cwd()) else str(directory)
    verdict = brief_verdict(directory)
    rows = [("verdict", verdict)] if verdict else []
    rows += [("run directory", str(directory)), ("next", f"farandole diagnose {shlex.quote(shown)}")]
    return "".join(f"{name:<24} {text}\n" for name, text in rows)


def _summarise(options: argparse.Namespace, directory: Path, outcome: Outcome) -> None:
    from ...observe.figures.summary import summarise, write_summary

    baseline = None if options.baseline is None else Path(options.baseline)
    summary = summarise(directory, baseline=baseline)
    try:
        write_summary(directory, summary)
    except OSError as problem:
        write_notice(f"the summary was not written into {directory}: {problem.strerror}")
    if options.json:
        result = {
            "exit_code": outcome.exit_code, "run_directory": str(directory), "seconds": round(outcome.seconds, 3),
        }  # fmt: skip
        print(json.dumps({**result, "summary": summary.to_mapping()}))
    elif not options.quiet and outcome.failure is None and (outcome.exit_code == 0 or summary.steps):
        sys.stdout.flush()
        if summary.steps:
            sys.stderr.write(f"\n{summary.to_text()}\n{_what_next(directory)}")
        else:
            from ...launch.start.request import notes_of_unrecorded

            _say(notes_of_unrecorded(directory, outcome, was_wanted=options.record))
            write_notice(f"done in {format_seconds(outcome.seconds)}; logs in {directory / 'logs'}")


# ``farandole run --check-build``: what there is, in the layout that tools which call horovodrun read.


def check_build() -> str:
    """Return the page."""
    torch, gloo, nccl = _torch()
    tensorflow = importlib.util.find_spec("tensorflow") is not None
    sections = {
        "Available Frameworks": {"TensorFlow": tensorflow, "PyTorch": torch, "MXNet": False},
        "Available Controllers": {"MPI": False, "Gloo": gloo},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": False, "Gloo": gloo},
    }
    lines = [f"Farandole v{VERSION}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in entries.items()]
    return "\n".join(lines)


def _torch() -> tuple[bool, bool, bool]:
    """Return whether torch is there, and its gloo and NCCL backends."""
    if importlib.util.find_spec("torch") is None:
        return False, False, False
    import torch.distributed as dist

    if not dist.is_available():
        return True, False, False
    return True, dist.is_gloo_available(), dist.is_nccl_available()


# ``farandole run --on SCHEDULER``: the options of schedulers, and what they ask for as a `SubmitSpec`.


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
    if options.restarts:
        raise ConfigError(
            f"--restarts with --on {options.on}: ranks are started again here, over ssh and on emulated hosts",
            remedy="leave it out: a scheduler has its own way, such as Slurm's --requeue",
        )
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
