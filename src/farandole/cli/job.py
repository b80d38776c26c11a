"""What `run` and `verify` share: reading the command to start and the plan, and starting the job."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.config import parse_settings, read_mapping
from ..core.errors import ConfigError, PlanError
from ..core.run_files import PLAN
from ..core.spec import Plan
from ..launch.contract import Job, Place, rank_environment
from ..launch.cores import available_cores, divide_cores
from ..launch.hosts import Host, place_on, read_hosts
from ..launch.local import Outcome, Supervisor
from ..launch.output import Output
from ..launch.ports import ReservedPort
from ..launch.run_directory import make_run_directory, write_run

PYTHON_OPTIONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a job and the command to start."""
    parser.add_argument(
        "-np", "-n", "--np", dest="size", type=int, metavar="N",
        help="how many processes (default: one a core)",
    )  # fmt: skip
    parser.add_argument("--plan", metavar="FILE", help="plan to apply, TOML or JSON (see docs/plan.md)")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="change a key of the plan; may be given several times",
    )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", help="where to keep the run (default: runs/TIME-SCRIPT)")
    parser.add_argument(
        "--no-bind", action="store_true", help="do not bind each process to its share of the cores"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND",
        help="what to start, e.g. python train.py --lr 0.1",
    )  # fmt: skip


def read_plan(path: str | None, settings: Sequence[str]) -> tuple[Plan, bool]:
    """Return the plan of the command line and whether one was given: --set over the file over defaults."""
    values: dict[str, Any] = {}
    if path is not None:
        values = read_mapping(Path(path), error=PlanError)
        Plan.from_mapping(values, where=path)
    chosen = parse_settings(settings, error=PlanError)
    Plan.from_mapping(chosen, where="--set")
    return Plan.from_mapping({**values, **chosen}, where=path or "--set"), bool(path or settings)


def read_command(words: Sequence[str]) -> list[str]:
    """Return the command to start; raise `ConfigError` when it cannot be what a person meant."""
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ConfigError("no command was given", remedy="for example: farandole run -np 2 -- python train.py")
    if command[0].endswith(".py"):
        command.insert(0, sys.executable)
    elif command[0] in ("python", "python3") and shutil.which(command[0]) is None:
        command[0] = sys.executable
    if shutil.which(command[0]) is None:
        raise ConfigError(f"command {command[0]!r} was not found", remedy="is it installed, and on the PATH?")
    if Path(command[0]).name.startswith("python"):
        _check_python(command[1:])
    return command


def _check_python(words: Sequence[str]) -> None:
    """Refuse a script that does not exist, cannot be compiled, or has no main, before anything starts."""
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-c", "-m", "-"):
        i += 2 if words[i] in PYTHON_OPTIONS_WITH_VALUE else 1
    if i >= len(words):
        raise ConfigError("no script was given after python", remedy="for example: python train.py")
    if words[i] in ("-c", "-"):
        return
    if words[i] == "-m":
        if i + 1 >= len(words):
            raise ConfigError("no module was given after python -m")
        _check_module(words[i + 1])
        return
    script = Path(words[i])
    if not script.exists():
        near = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
        from ..core.names import nearest

        close = nearest(script.name, near)
        raise ConfigError(f"script {script} does not exist", remedy=f"did you mean {close!r}?" if close else "")
    if script.is_dir():
        if not (script / "__main__.py").exists():
            raise ConfigError(f"{script} is a directory without a __main__.py", remedy="name the script to start")
        return
    if script.suffix == ".py":
        try:
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
        except (SyntaxError, ValueError, UnicodeDecodeError) as problem:
            line = getattr(problem, "lineno", None)
            where = f"{script}:{line}" if line else str(script)
            raise ConfigError(
                f"{where}: {getattr(problem, 'msg', problem)}", remedy="the script is no Python"
            ) from None
        except OSError as problem:
            raise ConfigError(f"cannot read {script}: {problem}") from None


