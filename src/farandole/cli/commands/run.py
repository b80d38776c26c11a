"""``farandole run``: start a script on several processes, watch it, summarise it. Takes horovodrun's line too."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...core.environ.env import inherited_environment
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.units import format_seconds
from ...launch.elastic.options import ElasticOptions
from ...launch.job.contract import RankSpec
from ...launch.job.host_list import HostSlots
from ...launch.output.style import OutputStyle, PrefixName
from ...version import VERSION
from ..jobs.job import (
    JobRequest,
    add_job_options,
    check_size,
    describe,
    place_ranks,
    planned_job,
    read_plan,
    start,
)
from ..jobs.schedulers import add_scheduler_options, hand_over, refuse_without_scheduler, run_on_ray
from ..jobs.ssh_job import (
    RemoteOptions,
    chosen_variables,
    host_commands,
    reached_by_ssh,
    remote_request,
    start_remote,
    variables_there,
)
from ..main import parser
from ..options.command import read_command, script_label
from ..options.horovod_flags import add_horovod_flags
from ..options.horovod_settings import HorovodSettings, add_general_flags, read_settings
from ..options.host_options import (
    add_elastic_options,
    add_host_options,
    read_elastic_options,
    read_host_list,
    read_remote_options,
)

_EXAMPLES = """\
  farandole run -np 4 -- python train.py --lr 0.1
  farandole run -np 2 --set accumulate=4 -- python train.py
  farandole run -np 4 --plan plan.toml --run-dir runs/first -- python train.py
  farandole run -np 4 --dry-run -- python train.py
  farandole run -np 8 -H a:4,b:4 -- python train.py
  farandole run -H a:4,b:4 --prelude 'source env.sh' -x MY_TOKEN -- python train.py
  farandole run -np 4 --as-horovod python train_with_horovod.py
  farandole run --on slurm -np 8 --nodes 2 --time 2:00:00 -- python train.py
  farandole run -H localhost:2 --fusion-threshold-mb 32 --timeline-filename t.json python train.py

Options of horovodrun keep their meaning; docs/launch.md says what each does here.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("run", "Start a script on several processes, watch it, summarise it.", _EXAMPLES)
    made.usage = "farandole run [-np N] [-H HOST:N,...] [options] [--] COMMAND"
    made.add_argument("--baseline", metavar="RUN", help="run of one process to compute the speedup against")
    made.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    made.add_argument("--quiet", action="store_true", help="no progress line and no closing summary")
    made.add_argument("--verbose", action="store_true", help="say which rank starts where, and what it is told")
    made.add_argument(
        "--as-horovod", action="store_true", help="let the script's `import horovod` find farandole.horovod"
    )
    made.add_argument(
        "-v", "--version", action="version", version=f"farandole {VERSION}", help="print the version"
    )
    made.add_argument("-cb", "--check-build", action="store_true", help="print what there is, and start nothing")
    add_job_options(made)
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
        from ..options.check_build import check_build

        print(check_build())
        return 0
    if options.on not in (None, "ray"):
        return hand_over(options, arguments)
    settings = read_settings(options)
    if not options.quiet and not options.json:
        for note in settings.notes:
            write_notice(note)
    if options.on == "ray":
        outcome, directory = run_on_ray(options, _read_request(options, settings), arguments)
        _summarise(options, directory, outcome.exit_code, outcome.seconds)
        return outcome.exit_code
    refuse_without_scheduler(options)
    hosts = read_host_list(options)
    elastic = read_elastic_options(options)
    request = _read_request(options, settings)
    if elastic is not None:
        return _run_elastic(options, request, elastic, hosts)
    remote = read_remote_options(options)
    if reached_by_ssh(hosts, remote):
        return _run_remote(options, request, remote, hosts)
    if remote != RemoteOptions(bind=remote.bind) and not options.quiet:
        write_notice("options about ssh have no effect: no host is reached by ssh")
    if remote.variables:
        request = replace(request, environment={**chosen_variables(remote), **request.environment})
    request = place_ranks(request, options.size, hosts, bind=not options.no_bind)
    if options.dry_run:
        return _dry_run(request, options)
    if options.verbose:
        for line in _places(request):
            write_notice(line)
    outcome, directory = start(
        request, label=script_label(options.command), run_dir=options.run_dir, json=options.json,
        status=None if options.quiet else _latest_progress,
    )  # fmt: skip
    _summarise(options, directory, outcome.exit_code, outcome.seconds)
    return outcome.exit_code


def _run_elastic(
    options: argparse.Namespace, request: JobRequest, elastic: ElasticOptions, hosts: Sequence[HostSlots]
) -> int:
    from ..jobs.elastic_job import elastic_hosts, elastic_request, start_elastic

    if options.dry_run:
        raise ConfigError("--dry-run: who runs where in an elastic job is not known before it runs")
    outcome, directory = start_elastic(
        elastic_request(request, elastic, options.size), elastic, elastic_hosts(hosts, elastic, options.size),
        read_remote_options(options), label=script_label(options.command), run_dir=options.run_dir,
        json=options.json, status=None if options.quiet else _latest_progress,
    )  # fmt: skip
    _summarise(options, directory, outcome.exit_code, outcome.seconds)
    return outcome.exit_code


