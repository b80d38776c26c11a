"""``farandole bench``: measure exchanges, codecs and training steps, on hosts made of this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...bench.launch_ranks import ending_in_order
from ...bench.machine import machine_facts
from ...bench.scaling import MODES, WEAK, ScalingPlans, make_cases, read_changes, read_sizes
from ...bench.step import MODELS, PRECISIONS
from ...core.job_plan import read_plan
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import write_asked
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import did_you_mean, write_notice
from ...core.vocabulary.units import parse_bits_per_second, parse_bytes
from ...launch.job.hosts import parse_hosts
from ...launch.job.placement import assign_ranks
from ...launch.start.request import read_command
from ..main import Parser, parser
from ..options.files import check_output
from ..options.job_options import add_congestion_control, add_plan_options, plan_words

# ``farandole bench scaling``: its options, and running it.


_SCALING_EXAMPLES = """\
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
        _SCALING_EXAMPLES,
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
    from ...bench.scaling import bench_scaling, format_scaling, write_html

    result = bench_scaling(
        command, sizes=sizes, rounds=options.rounds, mode=options.mode, batch=options.batch, hosts=options.hosts,
        plans=plans, say=write_notice,
    )  # fmt: skip
    print(json.dumps(result) if options.json else format_scaling(result))
    if output is not None:
        write_asked(output, json.dumps(result) + "\n", remedy="choose another")
    if html is not None:
        write_html(result, html)
    return 1 if result["failed"] else 0


if TYPE_CHECKING:
    from ...bench.launch_ranks import Hosts
    from ...core.vocabulary.codec_spec import CodecSpec

_MOST_SAMPLES = 2**20
_ABOUT = """\
Measure, and say how sure it is: medians with 95 % bootstrap intervals, everything interleaved.

benchmarks:
  collectives   all-reduce and the like, by every route, beside the bound of the link
  codecs        speed, size and error of every codec, on gradients of a real model
  step          training steps under several plans, and those of rivals
  scaling       your own script on several numbers of ranks: speedup, efficiency, and why no more"""
_EXAMPLES = """\
  farandole bench collectives --hosts 2 --rate 1gbit
  farandole bench codecs --codecs "int8;topk:0.01"
  farandole bench step --rate 200mbit --contenders "ddp;none;int8"
  farandole bench scaling --np 1,2,4 -- python train.py
  farandole bench collectives --help
"""
_COLLECTIVES = """\
  farandole bench collectives --hosts 2 --rate 1gbit
  farandole bench collectives --hosts 4 --sizes 25MiB --operations all_reduce,reduce_scatter,all_gather
  farandole bench collectives --hosts 1 --slots 2 --sizes 1KiB,1MiB --json
"""
_CODECS = """\
  farandole bench codecs
  farandole bench codecs --codecs int8,sign,none --rounds 20
  farandole bench codecs --codecs "topk:0.01;topk:density=0.1,exact=true" --json
"""
_STEP = """\
  farandole bench step --hosts 2 --rate 200mbit --contenders "ddp;none;bf16;int8"
  farandole bench step --rate 1gbit --contenders "ddp-tuned;none;none+bucket_bytes=4MiB" --rounds 9
  farandole bench step --rate 200mbit --contenders "ddp;none;auto" --set lossy=true
  farandole bench step --hosts 1 --slots 2 --link none --model small --json
  farandole bench step --model resnet50 --batch 4 --precision bf16
"""


def make_parser() -> Parser:
    """Return the parser of the command itself, which has no options of its own."""
    made = parser("bench", _ABOUT, _EXAMPLES)
    made.add_argument(
        "benchmark",
        metavar="BENCHMARK",
        help="collectives, codecs, step or scaling; each has its own --help",
    )
    return made


