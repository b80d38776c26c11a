"""``farandole tune``: run a script as it is, and find the exchange settings that make its steps shortest."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...core.env import BACKEND, SETTINGS, TUNE, TuneSettings
from ...core.job_plan import read_plan
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.rules import check
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ...launch.start.placing import place_job
from ...launch.start.start import start_job
from ..main import parser
from ..options.host_options import add_cluster_options, read_cluster, read_remote_options
from ..options.job_options import add_backend_option, add_job_options, read_request

_EXAMPLES = """\
  farandole tune -np 2 -- python train.py
  farandole tune -np 8 -H a:4,b:4 --trials 6 -- python train.py
  farandole tune -np 4 --allow-lossy --steps 20000 -- python train.py --lr 0.1
  farandole tune -np 4 --settings bucket_bytes,route --no-cache -- python train.py
  farandole emulate --hosts 2 --rate 200mbit -- farandole tune --budget 0.2 -- python train.py
  farandole run -np 2 --plan runs/TIME-tune-train/tuned.toml -- python train.py

The script runs to its end, and its results are those of farandole run: all settings are exact
unless --allow-lossy is given. docs/plan/planner.md says what is tried, when, and what it costs.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "tune",
        "Run a script as it is, try settings of its exchange of gradients in some of its steps, keep what\n"
        "makes steps shorter, and write the plan that won.",
        _EXAMPLES,
    )
    made.usage = "farandole tune [-np N] [-H HOST:N,...] [options] [--] COMMAND"
    made.add_argument(
        "--allow-lossy",
        action="store_true",
        help="try codecs that lose precision, too (their residual is sent later)",
    )
    made.add_argument(
        "--budget", type=float, default=TuneSettings.budget, metavar="SHARE",
        help="share of the run's steps that may run by a setting on trial (default: 0.02; at least one trial)",
    )  # fmt: skip
    made.add_argument(
        "--trials", type=int, default=TuneSettings.trials, metavar="N", help="most trials (default: 10)"
    )
    made.add_argument(
        "--steps", type=int, metavar="N",
        help="steps of the whole run, for the budget, where the script says nothing by fd.log(total_steps=N)",
    )  # fmt: skip
    made.add_argument(
        "--settings", dest="names", metavar="A,B", default=",".join(SETTINGS),
        help=f"what may change: some of {', '.join(SETTINGS)} (default: all; codec with --allow-lossy)",
    )  # fmt: skip
    made.add_argument(
        "--no-cache", action="store_true", help="start from no earlier run, and keep nothing for a later one"
    )
    add_job_options(made)
    add_backend_option(made)
    add_cluster_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code of the job."""
    options = make_parser().parse_args(arguments)
    names = tuple(name.strip() for name in options.names.split(",") if name.strip())
    if "codec" in names and options.names != ",".join(SETTINGS) and not options.allow_lossy:
        raise ConfigError(
            "--settings codec: all codecs to choose from lose precision",
            remedy="add --allow-lossy, or leave it out",
        )
    settings = TuneSettings(
        names, options.allow_lossy, options.budget, options.trials, options.steps, not options.no_cache
    )
    plan = read_plan(options.plan, options.settings)
    check({**vars(plan or Plan()), "tune": True})  # before anything is started
    request = read_request(options, starter="tune")
    environment = {**request.environment, TUNE: settings.to_text()}
    if options.backend is not None:
        environment[BACKEND] = options.backend
    request = replace(
        request, environment=environment, label=f"tune-{request.label}", hosts=read_cluster(options),
        remote=read_remote_options(options), typed_command=("farandole", "tune", *arguments),
    )  # fmt: skip
    from ...observe.records.progress import latest_progress

    outcome, directory = start_job(place_job(request), status=latest_progress)
    _print(options, outcome.exit_code, directory)
    return outcome.exit_code


def _print(options: argparse.Namespace, exit_code: int, directory: Path) -> None:
    from ...observe.figures.summary import read_tuning, summarise, tuning_page, write_summary
    from ...observe.records.run_reader import read_facts

    found, summary = read_tuning(directory), summarise(directory)
    try:
        write_summary(directory, summary)
    except OSError as problem:
        write_notice(f"the summary was not written into {directory}: {problem.strerror}")
    if options.json:
        result = {"exit_code": exit_code, "run_directory": str(directory), "tune": found}
        print(json.dumps({**result, "summary": summary.to_mapping()}))
        return
    shown = os.path.relpath(directory) if directory.is_relative_to(Path.cwd()) else str(directory)
    command = shlex.join(options.command[1:] if options.command[:1] == ["--"] else options.command)
    typed = read_facts(directory).get("typed_command") or []
    for line in tuning_page(found, shlex.quote(shown), command, typed):
        print(line)