def _run_remote(
    options: argparse.Namespace, request: JobRequest, remote: RemoteOptions, hosts: Sequence[HostSlots]
) -> int:
    request = remote_request(request, remote, options.size, hosts)
    if options.dry_run:
        return _dry_run(request, options, host_commands(request, remote, hosts))
    if options.verbose:
        for line in _places(request):
            write_notice(line)
    outcome, directory = start_remote(
        request, remote, hosts, label=script_label(options.command), run_dir=options.run_dir,
        json_output=options.json, status=None if options.quiet else _latest_progress,
    )  # fmt: skip
    _summarise(options, directory, outcome.exit_code, outcome.seconds)
    return outcome.exit_code


def _latest_progress(directory: Path) -> str | None:
    from ...observe.record.progress import latest_progress

    return latest_progress(directory)


def _read_request(options: argparse.Namespace, settings: HorovodSettings) -> JobRequest:
    """Return the job that the options describe, its ranks not yet placed."""
    check_size(options.size)
    environment = dict(settings.environment)
    if options.as_horovod:
        from ...horovod.as_horovod import horovod_environment

        environment |= horovod_environment(inherited_environment())
    command = read_command(options.command)
    plan, plan_given = read_plan(options.plan, options.settings, settings.plan)
    directory = None if options.output_filename is None else Path(options.output_filename)
    prefix: PrefixName = "horovod with time" if options.prefix_output_with_timestamp else options.output_prefix
    return JobRequest(command, plan, plan_given, environment=environment, style=OutputStyle(prefix, directory))


def _places(request: JobRequest) -> list[str]:
    """Return a line a rank, and one of the variables all are told."""
    lines = [
        f"rank {place.rank} on {place.host_name or 'this machine'}, local rank {place.local_rank} of "
        f"{place.local_size}, cores {','.join(map(str, place.cores)) or 'any'}"
        for place in request.places
    ]
    told = " ".join(f"{name}={shlex.quote(value)}" for name, value in request.environment.items())
    return [*lines, f"all are told: {told}"] if told else lines


def _summarise(options: argparse.Namespace, directory: Path, exit_code: int, seconds: float) -> None:
    from ...observe.figures.summary import summarise, write_summary

    baseline = None if options.baseline is None else Path(options.baseline)
    summary = summarise(directory, baseline=baseline)
    try:
        write_summary(directory, summary)
    except OSError as problem:
        write_notice(f"the summary was not written into {directory}: {problem.strerror}")
    if options.json:
        result = {"exit_code": exit_code, "run_directory": str(directory), "seconds": round(seconds, 3)}
        print(json.dumps({**result, "summary": summary.to_mapping()}))
    elif not options.quiet and exit_code == 0:
        sys.stdout.flush()
        if summary.steps:
            sys.stderr.write(f"\n{summary.to_text()}\n{'run directory':<24} {directory}\n")
        else:
            write_notice(f"done in {format_seconds(seconds)}; logs in {directory / 'logs'}")


def _dry_run(
    request: JobRequest,
    options: argparse.Namespace,
    connections: Sequence[tuple[str, list[RankSpec], list[str]]] = (),
) -> int:
    described = describe(
        request, planned_job(request, label=script_label(options.command), run_dir=options.run_dir)
    )
    sent = sorted(variables_there(request, read_remote_options(options))) if connections else []
    for rank in described["ranks"]:
        if connections:
            for name in ("FARANDOLE_ADDRESS", "MASTER_ADDR"):
                rank["environment"][name] = "(found when it starts)"
            if "OMP_NUM_THREADS" in rank["environment"]:
                rank["environment"]["OMP_NUM_THREADS"] = "(a rank's share of its host's cores)"
            rank["environment"].pop("GLOO_SOCKET_IFNAME", None)
        if request.port is None:
            for name in ("FARANDOLE_PORT", "MASTER_PORT"):
                rank["environment"][name] = "(a free port)"
    if options.json:
        print(json.dumps({**described, "plan": request.plan.to_mapping(), "warnings": request.warnings,
                          "connections": {name: command for name, _, command in connections},
                          "variables_sent": sent}))  # fmt: skip
        return 0
    for name, places, command in connections:
        print(f"# host {name}, {len(places)} rank(s): {shlex.join(command)}")
    if connections:
        print(f"# variables of this environment that hosts are sent: {', '.join(sent) or 'none'}")
    for warning in request.warnings:
        print(f"# warning: {warning}")
    print("# plan: " + (", ".join(request.plan.to_toml().split("\n")[:-1])))
    for rank in described["ranks"]:
        cores = ",".join(map(str, rank["cores"])) or "any"
        print(f"# rank {rank['rank']}, cores {cores}")
        variables = " \\\n    ".join(f"{name}={shlex.quote(value)}" for name, value in rank["environment"].items())
        print(f"env {variables} \\\n    {shlex.join(described['command'])}")
    return 0
