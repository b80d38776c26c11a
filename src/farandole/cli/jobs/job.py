"""What `run` and `verify` share: the options of a job, reading them into a `JobRequest`, and starting it."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.environ.env import inherited_environment, read_frozen_seconds
from ...core.launchers.launcher_env import NodeInfo
from ...core.launchers.node_env import read_node_info
from ...core.vocabulary.config import parse_settings, read_mapping
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.run_files import PLAN
from ...core.vocabulary.spec import Plan
from ...launch.job.contract import FROZEN_SECONDS, JobSpec, RankSpec, rank_environment
from ...launch.job.cores import available_cores, divide_cores
from ...launch.job.emulated_hosts import read_hosts
from ...launch.job.host_access import LOOPBACK, HostAccess, backend_for
from ...launch.job.host_list import MOST_SLOTS, HostSlots
from ...launch.job.node_ranks import node_places, ranks_per_node
from ...launch.job.placement import assign_ranks
from ...launch.job.ports import GivenPort, ReservedPort
from ...launch.job.run_directory import make_run_directory, write_run
from ...launch.output.rank_output import Output
from ...launch.output.style import OWN_STYLE, OutputStyle
from ...launch.supervise.local import Outcome, Supervisor
from ...launch.supervise.stacks import read_stacks
from ...launch.supervise.warning_signal import passing_on_warnings
from ..options.command import read_command
from ..options.horovod_settings import PlanWish


@dataclass(frozen=True)
class JobRequest:
    """A job to start, all of it read and checked."""

    command: list[str]
    plan: Plan
    plan_given: bool
    places: Sequence[RankSpec] = ()
    threads: int = 1
    """Compute threads of each rank."""
    address: str = LOOPBACK
    """Where rank 0's host is met."""
    port: int | None = None
    """The port to meet at; None: a free one of this host."""
    node_rank: int = 0
    """Which of the nodes this is, when a scheduler starts us on each."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks beside their places."""
    style: OutputStyle = OWN_STYLE
    warnings: tuple[str, ...] = ()
    verify_steps: int = 0
    verify_deep: bool = False

    def met_at(self, address: str, threads: int) -> JobRequest:
        """Return this request for ranks that a scheduler has placed."""
        return replace(self, address=address, threads=threads)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a job and the command to start."""
    parser.add_argument(
        "-np", "-n", "--np", "--num-proc", dest="size", type=int, metavar="N",
        help="how many processes (default: one a core, or all that the hosts take)",
    )  # fmt: skip
    parser.add_argument("--plan", metavar="FILE", help="plan to apply, TOML or JSON (see docs/plan.md)")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="change a key of the plan; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--ranks-per-switch", dest="settings", action="append", type="ranks_per_switch={}".format, metavar="N",
        help="every N ranks are behind one switch and add up before anything crosses (plan: ranks_per_switch)",
    )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", help="where to keep the run (default: runs/TIME-SCRIPT)")
    parser.add_argument(
        "--no-bind", action="store_true", help="do not bind each process to its share of the cores"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="[--] COMMAND",
        help="what to start, e.g. python train.py --lr 0.1",
    )  # fmt: skip


def read_plan(
    path: str | None, settings: Sequence[str], wishes: Mapping[str, PlanWish] | None = None
) -> tuple[Plan, bool]:
    """Return the plan of the command line and whether one was given.

    Order: --set and flags over the plan file over defaults. `wishes` are the keys that flags of horovodrun
    and its configuration file set; two places that say different things are a `ConfigError` naming both, but
    a typed flag goes before the plan file.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = read_mapping(Path(path), error=PlanError)
        Plan.from_mapping(values, where=path)
    chosen: dict[str, Any] = dict(parse_settings(settings, error=PlanError))
    Plan.from_mapping(chosen, where="--set")
    for key, wish in (wishes or {}).items():
        if key in chosen:
            _refuse_contradiction(key, chosen[key], "--set", wish)
        elif key in values and not wish.typed:
            _refuse_contradiction(key, values[key], str(path), wish)
        chosen.setdefault(key, wish.value)
    return Plan.from_mapping({**values, **chosen}, where=path or "--set"), bool(path or chosen)


