"""``farandole bench scaling``: its options, and running it."""

from __future__ import annotations

import argparse
import json

from ...bench.scaling.scaling import MODES, WEAK, ScalingPlans, make_cases, read_changes, read_sizes
from ...core.job_plan import read_plan
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ...launch.job.hosts import parse_hosts
from ...launch.job.placement import assign_ranks
from ...launch.start.request import read_command
from ..main import Parser, parser
from ..options.files import check_output
from ..options.job_options import add_plan_options, plan_words

_EXAMPLES = """\
  farandole bench scaling --np 1,2,4 -- python train.py
  farandole bench scaling --np 1,2,4 --mode both --batch 64 -- python train.py --batch-size {batch}
  farandole bench scaling --np 1,2 --set codec=int8 -- python train.py
  farandole bench scaling --np 1,2 --compare codec=int8 -- python train.py
  farandole bench scaling --np 2,4 -H a:2,b:2 --html scaling.html --output scaling.json -- python train.py
"""


def make_scaling_parser() -> Parser:
    """Return the parser of ``bench scaling``."""
    made = parser(
        "bench scaling",
        "Run your own script on several numbers of ranks, round by round: training time, throughput, speedup,\n"
        "efficiency and what is lost to what. Let it train some ten seconds; its warm-up is left out.",
        _EXAMPLES,
    )
    made.usage = "farandole bench scaling --np 1,2,4 [options] -- COMMAND"
    made.add_argument("--np", required=True, metavar="LIST", help="numbers of ranks, for example 1,2,4")
    made.add_argument("-H", "--hosts", metavar="LIST", help="hosts and their slots, as farandole run takes them")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each size (default: 3)")
    made.add_argument(
        "--mode", choices=MODES, default=WEAK,
        help="weak: a rank's batch stays; strong: all ranks share one batch; or both (default: weak)",
    )  # fmt: skip
    made.add_argument(
        "--batch", type=int, metavar="N", help="batch that {batch} in the command stands for, divided when strong"
    )
    add_plan_options(made)
    made.add_argument(
        "--compare", metavar="KEY=VALUE",
        help="run each size of several ranks a second time with this in the plan: before and after, side by side; "
        "several keys in quotes, 'codec=auto lossy=true'",
    )  # fmt: skip
    made.add_argument("--html", metavar="FILE", help="write a page with the curve, too")
    made.add_argument("--output", metavar="FILE", help="write the result as JSON, with every step, too")
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")
    return made


def run_scaling(options: argparse.Namespace) -> int:
    """Run it; return the exit code: 1 when a size failed, 0 otherwise."""
    sizes = read_sizes(options.np)
    if not 1 <= options.rounds <= 1000:
        raise ConfigError(f"--rounds {options.rounds}: expected 1 to 1000")
    if options.batch is not None and options.batch < 1:
        raise ConfigError(f"--batch {options.batch}: expected at least 1")
    if options.command in ([], ["--"]):
        raise ConfigError("no command was given", remedy="for example: --np 1,2 -- python train.py")
    command = read_command(options.command)
    changes = read_changes(options.compare)
    make_cases(command, sizes, options.mode, options.batch, changes)
    if options.hosts is not None:
        assign_ranks(parse_hosts(options.hosts), sizes[-1])
    plans = ScalingPlans(tuple(plan_words(options)), changes)
    read_plan(options.plan, [*options.settings, *changes])
    html, output = check_output("--html", options.html), check_output("--output", options.output)
    if html is not None and output is not None and html.resolve() == output.resolve():
        raise ConfigError(f"--html and --output: both are {html}", remedy="name two files")
    from ...bench.scaling.scaling import bench_scaling
    from ...bench.scaling.table import format_scaling, write_html, write_result

    result = bench_scaling(
        command, sizes=sizes, rounds=options.rounds, mode=options.mode, batch=options.batch, hosts=options.hosts,
        plans=plans, say=write_notice,
    )  # fmt: skip
    print(json.dumps(result) if options.json else format_scaling(result))
    if output is not None:
        write_result(output, json.dumps(result) + "\n")
    if html is not None:
        write_html(result, html)
    return 1 if result["failed"] else 0
