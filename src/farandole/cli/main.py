"""``farandole COMMAND``: find the sub-command, run it, and end with its exit code.

Exit codes: 0 done, 1 the job failed, 2 bad usage or input, 3 over the limit of ``--fail-over``,
128 + signal on signals.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..core.vocabulary.errors import ConfigError, FarandoleError
from ..core.vocabulary.text import did_you_mean, plain, write_notice
from ..version import VERSION

COMMANDS = {
    "demo": "train a real model on 1 and 2 processes here, compare, write a report",
    "run": "start a script on several processes, watch it, summarise it",
    "verify": "run a script for a few steps and check ranks, samples, gradients and loss",
    "tune": "run it while trying settings of its exchange, keep what is faster, write the plan",
    "doctor": "check hosts and the links between them; print the fix of each fault",
    "test": "prove that hosts train together: a real job of a minute, PASSED or FAILED",
    "emulate": "run it on several hosts made of this machine, over links as slow as you like",
    "measure": "measure what devices, links, codecs and disks give, for the planner",
    "plan": "find the best plan of a model on a cluster, with reasons, before it is started",
    "explain": "print or draw why a plan was chosen: time, memory, and what every other kind lacks",
    "simulate": "predict how a plan scales: step, efficiency, failures, how often to save",
    "estimate": "print the memory of a training by category for every ZeRO stage, before it is started",
    "bench": "measure exchanges, codecs and training steps over links as slow as you like",
    "top": "show what the ranks of a run do now, in the terminal",
    "report": "write the HTML report of a run",
    "diagnose": "show where a run's time goes, what each fault costs, and the fix",
    "compare": "say what changed between two runs, and whether it is more than noise",
    "export": "write a run in the formats of other tools: Perfetto, TensorBoard, Prometheus, ...",
    "checkpoint": "list, verify, export, convert or prune checkpoints",
    "timeline": "make one timeline of those of all ranks",
}

_MODULES = {"test": "cluster_test"}
"""Modules of commands that have another name: pytest would collect this one."""

_GONE = {
    "import": "record the training itself: farandole run, or farandole.record(model, optimizer)",
    "simulate --noise": "leave it out: farandole plan --measure times how the model varies, for predictions",
    "simulate --noise-from": "leave it out: farandole plan --measure times how the model varies, for predictions",
    "simulate --tail": "leave it out with --noise",
    "simulate --slow-link": "give the tier of the cluster file the figures of its slowest link",
    "simulate --run-dir": "record a real run: farandole run, or farandole emulate over slow links",
    "simulate --steps": "leave it out with --run-dir",
    "export horovod": "export it --to chrome; farandole run --timeline-filename FILE writes Horovod's",
    "--ranks-per-switch": "leave it out: route = hierarchical adds up inside each host first",
}
"""Commands and options that this version has no more, and what does their work."""

WITH_A_PLAN = ("run", "verify", "tune", "emulate", "bench step", "bench scaling")
"""Commands with ``--set`` and ``--plan``."""

_USAGE = """\
usage: farandole COMMAND [options]

Train models on many machines as fast as the network allows, and say why when it can't.

commands:
{commands}

examples:
  farandole demo
  farandole run -np 4 -- python train.py --lr 0.1
  farandole verify -np 2 -- python train.py
  farandole COMMAND --help
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are `ConfigError`, with the nearest known option."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        remedy = f"see: {self.prog} --help"
        for said, meant in (("invalid int value:", "a whole number"), ("invalid float value:", "a number")):
            message = message.replace(said, f"expected {meant}, got")
        words = message.removeprefix("unrecognized arguments: ").split() if "unrecognized" in message else []
        unknown, command = words[0] if words else "", self.prog.removeprefix("farandole ")
        option = unknown.partition("=")[0]
        if gone := _GONE.get(f"{command} {option}", _GONE.get(option, "")):
            message, remedy = f"{option} is gone", gone
        elif unknown.startswith("-"):
            message = f"unknown option {unknown}"
            known = [name for name in self._option_string_actions if len(name) > 2]
            remedy = f"{did_you_mean(option, known)} (see: {self.prog} --help)"
            if option in ("--set", "--plan"):
                remedy = f"commands that take a plan: {', '.join(WITH_A_PLAN)}"
        raise ConfigError(f"{command}: {message}", remedy=remedy)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is none of the choices, with the nearest one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as problem:
            close = did_you_mean(str(value), map(str, action.choices or ()))
            command = self.prog.removeprefix("farandole ")
            raise ConfigError(
                f"{command}: argument {problem.argument_name}: invalid choice: {value!r}",
                remedy=_GONE.get(f"{command} {value}", f"{close} (see: {self.prog} --help)"),
            ) from None

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse ``--option=--``, of which older Pythons make an empty list whatever the option takes."""
        if action.option_strings and "--" in arg_strings:
            raise argparse.ArgumentError(action, "expected a value, got '--'")
        return super()._get_values(action, arg_strings)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Leave out abbreviations: `allow_abbrev` does not speak of ``-c`` for ``-cb``, which has one hyphen."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if option_string.startswith(each[1])]


def parser(command: str, description: str, examples: str) -> Parser:
    """Return the parser of one sub-command; `examples` end its help."""
    return Parser(
        prog=f"farandole {command}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    try:
        return _run(list(arguments))
    except FarandoleError as error:
        write_notice(plain(str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; keep Python from complaining at its own exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def load_command(command: str) -> Any:
    """Return the module of one of `COMMANDS`."""
    return importlib.import_module(f"farandole.cli.commands.{_MODULES.get(command, command)}")


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        listing = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
        sys.stdout.write(_USAGE.format(commands=listing))
        return 0
    if any("\0" in word for word in arguments):
        # Never typed, but handed over by programs; every call of the system would refuse it in words of its own.
        raise ConfigError("a word of the command line holds a NUL character", remedy="leave it out")
    command, *rest = arguments
    if command in ("--version", "-V", "version"):
        sys.stdout.write(f"farandole {VERSION}\n")
        return 0
    if command in _GONE:
        raise ConfigError(f"farandole {command} is gone", remedy=_GONE[command])
    if command not in COMMANDS:
        kind = "option" if command.startswith("-") else "command"
        raise ConfigError(f"unknown {kind} {command!r}", remedy=did_you_mean(command, COMMANDS))
    code: int = load_command(command).main(rest)
    return code
