"""``farandole simulate``: a plan on more ranks than there are: scaling, slow ranks, failures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...core.cluster import Cluster
from ...core.cluster_presets import find_cluster
from ...core.vocabulary.config import parse_settings
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.run_files import write_private
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import parse_bytes, parse_seconds, read_option
from ...plan.answer import cluster_path, profile_path
from ...plan.profile import ModelProfile, read_profile
from ...plan.scaling import (
    MODES,
    RESTART_SECONDS,
    SAVE_SECONDS,
    FailureModel,
    ScaleRequest,
    parse_every,
    parse_sizes,
    parse_slow_ranks,
)
from ..main import parser
from ..options.files import check_output

_EXAMPLES = """\
  farandole simulate plan.toml --gpus 8..16384
  farandole simulate plan.toml --cluster dgx-a100 --profile model.json --gpus 64..4096 \\
      --slow-rank 3:1.5 --fail-every 3h/4096 --html scaling.html
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "simulate",
        "Predict how a plan scales, with slow ranks, failures and slow data, and how often to save. Nothing\n"
        "runs: figures follow from plan, cluster and profile.",
        _EXAMPLES,
    )
    made.add_argument("plan", nargs="?", metavar="PLAN.toml", help="the plan (default: one of --set alone)")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of the plan")
    made.add_argument("--cluster", metavar="FILE|PRESET", help="default: what farandole plan left beside the plan")
    made.add_argument("--profile", metavar="FILE", help="of the model (default: beside the plan)")
    made.add_argument(
        "--gpus", default="", metavar="SIZES", help="numbers of ranks: 64, 8,16,48 or 8..16384 (its doubles)"
    )
    made.add_argument(
        "--global-batch", type=int, default=0, metavar="N",
        help="samples of a step on the smallest size (default: as the plan was predicted, else by the profile)",
    )  # fmt: skip
    made.add_argument(
        "--scaling", choices=(*MODES, "both"), default="both",
        help="weak: the samples of a rank stay; strong: the global batch stays (default: both)",
    )  # fmt: skip
    _add_faults(made)
    made.add_argument("--html", metavar="FILE", help="draw it: one HTML page")
    made.add_argument("--json", action="store_true", help="print everything as JSON on stdout")
    return made


def _add_faults(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--slow-rank", action="append", default=[], metavar="RANK:FACTOR", help="computes so many times as long"
    )
    made.add_argument(
        "--fail-every", default="", metavar="TIME[/RANKS]",
        help="3h: the job fails so often, at every size; 3h/4096: so many ranks together; 900h/rank: each rank",
    )  # fmt: skip
    made.add_argument(
        "--checkpoint-every", default="", metavar="TIME", help="training between checkpoints (default: the best)"
    )
    made.add_argument(
        "--checkpoint-seconds", type=float, metavar="S",
        help="for which a checkpoint stops training (default: 30, an assumption)",
    )  # fmt: skip
    made.add_argument(
        "--restart",
        default="",
        metavar="TIME",
        help="from a failure to training again (default: 5m, an assumption)",
    )
    made.add_argument(
        "--loader-workers", type=int, default=1, metavar="N", help="of a rank, at the cluster's loader speed"
    )
    made.add_argument(
        "--storage-rate", default="", metavar="BYTES", help="a second, that all ranks together read: 10GB"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 done, 2 bad usage or input."""
    options = make_parser().parse_args(arguments)
    from ...plan.cost.predict import predict
    from ...plan.scaling import simulate_scale
    from ...plan.scaling_page import to_html, to_mapping, to_text

    plan, cluster, profile, sizes = _read(options)
    request = _request(options, plan, profile, sizes)
    html = check_output("--html", options.html)
    answer = simulate_scale(profile, cluster, request, predict)
    if html is not None:
        try:
            write_private(html, to_html(answer))
        except OSError as problem:
            raise ConfigError(f"--html: cannot write {html}: {problem.strerror or problem}") from None
        write_notice(f"written to {html}")
    print(json.dumps(to_mapping(answer)) if options.json else to_text(answer))
    return 0


def _read(options: argparse.Namespace) -> tuple[Plan, Cluster, ModelProfile, tuple[int, ...]]:
    values = Plan.read_keys(options.plan) if options.plan else {}
    if not options.gpus:
        raise ConfigError("simulate: no number of ranks was given", remedy="add --gpus 8..1024")
    cluster_file, profile_file = (_beside(options, name) for name in ("cluster", "profile"))
    sizes = parse_sizes(options.gpus)
    values |= parse_settings(options.set, error=PlanError)
    plan = Plan.from_mapping(values, where=options.plan or "--set")
    is_preset = "/" not in cluster_file and not Path(cluster_file).suffix and not Path(cluster_file).is_file()
    cluster = find_cluster(cluster_file, sizes[-1]) if is_preset else find_cluster(cluster_file)
    return plan, cluster, read_profile(profile_file), sizes


def _beside(options: argparse.Namespace, name: str) -> str:
    """Return what an option names, else the file that `farandole plan --out` wrote beside the plan."""
    given: str | None = getattr(options, name)
    if given is not None:
        return given
    if options.plan is None:
        raise ConfigError(f"simulate: no --{name} was given", remedy="see: farandole simulate --help")
    path = {"cluster": cluster_path, "profile": profile_path}[name](Path(options.plan))
    if not path.is_file():
        raise ConfigError(
            f"simulate: no --{name} was given, and there is no {path}",
            remedy=f"give --{name}, or a plan of: farandole plan --out",
        )
    return str(path)


def _request(
    options: argparse.Namespace, plan: Plan, profile: ModelProfile, sizes: tuple[int, ...]
) -> ScaleRequest:
    from ...plan.scaling import usual_batch

    if options.global_batch < 0:
        raise ConfigError(f"--global-batch {options.global_batch}: expected at least 1 sample")
    return ScaleRequest(
        plan,
        sizes,
        options.global_batch or usual_batch(plan, profile, sizes[0]),
        modes=MODES if options.scaling == "both" else (options.scaling,),
        slow_ranks=parse_slow_ranks(options.slow_rank),
        failures=_failures(options),
        loader_workers=options.loader_workers,
        storage_bytes_per_second=float(read_option("--storage-rate", options.storage_rate, parse_bytes))
        if options.storage_rate
        else None,
    )


def _failures(options: argparse.Namespace) -> FailureModel | None:
    given = [name for name in ("checkpoint_every", "checkpoint_seconds", "restart") if getattr(options, name)]
    if not options.fail_every:
        if given:
            option = given[0].replace("_", "-")
            raise ConfigError(f"--{option} is for --fail-every", remedy="add --fail-every 3h, or leave it out")
        return None
    every, ranks = parse_every(options.fail_every)
    return FailureModel(
        every,
        ranks,
        read_option("--restart", options.restart, parse_seconds) if options.restart else RESTART_SECONDS,
        SAVE_SECONDS if options.checkpoint_seconds is None else options.checkpoint_seconds,
        read_option("--checkpoint-every", options.checkpoint_every, parse_seconds)
        if options.checkpoint_every
        else None,
    )
