"""``farandole run``: start a script on several processes, watch it, summarise it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..core.units import format_seconds
from ..launch.contract import Job
from ..launch.hosts import read_hosts
from .job import add_job_options, check_size, describe, places_for, read_command, read_plan, script_label, start
from .main import parser

_EXAMPLES = """\
  farandole run -np 4 -- python train.py --lr 0.1
  farandole run -np 2 --set accumulate=4 -- python train.py
  farandole run -np 4 --plan plan.toml --run-dir runs/first -- python train.py
  farandole run -np 4 --dry-run -- python train.py
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("run", "Start a script on several processes, watch it, summarise it.", _EXAMPLES)
    made.add_argument("--baseline", metavar="RUN", help="run of one process to compute the speedup against")
    made.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    made.add_argument("--quiet", action="store_true", help="no progress line and no closing summary")
    add_job_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    if options.dry_run:
        return _dry_run(options)
    from ..observe.progress import latest_progress

    status = None if options.quiet else latest_progress
    outcome, directory = start(options, label=script_label(options.command), status=status)
    _summarise(options, directory, outcome.exit_code, outcome.seconds)
    return outcome.exit_code


def _summarise(options: argparse.Namespace, directory: Path, exit_code: int, seconds: float) -> None:
    from ..observe.summary import summarise, write_summary

    baseline = None if options.baseline is None else Path(options.baseline)
    summary = summarise(directory, baseline=baseline)
    write_summary(directory, summary)
    if options.json:
        result = {"exit_code": exit_code, "run_directory": str(directory), "seconds": round(seconds, 3)}
        print(json.dumps({**result, "summary": summary.to_mapping()}))
    elif not options.quiet and exit_code == 0:
        sys.stdout.flush()
        if summary.steps:
            sys.stderr.write(f"\n{summary.to_text()}\n{'run directory':<24} {directory}\n")
        else:
            sys.stderr.write(f"farandole: done in {format_seconds(seconds)}; logs in {directory / 'logs'}\n")


def _dry_run(options: argparse.Namespace) -> int:
    hosts = read_hosts()
    size = check_size(options.size, hosts)
    command = read_command(options.command)
    plan, _ = read_plan(options.plan, options.settings)
    places, threads, warnings = places_for(size, bind=not options.no_bind, hosts=hosts)
    job = Job(
        hosts[0].address if hosts else "127.0.0.1",
        0,
        Path(options.run_dir or f"runs/TIME-{script_label(options.command)}"),
        threads=threads,
    )
    described = describe(command, places, job)
    for rank in described["ranks"]:
        for name in ("FARANDOLE_PORT", "MASTER_PORT"):
            rank["environment"][name] = "(a free port)"
    if options.json:
        print(json.dumps({**described, "plan": plan.to_mapping(), "warnings": warnings}))
        return 0
    for warning in warnings:
        print(f"# warning: {warning}")
    print("# plan: " + (", ".join(plan.to_toml().split("\n")[:-1])))
    import shlex

    for rank in described["ranks"]:
        cores = ",".join(map(str, rank["cores"])) or "any"
        print(f"# rank {rank['rank']}, cores {cores}")
        variables = " \\\n    ".join(f"{name}={shlex.quote(value)}" for name, value in rank["environment"].items())
        print(f"env {variables} \\\n    {shlex.join(described['command'])}")
    return 0