def _refuse_contradiction(key: str, value: Any, where: str, wish: PlanWish) -> None:
    theirs, ours = (Plan.from_mapping({key: each}, where=where) for each in (value, wish.value))
    if theirs != ours:
        raise ConfigError(
            f"{where} says {key} = {value!r}, {wish.source} says {key} = {wish.value!r}", remedy="drop one of them"
        )


def places_for(
    size: int, *, bind: bool, hosts: Sequence[HostSlots] = (), backend: HostAccess | None = None
) -> tuple[list[RankSpec], int, list[str]]:
    """Return the ranks' places, on this host or on `hosts`, the threads of each, and warnings."""
    cores = available_cores()
    warnings = []
    if size > len(cores):
        warnings.append(f"{size} ranks on {len(cores)} cores: they share cores, and none is bound")
    shares = divide_cores(cores, size) if bind else [()] * size
    threads = max(1, len(cores) // size)
    if not hosts:
        return [RankSpec(rank, size, rank, size, cores=shares[rank]) for rank in range(size)], threads, warnings
    backend = backend or HostAccess()
    return (
        [
            RankSpec(
                seat.rank, size, seat.local_rank, seat.local_size, seat.node_rank, seat.node_count,
                shares[seat.rank], backend.host(seat.host.name), seat.host.name,
                seat.cross_rank, seat.cross_size, seat.host.chosen,
            )
            for seat in assign_ranks(hosts, size)
        ],
        threads,
        warnings,
    )  # fmt: skip


def check_size(size: int | None, hosts: Sequence[HostSlots] = ()) -> int:
    """Return the number of ranks to start; raise `ConfigError` for one that makes no sense."""
    if size is None:
        return sum(host.slots for host in hosts) or len(available_cores())
    if size < 1:
        raise ConfigError(f"-np {size}: expected at least 1")
    if size > MOST_SLOTS:
        raise ConfigError(f"-np {size}: expected at most {MOST_SLOTS} on one host")
    return size


def place_ranks(request: JobRequest, size: int | None, hosts: Sequence[HostSlots], *, bind: bool) -> JobRequest:
    """Return `request` with its ranks placed on `hosts` or, when none are named, on those we have."""
    emulated = read_hosts()
    node = None if emulated else read_node_info()
    if node is not None:
        if hosts:
            raise ConfigError(
                f"hosts were named, and {node.source} says that this is node {node.node_rank} of "
                f"{node.node_count}",
                remedy="leave -H and --hostfile out: the scheduler has chosen the hosts",
            )
        return place_on_node(request, size, node, bind=bind)
    hosts = hosts or [HostSlots(host.name, host.slots) for host in emulated]
    backend = backend_for(hosts, emulated)
    places, threads, warnings = places_for(check_size(size, hosts), bind=bind, hosts=hosts, backend=backend)
    return replace(request, places=places, threads=threads, warnings=tuple(warnings), address=backend.address)


def place_on_node(request: JobRequest, size: int | None, node: NodeInfo, *, bind: bool) -> JobRequest:
    """Return `request` with the ranks of this node of several."""
    cores = available_cores()
    per_node = ranks_per_node(node, size)
    places = node_places(node, per_node, cores, bind=bind)
    warnings = (f"{per_node} ranks on {len(cores)} cores: they share cores, and none is bound",)
    return replace(
        request,
        places=places,
        threads=max(1, len(cores) // per_node),
        warnings=warnings if per_node > len(cores) else (),
        address=node.address,
        port=node.port,
        node_rank=node.node_rank,
    )


def read_request(options: argparse.Namespace, *, verify_steps: int = 0, verify_deep: bool = False) -> JobRequest:
    """Return the job that the options every job has describe."""
    check_size(options.size)
    command = read_command(options.command)
    plan, plan_given = read_plan(options.plan, options.settings)
    request = JobRequest(command, plan, plan_given, verify_steps=verify_steps, verify_deep=verify_deep)
    return place_ranks(request, options.size, (), bind=not options.no_bind)


def describe(request: JobRequest, job: JobSpec) -> dict[str, Any]:
    """Return what would be started, for a dry run."""
    job = replace(job, secret="")
    return {
        "command": request.command,
        "ranks": [
            {"rank": place.rank, "cores": list(place.cores), "environment": rank_environment(place, job)}
            for place in request.places
        ],
    }


def start(
    request: JobRequest, *, label: str, run_dir: str | None, json: bool = False, status: Any = None
) -> tuple[Outcome, Path]:
    """Start a job; return how it ended and its run directory."""
    for warning in request.warnings:
        write_notice(f"warning: {warning}")
    size = request.places[-1].rank + 1
    extra = {"verify_steps": request.verify_steps} if request.verify_steps else {}
    directory = open_run(request, label=label, run_dir=run_dir, size=size, extra=extra)
    with (
        ReservedPort(request.address, request.places[0].host)
        if request.port is None
        else GivenPort(request.address, request.port)
    ) as port:
        job = make_job(request, directory, port.port)
        output = Output(
            directory, size, out=sys.stderr.buffer if json else None, style=request.style,
            first=request.places[0].rank,
        )  # fmt: skip
        supervisor = Supervisor(request.command, request.places, job, output, inherited_environment())
        if status is not None:
            supervisor.status = lambda: status(directory)
        try:
            with passing_on_warnings(lambda: supervisor.rank_processes().values()):
                outcome = supervisor.run()
        finally:
            output.close()
    account_for(outcome, directory)
    return outcome, directory


def open_run(
    request: JobRequest,
    *,
    label: str,
    run_dir: str | None,
    size: int | None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Make the run directory and write down what is about to run. `size` is None when it may change.

    Every node has its own: nodes may share a file system, or not.
    """
    directory = make_run_directory(*_directory_names(request, label=label, run_dir=run_dir))
    problem = write_run(
        directory,
        command=request.command,
        size=size,
        plan=request.plan,
        plan_given=request.plan_given,
        extra=extra or {},
    )
    if problem:
        write_notice(f"warning: {problem}")
    return directory


def planned_job(request: JobRequest, *, label: str, run_dir: str | None) -> JobSpec:
    """Return the job as `start` would make it, with nothing made; its port is not known before, unless given."""
    chosen, label = _directory_names(request, label=label, run_dir=run_dir)
    return make_job(request, Path(chosen or f"runs/TIME-{label}").resolve(), request.port or 0)


def _directory_names(request: JobRequest, *, label: str, run_dir: str | None) -> tuple[str | None, str]:
    if not request.node_rank:
        return run_dir, label
    chosen = None if run_dir is None else f"{run_dir.rstrip('/')}-node{request.node_rank}"
    return chosen, f"{label}-node{request.node_rank}"


def make_job(request: JobRequest, directory: Path, port: int) -> JobSpec:
    """Return what all ranks are told alike."""
    starts_all = not request.places or len(request.places) == request.places[0].size
    return JobSpec(
        secret=secrets.token_hex(32) if starts_all else "",
        address=request.address,
        port=port,
        run_directory=directory,
        plan_file=directory / PLAN if request.plan_given else None,
        threads=request.threads,
        verify_steps=request.verify_steps,
        verify_deep=request.verify_deep,
        frozen_seconds=read_frozen_seconds(FROZEN_SECONDS),
        environment=request.environment,
    )


def account_for(outcome: Outcome, directory: Path) -> None:
    """Say why a job stopped, and leave it in the run directory."""
    stacks = read_stacks(directory)  # by a job that ended in another way, only files without a word
    if outcome.failure is not None:
        failure = replace(outcome.failure, stacks=stacks)
        sys.stderr.write(failure.to_text(directory) + "\n")
        try:
            failure.write(directory)
        except OSError as problem:
            write_notice(f"no failure.json was written: {problem.strerror}")
    elif outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        write_notice(f"stopped all ranks on {name}; logs in {directory / 'logs'}")
