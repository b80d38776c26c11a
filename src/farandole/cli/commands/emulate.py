"""``farandole emulate``: several hosts on this machine, with links as slow as you like."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import (
    format_bytes,
    format_seconds,
    parse_bits_per_second,
    parse_seconds,
    read_option,
)
from ..main import COMMANDS, parser
from ..options.job_options import (
    add_backend_option,
    add_congestion_control,
    add_plan_options,
    add_record_option,
    plan_words,
)

_MOST_LATENCY_SECONDS = 10.0
_EXAMPLES = """\
  farandole emulate --hosts 2 --rate 200mbit -- python train.py
  farandole emulate --hosts 4 --slots 2 --rate 1gbit --rate-between 0,1=50mbit -- python train.py
  farandole emulate --hosts 2 --rate 1gbit --script "30s:100mbit,60s:1gbit" -- python train.py
  farandole emulate --hosts 2 --rate 200mbit --set codec=int8 -- python train.py
  farandole emulate --hosts 2 --rate 200mbit --backend farandole -- python train_with_ddp.py
  farandole emulate --hosts 2 --rate 200mbit -- farandole verify -- python train.py
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "emulate",
        "Make every host a network namespace on one switch, shape every link in both directions, start the\n"
        "command on all hosts (as farandole run does), and count the bytes. Nothing is left behind.\n"
        "Ranks share this machine's cores: links are real, compute is not multiplied.",
        _EXAMPLES,
    )
    made.add_argument("--hosts", type=int, default=2, metavar="N", help="how many hosts (default: 2)")
    made.add_argument("--slots", type=int, default=1, metavar="N", help="processes per host (default: 1)")
    made.add_argument(
        "--rate", metavar="RATE", help="rate of every link, e.g. 200mbit or 1gbit (default: not shaped)"
    )
    made.add_argument(
        "--rate-between", action="append", default=[], metavar="A,B=RATE",
        help="give two hosts a direct link with this rate; may be given several times",
    )  # fmt: skip
    made.add_argument("--latency", metavar="TIME", help="one-way delay between two hosts, e.g. 1ms (needs netem)")
    add_congestion_control(made)
    made.add_argument(
        "--script", default="", metavar="TEXT",
        help='change links while the command runs: "30s:100mbit,60s:1=cut,70s:1=restore"',
    )  # fmt: skip
    add_plan_options(made)
    add_backend_option(made)
    add_record_option(made)
    made.add_argument("--as-horovod", action="store_true", help="as that of farandole run")
    made.add_argument("--quiet", action="store_true", help="no progress line and no closing summary of the job")
    made.add_argument("--run-dir", metavar="DIR", help="where to keep the run, as for farandole run")
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    made.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND",
        help="what to start on the hosts: a script's command, or a farandole command",
    )  # fmt: skip
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    from ...launch.namespaces import (
        Network,
        become_root_here,
        check_shape,
        choose,
        describe_rate,
        has_delay,
        parse_script,
        run_session,
    )

    options = make_parser().parse_args(arguments)
    between = _parse_pairs(options.rate_between)
    check_shape(options.hosts, options.slots, between)
    rate = None if options.rate is None else read_option("--rate", options.rate, parse_bits_per_second)
    latency = 0.0 if options.latency is None else read_option("--latency", options.latency, _parse_latency)
    changes = parse_script(options.script, options.hosts)
    command = _command(
        options.command, plan_words(options), options.backend, options.run_dir, record=options.record,
        quiet=options.quiet, as_horovod=options.as_horovod,
    )  # fmt: skip
    control = options.congestion_control
    choose(control)  # refuse what cannot be had before any host is made
    if os.geteuid() != 0:
        become_root_here()
    if latency and not has_delay():
        raise ConfigError(
            f"--latency {options.latency}: this kernel cannot delay packets",
            remedy="load its module with `modprobe sch_netem`, or leave --latency out",
        )
    with Network(options.hosts, options.slots, rate, between, latency, control) as network:
        write_notice(f"{options.hosts} hosts of {options.slots} slot(s), links {describe_rate(rate)}")
        if network.note:
            write_notice(network.note)
        session = run_session(
            network, command, changes, stdout=sys.stderr.fileno() if options.json else None,
            typed_command=("farandole", "emulate", *arguments), say=write_notice,
        )  # fmt: skip
    if options.json:
        links = [
            {"host": link.host, "interface": link.interface,
             "sent_bytes": link.sent_bytes, "received_bytes": link.received_bytes}
            for link in session.links
        ]  # fmt: skip
        print(json.dumps({"exit_code": session.exit_code, "seconds": round(session.seconds, 3), "links": links}))
    else:
        write_notice(f"{format_seconds(session.seconds)}; bytes that crossed each link:")
        for link in session.links:
            write_notice(
                f"  {link.host:<8} {link.interface:<6} sent {format_bytes(link.sent_bytes):>8}"
                f"   received {format_bytes(link.received_bytes):>8}"
            )
    return session.exit_code


