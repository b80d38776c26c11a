"""``farandole explain``: why a plan was chosen, from the file that the planner wrote beside it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...core.cluster import with_ranks
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ...plan.answer import read_answer, read_inputs, to_json, to_text, why_path
from ...plan.answer_page import write_page
from ...plan.search.result import PlanAnswer
from ..main import parser
from ..options.files import check_output

_EXAMPLES = """\
  farandole explain plan.toml
  farandole explain plan.toml --html plan.html
  farandole explain plan.toml --json
  farandole explain plan.toml --batch-size --critical-batch 2048
"""
_DRAWN = "memory against time, the mesh over the hosts, the schedule, and what a step consists of"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "explain",
        "Print why a plan of farandole plan was chosen, and every kind of plan that lost; or draw it: memory\n"
        "against time, the mesh over the hosts, the schedule, what a step consists of. Reads PLAN.why.json\n"
        "beside PLAN.toml.",
        _EXAMPLES,
    )
    made.add_argument("plan", metavar="PLAN.toml", help="the plan file")
    made.add_argument("--html", metavar="FILE", help="write one HTML page, without references to anything else")
    made.add_argument(
        "--batch-size", action="store_true",
        help="print from which global batch on communication hides with this plan, and what going there costs",
    )  # fmt: skip
    made.add_argument(
        "--critical-batch", type=float, metavar="N",
        help="with --batch-size: samples of the critical batch, as fd.noise_scale measured it",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", help="print everything as JSON on stdout")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 done, 2 bad usage or input."""
    options = make_parser().parse_args(arguments)
    page = check_output("--html", options.html)
    path = Path(options.plan)
    answer = read_answer(path)
    if options.batch_size:
        if page is not None:
            raise ConfigError("--html has no effect with --batch-size", remedy="leave one out")
        return _batch_size(answer, path, options)
    if options.critical_batch is not None:
        raise ConfigError("--critical-batch is for --batch-size", remedy="add --batch-size, or leave it out")
    if page is not None:
        write_page(answer, page, plan_name=path.name)
        write_notice(f"wrote {page}: {_DRAWN}; open it in a browser")
    if options.json:
        print(to_json(answer))
    elif page is None:
        print(to_text(answer, file=why_path(path).name), end="")
    return 0


def _batch_size(answer: PlanAnswer, path: Path, options: argparse.Namespace) -> int:
    """Print which batch the links ask for with the plan that was chosen."""
    if answer.best is None:
        raise ConfigError(f"{path}: there is no plan in it whose batch could grow")
    from ...plan.batch_advice import advise_plan
    from ...plan.batch_advice import to_text as batch_text
    from ...plan.search.result import with_limit

    profile, measured = read_inputs(path)
    cluster = with_limit(with_ranks(measured, answer.request.ranks), answer.limit_bytes)
    advice = advise_plan(
        profile, cluster, answer.best.candidate, critical_batch=options.critical_batch,
        allow_lossy=answer.request.allow_lossy,
    )  # fmt: skip
    print(json.dumps(advice.to_mapping()) if options.json else batch_text(advice))
    return 0
