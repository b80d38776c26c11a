"""``farandole estimate``: the memory of a training by category, before it is started."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import prod

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean, write_notice
from ...core.vocabulary.units import parse_bytes, read_option
from ...plan.memory import PRECISIONS, RECOMPUTE, STAGES
from ...plan.memory_page import (
    DEGREES,
    MOST_RANKS,
    Choice,
    EstimateRequest,
    MicroBatchRequest,
    format_page,
    rank_counts_of,
)
from ..main import parser

_EXAMPLES = """\
  farandole estimate train:make_model --input 8,128:int64
  farandole estimate train.py:make_model --batch train.py:make_batch --loss train.py:loss --np 16
  farandole estimate train:make_model --input 32,3,224,224 --optimizer sgd-momentum --memory 8GB
  farandole estimate train:make_model --input 8,128:int64 --stage 3 --precision bf16 --ranks 8,64
  farandole estimate train:make_model --input 8,128:int64 --tensor 2 --pipeline 2 --np 64
  farandole estimate train:make_model --find --input 1,128:int64 --global-batch 256 --np 4 \\
      --memory 8GB
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "estimate",
        "Print the memory of one rank by category (weights, gradients, optimizer, activations, temporaries)\n"
        "for every ZeRO stage, precision and recomputation. The model is made on the meta device and run on\n"
        "fake tensors: nothing is allocated, and no rank is started.",
        _EXAMPLES,
    )
    made.add_argument("model", metavar="MODULE:FUNCTION", help="function without arguments that returns the model")
    made.add_argument(
        "--batch", metavar="MODULE:FUNCTION", help="function that returns the batch of a rank, for the model"
    )
    made.add_argument(
        "--input", action="append", default=[], metavar="SHAPE[:TYPE]",
        help="the batch as shapes, one for each argument of the model: 8,128:int64 (default type: float32)",
    )  # fmt: skip
    made.add_argument(
        "--loss", metavar="MODULE:FUNCTION",
        help="function of outputs and batch that returns the loss (default: the sum of the outputs)",
    )  # fmt: skip
    made.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="an optimizer of torch (default: adamw)"
    )
    made.add_argument("--np", type=int, default=8, metavar="N", help="ranks (default: 8)")
    made.add_argument(
        "--ranks", default="", metavar="LIST", help="ranks of the second table (default: 1,2,4,...,1024)"
    )
    made.add_argument(
        "--ranks-per-host", type=int, default=8, metavar="N", help='ranks that "hybrid" shards over (default: 8)'
    )
    made.add_argument("--stage", default="", metavar="LIST", help=f"of {', '.join(STAGES)} (default: all)")
    made.add_argument("--precision", default="", metavar="LIST", help=f"of {', '.join(PRECISIONS)} (default: all)")
    made.add_argument("--recompute", default="", metavar="LIST", help=f"of {', '.join(RECOMPUTE)} (default: all)")
    whats = ("each layer", "the layers among them, as stages", "the experts of each layer", "each sequence")
    for name, what in zip(DEGREES, whats, strict=True):
        made.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"ranks that divide {what} (default: 1)"
        )
    made.add_argument(
        "--memory",
        default="",
        metavar="BYTES",
        help="memory of a rank, such as 8GB: what fits is marked, and a command",
    )
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="whose operations are counted; cuda needs no GPU here (default: cpu)",
    )  # fmt: skip
    made.add_argument(
        "--find", action="store_true",
        help="train two steps on this machine with one size after the other, and print the largest micro-batch "
        "that fits; the function of --batch gets the number of samples",
    )  # fmt: skip
    made.add_argument(
        "--global-batch", type=int, default=0, metavar="N", help="with --find: samples of a step, over all ranks"
    )
    made.add_argument("--json", action="store_true", help="print everything as JSON on stdout")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 done, whatever fits, 2 bad usage or input."""
    options = make_parser().parse_args(arguments)
    choice = Choice(
        stages=_listed(options.stage, STAGES, "--stage"),
        precisions=_listed(options.precision, PRECISIONS, "--precision"),
        recompute=_listed(options.recompute, RECOMPUTE, "--recompute"),
        ranks_per_host=_count(options.ranks_per_host, "--ranks-per-host"),
    )
    ranks = [
        _count(int(each) if each.isdigit() else -1, f"--ranks {options.ranks}") for each in _words(options.ranks)
    ]
    sizes = {name: _count(getattr(options, name), f"--{name}") for name in DEGREES}
    degrees = {name: size for name, size in sizes.items() if size > 1}
    if prod(sizes.values()) > MOST_RANKS:
        raise ConfigError(
            f"{' '.join(f'--{name} {size}' for name, size in degrees.items())}: more than {MOST_RANKS} ranks",
            remedy="give smaller degrees",
        )
    limit_bytes = read_option("--memory", options.memory, parse_bytes) if options.memory else None
    if limit_bytes == 0:
        raise ConfigError("--memory 0: expected more than 0 bytes")
    if options.batch and options.input:
        raise ConfigError("--batch and --input both give the batch", remedy="leave one out")

    if options.find:
        return _find(options, limit_bytes)
    if options.global_batch:
        raise ConfigError("--global-batch is for --find", remedy="add --find, or leave it out")

    from ...train.analysis.analyse import estimate

    result = estimate(
        EstimateRequest(
            model=options.model,
            batch=options.batch,
            inputs=options.input,
            loss=options.loss,
            optimizer=options.optimizer,
            device=options.device,
            choice=choice,
            np=_count(options.np, "--np"),
            ranks=ranks or rank_counts_of(prod(degrees.values())),
            limit_bytes=limit_bytes,
            degrees=degrees,
        )
    )
    print(json.dumps(result.to_mapping()) if options.json else format_page(result))
    return 0


def _find(options: argparse.Namespace, limit_bytes: int | None) -> int:
    """Search by trials, and print the micro-batch with each trial."""
    for name in ("stage", "ranks", *DEGREES):
        if getattr(options, name) not in ("", 1):
            raise ConfigError(f"--{name} has no effect with --find: a trial is one process", remedy="leave it out")
    if not options.batch and not options.input:
        raise ConfigError("--find needs batches", remedy="add --batch module:function, or --input 1,128:int64")
    if not options.global_batch:
        raise ConfigError("--find needs the samples of a step", remedy="add --global-batch 256")
    request = MicroBatchRequest(
        model=options.model,
        batch=options.batch,
        inputs=tuple(options.input),
        loss=options.loss,
        optimizer=options.optimizer,
        device=options.device,
        precision=(_words(options.precision) or PRECISIONS)[0],
        recompute=(_words(options.recompute) or RECOMPUTE)[0],
        global_batch=options.global_batch,
        ranks=_count(options.np, "--np"),
        limit_bytes=limit_bytes,
    )
    from ...train.analysis.find_micro_batch import find_by_names

    result = find_by_names(request, heard=lambda trial: write_notice(f"trial: {trial}"))
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"micro-batch {result['micro_batch']}, accumulate {result['accumulate']}, on {result['ranks']} ranks: "
            f"{options.global_batch} samples in a step"
        )
    return 0


def _words(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _listed(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the chosen of `known`, in its order; all if none is given."""
    words = _words(text)
    for each in words:
        if each not in known:
            raise ConfigError(f"{option} {text}: {each!r} is not known", remedy=did_you_mean(each, known))
    return [each for each in known if each in words or not words]


def _count(number: int, option: str) -> int:
    if number < 1:
        raise ConfigError(f"{option}: expected a number of at least 1")
    return number