def _check_module(name: str) -> None:
    """Refuse ``-m package`` when the package lies in the working directory and has no main."""
    place = Path(*name.split("."))
    if place.is_dir() and not (place / "__main__.py").exists() and not place.with_suffix(".py").exists():
        raise ConfigError(f"package {name} has no __main__.py", remedy="name the module to start")


def places_for(size: int, *, bind: bool, hosts: Sequence[Host] = ()) -> tuple[list[Place], int, list[str]]:
    """Return the ranks' places, on this host or on `hosts`, the threads of each, and warnings."""
    cores = available_cores()
    warnings = []
    if size > len(cores):
        warnings.append(f"{size} ranks on {len(cores)} cores: they will take turns, and nothing is bound")
    shares = divide_cores(cores, size) if bind else [()] * size
    threads = max(1, len(cores) // size)
    if not hosts:
        return [Place(rank, size, rank, size, cores=shares[rank]) for rank in range(size)], threads, warnings
    seats = place_on(hosts, size)
    names = list(dict.fromkeys(host.name for host, _ in seats))
    crowd = Counter(host.name for host, _ in seats)
    return (
        [
            Place(rank, size, seat, crowd[host.name], names.index(host.name), len(names), shares[rank], host)
            for rank, (host, seat) in enumerate(seats)
        ],
        threads,
        warnings,
    )


def check_size(size: int | None, hosts: Sequence[Host] = ()) -> int:
    """Return the number of ranks to start; raise `ConfigError` for one that makes no sense."""
    if size is None:
        return sum(host.slots for host in hosts) or len(available_cores())
    if size < 1:
        raise ConfigError(f"-np {size}: expected at least 1")
    if size > 4096:
        raise ConfigError(f"-np {size}: expected at most 4096 on one host")
    return size


def describe(command: Sequence[str], places: Sequence[Place], job: Job) -> dict[str, Any]:
    """Return what would be started, for a dry run."""
    return {
        "command": list(command),
        "ranks": [
            {"rank": place.rank, "cores": list(place.cores), "environment": rank_environment(place, job)}
            for place in places
        ],
    }


def start(
    options: argparse.Namespace, *, label: str, verify_steps: int = 0, status: Any = None
) -> tuple[Outcome, Path]:
    """Start the job that `options` describe; return how it ended and its run directory."""
    hosts = read_hosts()
    size = check_size(options.size, hosts)
    command = read_command(options.command)
    plan, plan_given = read_plan(options.plan, options.settings)
    places, threads, warnings = places_for(size, bind=not options.no_bind, hosts=hosts)
    for warning in warnings:
        sys.stderr.write(f"farandole: warning: {warning}\n")
    directory = make_run_directory(options.run_dir, label)
    extra = {"verify_steps": verify_steps} if verify_steps else {}
    write_run(directory, command=command, size=size, plan=plan, plan_given=plan_given, extra=extra)
    with ReservedPort(hosts[0].address if hosts else "127.0.0.1") as port:
        job = Job(
            address=port.address,
            port=port.port,
            run_directory=directory,
            plan_file=directory / PLAN if plan_given else None,
            threads=threads,
            verify_steps=verify_steps,
        )
        output = Output(directory, size, out=sys.stderr.buffer if options.json else None)
        supervisor = Supervisor(command, places, job, output, dict(os.environ))
        if status is not None:
            supervisor.status = lambda: status(directory)
        try:
            outcome = supervisor.run()
        finally:
            output.close()
    if outcome.failure is not None:
        outcome.failure.write(directory)
        sys.stderr.write(outcome.failure.to_text(directory) + "\n")
    elif outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        sys.stderr.write(f"farandole: stopped all ranks on {name}; logs in {directory / 'logs'}\n")
    return outcome, directory


def script_label(words: Sequence[str]) -> str:
    """Return a short name for a run: the script's, without its ending."""
    for word in words:
        if word.endswith(".py"):
            return Path(word).stem
    rest = [word for word in words if not word.startswith("-") and not word.startswith("python")]
    return Path(rest[0]).name if rest else "run"
