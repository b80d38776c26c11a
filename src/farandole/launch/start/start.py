"""Starting a placed job: its run directory, its ranks here or over ssh, and why it stopped.

Also what would be started, and starting on Ray.
"""

from __future__ import annotations

import json
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.env import inherited_environment, read_frozen_seconds, read_typed_command
from ...core.failures import Position, describe, judge, read_positions
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import (
    FAILURE,
    INTERRUPTED,
    PLAN,
    STACKS,
    STALL,
    SavesAccount,
    hide_secrets,
    write_private,
)
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.sync_spec import SyncSpec
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_seconds
from ..job.contract import FROZEN_SECONDS, JobSpec, rank_environment
from ..job.placement import ReservedPort
from ..job.run_directory import make_run_directory, write_run
from ..output import Output
from ..schedulers.ray import RayActors, RayJob, RayRequest, cluster
from ..schedulers.submission import SubmitSpec
from ..supervise.job_loop import Outcome
from ..supervise.ranks import Supervisor
from ..supervise.stacks import read_current_stacks
from .placing import (
    PlacedJob,
    host_commands,
    host_setup,
    variables_there,
    variables_to_send,
)
from .request import JobRequest

if TYPE_CHECKING:
    from ..supervise.failure import Failure

Status = Callable[[Path], str | None]
"""Returns the latest progress of the run in a directory, a line for the user; None: there is none."""


def no_status(directory: Path) -> str | None:
    """Return no progress."""
    return None


def start_job(placed: PlacedJob, *, status: Status = no_status) -> tuple[Outcome, Path]:
    """Start a job, and again as often as is asked for; return how it ended in the end, and its run directory."""
    request = placed.request
    for warning in placed.warnings:
        write_notice(f"warning: {warning}")
    extra: dict[str, Any] = {"verify_steps": request.verify.steps} if request.verify.steps else {}
    start = _start_here
    if placed.over_ssh:
        start, extra = _start_over_ssh, {"hosts": [name for name, _, _ in host_commands(placed)]}
    directory = open_run(request, size=placed.size, node_rank=placed.node_rank, extra=extra)

    def run(placed: PlacedJob, generation: int) -> Outcome:
        return start(placed, directory, generation, status)

    def report(outcome: Outcome, directory: Path, placed: PlacedJob) -> None:
        report_failure(outcome, directory, size=placed.size)

    if request.ending.restarts:
        from .restarts import run_generations

        return run_generations(placed, directory, run, report), directory
    outcome = run(placed, 0)
    report(outcome, directory, placed)
    return outcome, directory


def _start_here(placed: PlacedJob, directory: Path, generation: int, status: Status) -> Outcome:
    request, places = placed.request, placed.places

    def run(port: int, output: Output) -> Outcome:
        job = make_job(placed, directory, port, generation)
        environment = inherited_environment()
        said = partial(status, directory)
        return Supervisor(request.command, places, job, output, environment, status=said).run()

    first = places[0].rank
    if placed.port is not None:  # all nodes know it, and rank 0 opens it
        return _with_output(request, directory, placed.size, partial(run, placed.port), generation, first=first)
    with ReservedPort(placed.address, places[0].host) as held:
        return _with_output(request, directory, placed.size, partial(run, held.port), generation, first=first)


def _start_over_ssh(placed: PlacedJob, directory: Path, generation: int, status: Status) -> Outcome:
    from ..ssh.host import RemoteJob, RemoteJobSpec

    request, job = placed.request, make_job(placed, directory, 0, generation)
    work = RemoteJobSpec(request.command, job, host_setup(request.remote), variables_there(request), request.bind)
    hosts = host_commands(placed)
    said = partial(status, directory)
    return _with_output(
        request, directory, placed.size, lambda output: RemoteJob(hosts, work, output, said).run(), generation
    )


def open_run(
    request: JobRequest, *, size: int | None, node_rank: int = 0, extra: Mapping[str, Any] | None = None
) -> Path:
    """Make the run directory and write down what is about to run. `size` is None when it may change.

    Every node has its own: nodes may share a file system, or not.
    """
    directory = make_run_directory(*_directory_names(request, node_rank))
    typed = read_typed_command() or list(request.typed_command)
    facts = {**({"typed_command": hide_secrets(typed)} if typed else {}), **(extra or {})}
    problem = write_run(directory, command=request.command, size=size, plan=request.plan, extra=facts)
    if problem:
        write_notice(f"warning: {problem}")
    return directory


def planned_directory(placed: PlacedJob) -> Path:
    """Return the run directory as `open_run` would name it, with nothing made."""
    chosen, label = _directory_names(placed.request, placed.node_rank)
    return Path(chosen or f"runs/TIME-{label}").resolve()


def _directory_names(request: JobRequest, node_rank: int) -> tuple[str | None, str]:
    chosen, label = request.run_dir, request.label
    if not node_rank:
        return chosen, label
    return None if chosen is None else f"{chosen.rstrip('/')}-node{node_rank}", f"{label}-node{node_rank}"