def _command(
    words: Sequence[str], plan: Sequence[str], backend: str | None = None, run_dir: str | None = None,
    *, record: bool = True, quiet: bool = False, as_horovod: bool = False,
) -> list[str]:  # fmt: skip
    """Return what host0 starts: a farandole command as it is, any other through ``farandole run``.

    `plan` are the options of the plan; what a farandole command says itself goes before them. `backend` is that of
    ``farandole run --backend``, `run_dir` that of the jobs with ``--run-dir``, `record` false ``--no-record``,
    `quiet` and `as_horovod` its options of these names.
    """
    of_run = [
        *(["--quiet"] if quiet else []), *(["--as-horovod"] if as_horovod else []),
        *([] if record else ["--no-record"]),
        *([] if backend is None else ["--backend", backend]),
    ]  # fmt: skip
    of_job = [*plan, *([] if run_dir is None else ["--run-dir", run_dir])]
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ConfigError(
            "emulate: no command was given",
            remedy="for example: farandole emulate --hosts 2 --rate 200mbit -- python train.py",
        )
    ourselves = [sys.executable, "-m", "farandole"]
    if command[0] == "farandole":
        if command[1:2] == ["emulate"]:
            raise ConfigError("emulate inside emulate: one network is enough")
        if of_job and command[1:2] not in (["run"], ["verify"], ["tune"]):
            raise ConfigError(
                f"emulate: {of_job[0]} is for a job, and `{' '.join(command[:2])}` starts none with a plan",
                remedy="leave it out, or start farandole run, verify or tune",
            )
        takers = {"--backend": ["run", "tune"], "--as-horovod": ["run", "verify"]}.get(
            " ".join(of_run[:1]), ["run"]
        )
        if of_run and "".join(command[1:2]) not in takers:
            raise ConfigError(
                f"emulate: {of_run[0]} is for farandole run, and `{' '.join(command[:2])}` has no such option",
                remedy="leave it out, or start farandole run",
            )
        return [*ourselves, *command[1:2], *of_job, *of_run, *command[2:]]
    if command[0] in COMMANDS and len(command) > 1:
        raise ConfigError(
            f"emulate: unknown command {command[0]!r}", remedy=f"did you mean: -- farandole {command[0]} ..."
        )
    from ...launch.start.request import read_command

    read_command(command)  # refuse what cannot be started before any network is made
    return [*ourselves, "run", *of_job, *of_run, "--", *command]


def _parse_latency(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds > _MOST_LATENCY_SECONDS:
        raise ConfigError(f"{text!r}: expected at most {_MOST_LATENCY_SECONDS:g} s")
    return seconds


def _parse_pairs(texts: Sequence[str]) -> dict[tuple[int, int], float]:
    between: dict[tuple[int, int], float] = {}
    for text in texts:
        pair, rate = _parse_pair(text)
        if pair in between:
            raise ConfigError(f"--rate-between {text!r}: these hosts have a rate already; give each pair once")
        between[pair] = rate
    return between


def _parse_pair(text: str) -> tuple[tuple[int, int], float]:
    pair, equals, rate = text.partition("=")
    numbers = pair.split(",")
    if not equals or len(numbers) != 2 or not all(number.strip().isdecimal() for number in numbers):
        raise ConfigError(f"--rate-between {text!r}: expected two hosts and a rate, e.g. 0,1=50mbit")
    first, second = sorted(int(number) for number in numbers)
    return (first, second), read_option(f"--rate-between {text!r}:", rate, parse_bits_per_second)
