"""``farandole plan``: which plan is best for a model on a cluster, before it runs; draws a pipeline's schedule."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.vocabulary.config import parse_settings
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import parse_bytes, read_option
from ...plan.answer import to_json, to_text, why_path
from ...plan.answer_page import pipeline_page
from ...plan.search.result import GOALS, PRECISIONS, SearchRequest, parse_fixed
from ..main import parser
from ..options.files import check_output

_EXAMPLES = """\
  farandole plan train:make_model --batch train:make_batch --cluster cluster.toml --gpus 8
  farandole plan train:make_model --batch train:make_batch --cluster dgx-a100 --gpus 64 \\
      --global-batch 512 --goal throughput --out plan.toml
  farandole plan train:make_model --batch train:make_batch --cluster cluster.toml --gpus 4 \\
      --fix tensor=1 --fix precision=bf16 --allow-lossy --trials 3 --out plan.toml
  farandole plan --profile model.json --cluster 8xa100+hdr-ib --gpus 4096 --json
  farandole plan --draw plan.toml --micro-batches 8 --out schedule.svg
"""
_DRAWING, _SEARCHING = ("micro_batches", "set"), (
    "batch", "cluster", "gpus", "goal", "fix", "allow_lossy", "trials", "hosts", "global_batch", "optimizer",
    "loss", "precision", "memory", "profile", "measure", "effort",
)  # fmt: skip
"""Options of ``--draw``, and of the search."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "plan",
        "Find the best plan of a model on a cluster: how it is divided over ranks, with the time of a step\n"
        "and the memory of a rank, why the others lost, and a file that is applied as it is. The model is\n"
        "made on the meta device. With --draw: draw the schedule of a plan's pipeline.",
        _EXAMPLES,
    )
    made.add_argument(
        "target", nargs="?", metavar="MODULE:FUNCTION",
        help="function without arguments that returns the model; with --draw the plan file",
    )  # fmt: skip
    made.add_argument(
        "--batch", metavar="MODULE:FUNCTION", help="function that returns a batch of the number of samples it gets"
    )
    made.add_argument("--cluster", metavar="FILE|PRESET", help="file of farandole measure, or a preset's name")
    made.add_argument("--gpus", type=int, metavar="N", help="ranks that there are")
    made.add_argument("--goal", metavar="GOAL", help=f"{', '.join(GOALS)} (default: throughput)")
    made.add_argument(
        "--fix", action="append", metavar="KEY=VALUE", help="a key of the plan that is given; several times"
    )
    made.add_argument("--allow-lossy", action="store_true", default=None, help="look at lossy codecs too")
    made.add_argument(
        "--global-batch", type=int, metavar="N",
        help="samples of a step, over all ranks (default: the example batch on each rank)",
    )  # fmt: skip
    made.add_argument("--optimizer", metavar="NAME", help="an optimizer of torch (default: adamw)")
    made.add_argument(
        "--loss", metavar="MODULE:FUNCTION", help="function of outputs and batch (default: the sum of the outputs)"
    )
    made.add_argument(
        "--precision", metavar="LIST",
        help=f"what may be chosen of {', '.join(PRECISIONS)}; it changes results (default: fp32)",
    )  # fmt: skip
    made.add_argument("--memory", metavar="BYTES", help="memory of a rank, such as 24GB (default: the cluster's)")
    made.add_argument("--profile", metavar="FILE", help="a model that was analysed before, instead of functions")
    made.add_argument("--measure", action="store_true", default=None, help="time the model's units here first")
    made.add_argument("--trials", type=int, metavar="K", help="run the best K plans for some steps, rank again")
    made.add_argument("-H", "--hosts", metavar="HOSTS", help="where trials run (default: here)")
    made.add_argument(
        "--effort",
        type=int,
        metavar="N",
        help=f"about how many plans to predict (default: {SearchRequest.effort})",
    )
    made.add_argument("--out", metavar="FILE", help="write the plan there, and why beside it; with --draw an SVG")
    made.add_argument("--draw", action="store_true", help="draw the schedule of a plan's pipeline")
    made.add_argument("--micro-batches", type=int, metavar="N", help="with --draw: instead of the plan's")
    made.add_argument("--set", action="append", metavar="KEY=VALUE", help="with --draw: another value of the plan")
    made.add_argument("--json", action="store_true", help="print everything as JSON on stdout")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 done, 2 bad usage or input, or a model that fits nowhere."""
    options = make_parser().parse_args(arguments)
    _refuse_others(options)
    return _draw(options) if options.draw else _search(options)


def _search(options: argparse.Namespace) -> int:
    wanted = {
        "the model": (
            options.target or options.profile,
            "name its function, module:make_model, or give --profile",
        ),
        "--cluster": (options.cluster, "name a file of farandole measure, or a preset: --cluster dgx-a100"),
        "--gpus": (options.gpus, "say how many ranks there are: --gpus 8"),
    }
    if options.gpus is not None and options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}: expected at least 1")
    missing = [name for name, (value, _) in wanted.items() if value is None]
    if len(missing) == 1:
        raise ConfigError(f"plan: {missing[0]} is missing", remedy=wanted[missing[0]][1])
    if missing:
        example = "farandole plan train:make_model --batch train:make_batch --cluster dgx-a100 --gpus 8"
        said = f"{', '.join(missing[:-1])} and {missing[-1]} are missing"
        raise ConfigError(f"plan: {said}", remedy=f"for example: {example}")
    chosen = {
        "goal": options.goal,
        "global_batch": options.global_batch,
        "loss": options.loss,
        "optimizer": options.optimizer,
        "fix": parse_fixed(options.fix or []),
        "allow_lossy": options.allow_lossy,
        "memory_bytes": None if options.memory is None else read_option("--memory", options.memory, parse_bytes),
        "precisions": None if options.precision is None else tuple(options.precision.split(",")),
        "trials": options.trials,
        "hosts": options.hosts,
        "measure": options.measure,
        "effort": options.effort,
        "out": check_output("--out", options.out),
    }
    _check(options, chosen)
    from ...train.analysis.find_plan import find_plan

    answer = find_plan(
        options.target, options.batch, cluster=options.cluster, ranks=options.gpus, profile=options.profile,
        **{name: value for name, value in chosen.items() if value is not None},
    )  # fmt: skip
    file = why_path(Path(options.out)).name if options.out else "--json"
    print(to_json(answer) if options.json else to_text(answer, file=file), end="\n" if options.json else "")
    if options.out and answer.best is not None:
        write_notice(f"wrote {options.out} and {file}; farandole explain {options.out} --html plan.html draws it")
    return 0 if answer.best is not None else ConfigError.exit_code


def _check(options: argparse.Namespace, chosen: dict[str, Any]) -> None:
    """Refuse what a search cannot be asked for, before torch and the model are loaded."""
    keys = {"goal": "goal", "memory_bytes": "memory_bytes", "precisions": "precisions", "effort": "effort",
            "fix": "fixed", "global_batch": "global_batch"}  # fmt: skip
    given = {key: chosen[name] for name, key in keys.items() if chosen[name] is not None}
    SearchRequest(**{"ranks": options.gpus, "global_batch": max(1, options.gpus), **given})


def _draw(options: argparse.Namespace) -> int:
    values = Plan.read_keys(options.target) if options.target else {}
    values |= parse_settings(options.set or [], error=PlanError)
    page = pipeline_page(Plan.from_mapping(values, where=options.target or "--set"), options.micro_batches or 0)
    if options.out:
        try:
            Path(options.out).write_text(page.to_svg(), encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"plan: cannot write {options.out}: {problem}") from None
    print(json.dumps(page.to_mapping()) if options.json else page.to_text(), end="\n" if options.json else "")
    return 0


def _refuse_others(options: argparse.Namespace) -> None:
    """Refuse options that have no effect, by name."""
    others, why = (_SEARCHING, "has no effect with --draw") if options.draw else (_DRAWING, "is for --draw alone")
    for name in others:
        if getattr(options, name) is not None:
            remedy = "--fix gives a key of the plan" if name == "set" else "leave it out"
            raise ConfigError(f"plan: --{name.replace('_', '-')} {why}", remedy=remedy)
