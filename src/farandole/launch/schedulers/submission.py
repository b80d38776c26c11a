"""What a user asks of a scheduler, and which schedulers there are: one module of this package each.

A scheduler's module has `FORMAT`, what ``-o`` calls that which it renders, and two functions:
``render(spec)`` returns what ``--dry-run`` prints, ``start(spec)`` hands the job in or runs it and returns the
exit code. Ray differs: it starts ranks itself (see `ray`).
"""

from __future__ import annotations

import importlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from ...core.env import inherited_environment
from ...core.vocabulary.errors import ConfigError, LaunchError
from ...core.vocabulary.text import did_you_mean
from ..job.contract import GRACE_SECONDS
from ..job.hosts import MOST_SLOTS
from ..supervise.job_loop import ENDING, handling
from ..supervise.process import stopping_with_us

# Running another starter (srun, mpirun) in our place: its output is ours, signals reach it, its end is ours.


def run_child(command: Sequence[str]) -> int:
    """Run `command` to its end; return its exit code, 128 + signal for a signal.

    SIGINT from a terminal reaches it by itself; sent to us alone it is passed on like the others. It gets
    SIGTERM when we die.
    """
    try:
        child = subprocess.Popen(
            list(command), env=inherited_environment(), stdin=subprocess.DEVNULL,
            preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
        )  # fmt: skip
    except OSError as problem:
        raise LaunchError(f"cannot start {command[0]!r}: {problem}") from None

    # srun and mpirun want SIGINT once, then wait: ours to pass on, unless the terminal did.
    with handling((*ENDING, signal.SIGUSR1), lambda number, _: child.send_signal(number)):
        code = child.wait()
    return 128 - code if code < 0 else code


def need_command(name: str, remedy: str) -> str:
    """Return the path of a command; raise `ConfigError` when there is none."""
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"{name} was not found", remedy=remedy)
    return path


SCHEDULERS = ("slurm", "mpi", "kubernetes", "ray")
MOST_NODES = 65536
_WORD = re.compile(r"[A-Za-z0-9_.,:+@%/=-]+")


class Scheduler(Protocol):
    """What a scheduler's module offers."""

    FORMAT: str

    def render(self, spec: SubmitSpec) -> str:
        """Return what would be handed in or run."""

    def start(self, spec: SubmitSpec) -> int:
        """Hand in or run; return the exit code."""


@dataclass(frozen=True)
class SubmitSpec:
    """A job for a scheduler, as asked for on the line."""

    command: tuple[str, ...]
    run_options: tuple[str, ...] = ()
    """Options of ``farandole run`` that are for the job, not for the scheduler."""
    size: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_rank: int | None = None
    name: str = "run"
    grace_seconds: float = GRACE_SECONDS
    """For ranks to end after SIGTERM; the launcher of each node is told it by `run_options`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What else was typed, by the option's name: queue, priority, partition, image and so on."""

    def shape(self, nodes_there_are: int = 1) -> tuple[int, int]:
        """Return the number of nodes and of ranks on each; raise `ConfigError` when it does not come out even."""
        gpus, nodes, size = self.gpus_per_node, self.nodes, self.size
        for option, value, most in (("--nodes", nodes, MOST_NODES), ("--gpus-per-node", gpus, MOST_SLOTS)):
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{option} {value}: expected 1 to {most}")
        if size is None:
            if gpus is None:
                raise ConfigError("how many ranks?", remedy="give -np, or --gpus-per-node for a rank a GPU")
            return nodes or nodes_there_are, gpus
        if nodes is None:
            nodes = nodes_there_are if gpus is None else -(-size // gpus)
        if size % nodes:
            raise ConfigError(
                f"-np {size} on {nodes} nodes: every node takes the same number of ranks",
                remedy=f"give a multiple of {nodes}",
            )
        per_node = size // nodes
        if gpus is not None and per_node > gpus:
            raise ConfigError(
                f"-np {size} on {nodes} nodes of {gpus} GPUs: {per_node} ranks a node",
                remedy=f"give --nodes {-(-size // gpus)}, or fewer ranks",
            )
        if per_node > MOST_SLOTS:
            raise ConfigError(f"-np {size}: expected at most {MOST_SLOTS} on one host")
        return nodes, per_node

    def inner(self, size: int, program: tuple[str, ...]) -> list[str]:
        """Return the ``farandole run`` of each node."""
        return [*program, "run", "-np", str(size), *self.run_options, "--", *self.command]

    def word(self, option: str) -> str | None:
        """Return what was typed for an option that goes into a scheduler's file; None: nothing.

        Raises `ConfigError` for what could be read as more than one word there.
        """
        value = self.options.get(option)
        if value is not None and not _WORD.fullmatch(value):
            raise ConfigError(f"--{option} {value!r}: expected letters, digits and any of _ . , : + @ % / = -")
        return value

    def only(self, scheduler: str, *known: str) -> None:
        """Raise `ConfigError` for an option that this scheduler has no place for."""
        for option in self.options:
            if option not in known:
                raise ConfigError(
                    f"--{option} means nothing to --on {scheduler}",
                    remedy="it takes " + ", ".join(f"--{name}" for name in known) if known else "leave it out",
                )


def submit(name: str, spec: SubmitSpec, *, output_format: str | None = None, dry_run: bool = False) -> int:
    """Print, submit or run the job at the scheduler `name`, one of `SCHEDULERS` but Ray; return the exit code.

    Raises `ConfigError` for a format that it does not write.
    """
    scheduler = load_scheduler(name)
    if output_format not in (None, scheduler.FORMAT):
        raise ConfigError(
            f"-o {output_format}: --on {name} writes {scheduler.FORMAT}",
            remedy=did_you_mean(str(output_format), [scheduler.FORMAT]) or f"-o {scheduler.FORMAT}",
        )
    if dry_run:
        sys.stdout.write(scheduler.render(spec))
        return 0
    if output_format is not None:
        raise ConfigError("-o says what a dry run prints", remedy="add --dry-run")
    return scheduler.start(spec)


def load_scheduler(name: str) -> Scheduler:
    """Return the module of one of `SCHEDULERS`."""
    return cast(Scheduler, importlib.import_module(f".{name}", __package__))