def make_collectives_parser() -> Parser:
    """Return the parser of ``bench collectives``."""
    made = parser(
        "bench collectives",
        "Reduce and gather tensors by several routes, turn by turn, on emulated hosts; compare the time with\n"
        "the bound of the link (0.956 of its rate) and the kernel's count of bytes with the formula.",
        _COLLECTIVES,
    )
    _add_hosts(made, "1gbit")
    made.add_argument(
        "--sizes",
        default="64KiB,1MiB,25MiB",
        metavar="LIST",
        help="bytes of the tensors (default: 64KiB,1MiB,25MiB)",
    )
    made.add_argument(
        "--routes", default="gloo,connections", metavar="LIST", help="ways to exchange (default: gloo,connections)"
    )
    made.add_argument(
        "--operations", default="all_reduce", metavar="LIST",
        help="of all_reduce, reduce_scatter and all_gather (default: all_reduce)",
    )  # fmt: skip
    _add_rounds(made, 9)
    return made


def make_codecs_parser() -> Parser:
    """Return the parser of ``bench codecs``."""
    made = parser(
        "bench codecs",
        "Encode and decode the gradients of a small language model, on one core (and a GPU where there is\n"
        "one): gigabytes a second of float32 in, bytes sent beside a plain all-reduce, error of one step.",
        _CODECS,
    )
    made.add_argument("--codecs", metavar="LIST", help="codecs, separated by semicolons (default: all)")
    _add_rounds(made, 9)
    return made


def make_step_parser() -> Parser:
    """Return the parser of ``bench step``."""
    made = parser(
        "bench step",
        "Train one model under several plans and by rivals, turn by turn, on emulated hosts.\n"
        "ddp:MB has buckets of MB megabytes; ddp-tuned is the best of ddp:1, ddp:5, ddp:25 and ddp:100.",
        _STEP,
    )
    _add_hosts(made, "200mbit")
    made.add_argument(
        "--contenders", default="ddp;none;bf16;int8", metavar="LIST",
        help="codecs (with +KEY=VALUE of a plan), ddp[:MB], ddp-tuned, ddp-fp16, ddp-powersgd[:RANK], "
        "ddp-nosync; with semicolons (default: ddp;none;bf16;int8)",
    )  # fmt: skip
    _add_rounds(made, 5)
    made.add_argument("--batch", type=int, default=2, metavar="N", help="samples per rank and step (default: 2)")
    made.add_argument(
        "--model", choices=MODELS, default="lm27", metavar="NAME",
        help=f"one of {', '.join(MODELS)} (default: lm27, a language model of 27.4 million parameters)",
    )  # fmt: skip
    made.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="bf16, fp16: by autocast (default: fp32)"
    )
    add_plan_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    name, *rest = [*arguments] or ["--help"]
    if name in BENCHMARKS:
        make, run = BENCHMARKS[name]
        options = make().parse_args(rest)
        options.words = [name, *rest]
        with ending_in_order():
            return run(options)
    options = make_parser().parse_args([name])
    raise ConfigError(
        f"bench: unknown benchmark {options.benchmark!r}", remedy=did_you_mean(options.benchmark, BENCHMARKS)
    )


def _collectives(options: argparse.Namespace) -> int:
    from ...bench.collectives import bench_collectives, check_choices, format_collectives

    sizes = [_named("--sizes", word, parse_bytes) for word in _words(options.sizes)]
    if not sizes:
        raise ConfigError(
            f"--sizes {options.sizes!r}: expected numbers of bytes", remedy="for example: 64KiB,1MiB"
        )
    routes, operations = _words(options.routes), _words(options.operations)
    check_choices(routes, operations, sizes)
    hosts, rounds = _hosts(options), _rounds(options)
    result = {
        **_circumstances(options),
        **bench_collectives(
            hosts, sizes=sizes, routes=routes, operations=operations, rounds=rounds, say=write_notice
        ),
    }
    return _show(options, result, format_collectives, bool(result["rows"]))


def _codecs(options: argparse.Namespace) -> int:
    specs = _specs(options.codecs)
    rounds = _rounds(options)
    from ...bench.codecs import bench_codecs, format_codecs

    result = {**_circumstances(options), **bench_codecs(specs, rounds=rounds, say=write_notice)}
    return _show(options, result, format_codecs, True)