def make_job(placed: PlacedJob, directory: Path, port: int, generation: int = 0) -> JobSpec:
    """Return what all ranks get alike."""
    request = placed.request
    starts_all = not placed.places or len(placed.places) == placed.places[0].size
    return JobSpec(
        secret=secrets.token_hex(32) if starts_all else "",
        address=placed.address,
        port=port,
        run_directory=directory,
        plan_file=None if request.plan is None else directory / PLAN,
        threads=placed.threads,
        verify_steps=request.verify.steps,
        verify_deep=request.verify.deep,
        generation=generation,
        outlives_ranks=request.plan is not None and SyncSpec.parse(request.plan.sync).is_server,
        grace_seconds=request.ending.grace_seconds,
        frozen_seconds=read_frozen_seconds(FROZEN_SECONDS),
        environment=request.environment,
    )


def run_recorded(
    request: JobRequest, directory: Path, size: int, run: Callable[[Output], Outcome]
) -> tuple[Outcome, Path]:
    """Run a job of `size` ranks; return how it ended and its run directory.

    `run` gets the output of the ranks. Why the job stopped is printed, and left in the run directory.
    """
    outcome = _with_output(request, directory, size, run)
    report_failure(outcome, directory, size=size)
    return outcome, directory


def _with_output(
    request: JobRequest, directory: Path, size: int, run: Callable[[Output], Outcome], generation: int = 0, *,
    first: int = 0,
) -> Outcome:  # fmt: skip
    out, style = sys.stderr.buffer if request.output_to_stderr else None, request.style
    if generation and style.directory is not None:  # whose files are made anew
        style = replace(style, directory=style.directory / f"generation.{generation}")
    output = Output(directory, size, out=out, style=style, first=first)
    try:
        return run(output)
    finally:
        output.close()


def report_failure(outcome: Outcome, directory: Path, *, size: int | None = None) -> None:
    """Say why a job of `size` ranks (None: not known) stopped, and leave it in the run directory."""
    step = None if outcome.failure is None else outcome.failure.step
    stacks = read_current_stacks(directory, step)  # of a job that ended in another way, only files without a word
    account: Failure | Interruption
    if outcome.failure is not None:
        account, file = replace(outcome.failure, stacks=stacks), FAILURE
    elif outcome.signal is not None:
        account, file = interruption_of(directory, outcome.signal, outcome.positions, size), INTERRUPTED
    else:
        return
    sys.stderr.write(account.to_text(directory) + "\n")
    try:
        account.write(directory)
    except OSError as problem:
        write_notice(f"no {file} was written: {problem.strerror}")


# What would be started, with nothing made: the plan, and each rank's command and environment.


_FOUND = "(found when it starts)"


@dataclass(frozen=True)
class DryRun:
    """A placed job as `start_job` would start it."""

    placed: PlacedJob
    ranks: list[dict[str, Any]]
    """The number, the cores and the variables of each rank."""
    connections: dict[str, list[str]] = field(default_factory=dict)
    """By host over ssh, the command that connects us to it."""
    variables_sent: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        request = self.placed.request
        return {
            "command": request.command, "ranks": self.ranks, "plan": (request.plan or Plan()).to_mapping(),
            "warnings": self.placed.warnings, "connections": self.connections,
            "variables_sent": list(self.variables_sent),
        }  # fmt: skip

    def to_text(self) -> str:
        """Return lines that a shell could run, and comments."""
        request, places = self.placed.request, self.placed.places
        lines = []
        for name, command in self.connections.items():
            count = sum(place.host_name == name for place in places)
            lines.append(f"# host {name}, {count} rank(s): {shlex.join(command)}")
        if self.connections:
            sent = ", ".join(self.variables_sent) or "none"
            lines.append(f"# variables of this environment that hosts are sent: {sent}")
        lines += [f"# warning: {warning}" for warning in self.placed.warnings]
        lines.append("# plan: " + (", ".join((request.plan or Plan()).to_toml().split("\n")[:-1])))
        for rank in self.ranks:
            lines.append(f"# rank {rank['rank']}, cores {','.join(map(str, rank['cores'])) or 'any'}")
            words = [f"{name}={shlex.quote(value)}" for name, value in rank["environment"].items()]
            lines.append("env " + " \\\n    ".join([*words, shlex.join(request.command)]))
        return "\n".join(lines)


