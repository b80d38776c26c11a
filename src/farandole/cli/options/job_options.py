"""The options that describe a job and its plan, and reading them into a `JobRequest`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.env import BACKENDS
from ...core.job_plan import read_plan, refuse_plan
from ...launch.start.placing import check_size
from ...launch.start.request import JobRequest, read_command, script_label
from .horovod_settings import HorovodSettings


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--plan`` and ``--set``."""
    parser.add_argument("--plan", metavar="FILE", help="plan to apply, TOML or JSON (see docs/reference/plan.md)")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="change a key of the plan; may be given several times",
    )  # fmt: skip


def plan_words(options: argparse.Namespace) -> list[str]:
    """Return the options of the plan again, for a command that this one starts.

    Raises `ConfigError` or `PlanError` for a file or a key that is wrong, before anything is started.
    """
    read_plan(options.plan, options.settings)
    words = [] if options.plan is None else ["--plan", str(Path(options.plan).absolute())]
    return words + [word for setting in options.settings for word in ("--set", setting)]


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--backend``."""
    parser.add_argument(
        "--backend", choices=BACKENDS,
        help="what torch's process groups for CPU tensors are made of where the script asks for gloo, or for no "
        "backend (default: gloo; see docs/reference/backend.md)",
    )  # fmt: skip


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--no-record``."""
    parser.add_argument(
        "--no-record", dest="record", action="store_false",
        help="do not record a script that trains with DistributedDataParallel and does not use Farandole",
    )  # fmt: skip


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a job and the command to start."""
    parser.add_argument(
        "-np", "-n", "--np", "--num-proc", dest="size", type=int, metavar="N",
        help="number of processes (default: one per core, or all slots of the hosts)",
    )  # fmt: skip
    add_plan_options(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="where to keep the run (default: runs/TIME-SCRIPT)")
    parser.add_argument(
        "--no-bind", action="store_true", help="do not bind each process to its share of the cores"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="[--] COMMAND",
        help="what to start, e.g. python train.py --lr 0.1",
    )  # fmt: skip


def read_request(
    options: argparse.Namespace, settings: HorovodSettings | None = None, *, starter: str = "run"
) -> JobRequest:
    """Return the job that the options every job has describe; `settings` are those of horovodrun's flags."""
    settings = settings or HorovodSettings()
    check_size(options.size)
    command = read_command(options.command, starter=starter)
    plan = read_plan(options.plan, options.settings, settings.plan)
    refuse_plan(plan, options.size)  # before ranks start
    return JobRequest(
        command, plan, options.size,
        bind=not options.no_bind, environment=settings.environment, output_to_stderr=options.json,
        label=script_label(options.command), run_dir=options.run_dir,
    )  # fmt: skip


# The option of every command that emulates hosts.


def add_congestion_control(parser: argparse.ArgumentParser) -> None:
    """Add ``--congestion-control``."""
    parser.add_argument(
        "--congestion-control", metavar="NAME",
        help="TCP congestion control of emulated hosts, e.g. bbr (default: cubic, if allowed)",
    )  # fmt: skip