def _step(options: argparse.Namespace) -> int:
    from ...bench.step import bench_step, format_step, read_contenders, settings_of

    settings = settings_of(read_plan(options.plan, options.settings) or Plan())
    names = read_contenders(options.contenders, settings)
    if not 1 <= options.batch <= _MOST_SAMPLES:
        raise ConfigError(f"--batch {options.batch}: expected 1 to {_MOST_SAMPLES} samples a rank")
    hosts, rounds = _hosts(options), _rounds(options)
    result = {
        **_circumstances(options),
        **bench_step(
            hosts,
            contenders=names,
            rounds=rounds,
            batch=options.batch,
            model=options.model,
            precision=options.precision,
            settings=settings,
            say=write_notice,
        ),
    }
    return _show(options, result, format_step, bool(result["rows"]))


BENCHMARKS: dict[str, tuple[Callable[[], Parser], Callable[[argparse.Namespace], int]]] = {
    "collectives": (make_collectives_parser, _collectives),
    "codecs": (make_codecs_parser, _codecs),
    "step": (make_step_parser, _step),
    "scaling": (make_scaling_parser, run_scaling),
}
"""How to read each benchmark's options, and how to run it."""


def _add_hosts(made: Parser, rate: str) -> None:
    made.add_argument("--hosts", type=int, default=2, metavar="N", help="how many hosts (default: 2)")
    made.add_argument("--slots", type=int, default=1, metavar="N", help="ranks per host (default: 1)")
    made.add_argument(
        "--rate", "--link", default=rate, metavar="RATE",
        help=f"rate of every link; none, or --hosts 1: this host's loopback (default: {rate})",
    )  # fmt: skip
    add_congestion_control(made)


def _add_rounds(made: Parser, rounds: int) -> None:
    made.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"measurements of each (default: {rounds})"
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def _hosts(options: argparse.Namespace) -> Hosts:
    from ...bench.launch_ranks import Hosts

    rate = None if options.rate == "none" else _named("--rate", options.rate, parse_bits_per_second)
    return Hosts(options.hosts, options.slots, rate, options.congestion_control)


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a result was made on and by; asked before the work, whose load is not meant."""
    return {"machine": machine_facts(), "command": ["farandole", "bench", *options.words]}


def _rounds(options: argparse.Namespace) -> int:
    if not 1 <= options.rounds <= 10_000:
        raise ConfigError(f"--rounds {options.rounds}: expected 1 to 10000")
    rounds: int = options.rounds
    return rounds


def _specs(text: str | None) -> list[CodecSpec]:
    """Read ``int8;topk:0.01``, or ``int8,sign`` where no codec has options with commas."""
    from ...core.vocabulary.codec_spec import AUTO, OPTIONS, CodecSpec

    if text is None:
        return [CodecSpec.parse(name) for name in OPTIONS]
    words = text.split(";" if ";" in text or "=" in text else ",")
    specs = [CodecSpec.parse(word, where="--codecs") for word in words if word.strip()]
    if not specs:
        raise ConfigError(f"--codecs {text!r}: expected names", remedy=f"known: {', '.join(OPTIONS)}")
    twice = next((spec for i, spec in enumerate(specs) if spec in specs[:i]), None)
    if twice is not None:
        raise ConfigError(f"--codecs: {twice.to_text()!r} is given twice")
    if any(spec.name == AUTO for spec in specs):
        raise ConfigError(f"--codecs {AUTO}: it chooses among codecs", remedy="name those to be measured")
    return specs


def _named(option: str, text: str, parse: Callable[[str], Any]) -> Any:
    """Return what `parse` makes of an option's value; an error names the option."""
    try:
        return parse(text)
    except ConfigError as problem:
        raise ConfigError(f"{option} {problem.message}", remedy=problem.remedy) from None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _show(
    options: argparse.Namespace, result: dict[str, Any], to_text: Callable[[dict[str, Any]], str], measured: bool
) -> int:
    print(json.dumps(result) if options.json else to_text(result))
    return 0 if measured else 1