def dry_run(placed: PlacedJob) -> DryRun:
    """Return what `start_job` would start. What is found while a job starts is named as such."""
    job = replace(make_job(placed, planned_directory(placed), placed.port or 0), secret="")
    unknown = {} if placed.port is not None else dict.fromkeys(("FARANDOLE_PORT", "MASTER_PORT"), "(a free port)")
    connections, sent = {}, {}
    if placed.over_ssh:
        connections = {name: command for name, _, command in host_commands(placed)}
        sent = variables_there(placed.request)
        unknown |= dict.fromkeys(("FARANDOLE_ADDRESS", "MASTER_ADDR"), _FOUND)
        unknown |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _FOUND)
        names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        unknown |= dict.fromkeys(names, "(a rank's share of its host's cores)")
    ranks = []
    for place in placed.places:
        if placed.over_ssh:
            place = replace(place, interface=_FOUND)  # noqa: PLW2901 - as the host's agent does
        values = rank_environment(place, job, sent if placed.over_ssh else inherited_environment())
        values |= {name: text for name, text in unknown.items() if name in values and name not in job.environment}
        ranks.append({"rank": place.rank, "cores": list(place.cores), "environment": values})
    return DryRun(placed, ranks, connections, tuple(sorted(sent)))


# A job that was ended by a signal to its launcher: which signal, and which ranks waited then.


@dataclass(frozen=True)
class Interruption:
    """How a job stood when its launcher was signalled."""

    signal: int
    positions: tuple[Position, ...]
    """Ranks that did no steps; empty: all went on."""
    is_hanging: bool
    """Whether no rank could have gone on."""
    saves: SavesAccount | None = None
    """None: nothing of the job saves checkpoints."""

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.signal

    def to_text(self, directory: Path) -> str:
        """Return what is said of it: where ranks waited, if any did, and that all have ended."""
        lines = []
        if any(position.kind not in ("pause", "working", "idle") for position in self.positions):
            how = "while hanging: " if self.is_hanging else "while "
            lines.append(f"farandole: interrupted {how}{describe(self.positions, past=True)}")
        name = signal.Signals(self.signal).name
        files = f"logs in {directory / 'logs'}"
        if lines and (directory / STACKS).exists():
            files += f", stacks in {directory / STACKS}"
        if self.saves is not None:
            lines.append(f"farandole: {_describe_saves(self.saves)}")
        lines.append(f"farandole: stopped all ranks on {name}; {files}; exit code {self.exit_code}")
        return "\n".join(lines)

    def write(self, directory: Path) -> None:
        """Leave it in the run directory; raises OSError."""
        values = {
            "signal": signal.Signals(self.signal).name, "exit_code": self.exit_code, "hanging": self.is_hanging,
            "positions": [asdict(position) for position in self.positions],
            "saves": None if self.saves is None else asdict(self.saves),
        }  # fmt: skip
        write_private(directory / INTERRUPTED, json.dumps(values, indent=1) + "\n")


def interruption_of(directory: Path, number: int, positions: Sequence[Position], size: int | None) -> Interruption:
    """Return how a job of `size` ranks (None: not known) stood; `positions`: those at the time of the signal."""
    reported = _reported_hang(directory)
    found = {position.rank: position for position in reported}
    found |= {position.rank: position for position in positions or read_positions(directory)}
    ordered = tuple(found[rank] for rank in sorted(found))
    is_hanging = bool(reported) or (len(ordered) == size and judge(ordered) == "hang")
    return Interruption(number, ordered, is_hanging, SavesAccount.read(directory))


def _describe_saves(saves: SavesAccount) -> str:
    """Return whether the last save is whole, and which checkpoint is."""
    is_whole = saves.whole is not None and saves.begun in (saves.whole, None)
    if saves.whole is None:
        whole = f"no checkpoint of this run is in {saves.directory}"
    else:
        age = format_seconds(max(0.0, time.time() - saves.when_seconds))
        whole = f"the last whole checkpoint is that of step {saves.whole} in {saves.directory}, made {age} ago"
    return whole if is_whole or saves.begun is None else f"the save of step {saves.begun} is not whole; {whole}"


def _reported_hang(directory: Path) -> list[Position]:
    """Return the positions of a hang that a rank reported and that has not ended."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads((directory / STALL).read_text(encoding="utf-8"))
        found = [Position.from_json(json.dumps(each)) for each in values["positions"]]
        return [position for position in found if position is not None]
    return []


# Starting the ranks of a job on Ray.


def start_on_ray(request: JobRequest, spec: SubmitSpec) -> tuple[Outcome, Path]:
    """Run the ranks of `request` on Ray; return how it ended and its run directory."""
    variables = variables_to_send(request)
    if spec.options:
        raise ConfigError(f"--{next(iter(spec.options))} means nothing to --on ray", remedy="leave it out")
    nodes, per_node = spec.shape()
    threads = spec.cpus_per_rank or 1
    needs = RayRequest(nodes * per_node, threads, 0 if spec.gpus_per_node is None else 1)
    with cluster(needs) as ray:
        actors = RayActors(ray, needs)
        try:
            address, port = actors.place()
            directory = open_run(replace(request, label=spec.name), size=needs.size)
            job = make_job(PlacedJob(request, (), threads=threads, address=address), directory, port)
            return run_recorded(
                request, directory, needs.size,
                lambda output: RayJob(actors, request.command, job, output, variables).run(),
            )  # fmt: skip
        finally:
            actors.close()
