"""``farandole top``: what the ranks of a run do now, in the terminal."""

from __future__ import annotations

import argparse
import json
import math
import re
import select
import shlex
import shutil
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.vocabulary.errors import ConfigError
from ..main import parser
from ..options.files import NEWEST, run_or_newest

if TYPE_CHECKING:
    from ...observe.figures.live import RunState

_EXAMPLES = """\
  farandole top                                          # the newest run in runs/
  farandole top runs/20260101-120000-train
  farandole top node1:work/runs/20260101-120000-train    # over ssh
  farandole top runs/first --once
  farandole top runs/first --json | jq '.ranks[].step'
"""
_PIPE_COLUMNS = 80
_REMOTE = re.compile(r"(?P<host>\w[\w.@-]*):(?P<path>.+)")  # with a hyphen first ssh would take it for an option


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "top",
        "Show what each rank of a run does now: step, phases, waiting, bytes sent, memory, alarms.\n"
        "Ends with q, Ctrl-C, or the run. Into a pipe it prints once.",
        _EXAMPLES,
    )
    made.add_argument("run", metavar="RUN", nargs="?", help=f"run directory, or HOST:RUN over ssh {NEWEST}")
    made.add_argument("--once", action="store_true", help="print the state and end")
    made.add_argument("--json", action="store_true", help="print the state as JSON on stdout and end")
    made.add_argument("--every", default="1", metavar="S", help="seconds between two looks (default: 1)")
    made.add_argument(
        "--python",
        default="python3",
        metavar="PATH",
        help="Python on the other host (default: python3)",
    )
    made.add_argument("--ssh-command", default="ssh", metavar="CMD", help="command to use instead of ssh")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    every = _read_seconds(options.every)
    there = _REMOTE.fullmatch(options.run or "")
    if there and not Path(options.run).exists():
        return _over_ssh(options, there["host"], there["path"])
    from ...observe.figures.live import read_state

    run = run_or_newest(options.run)
    state = read_state(run)
    if options.json:
        print(json.dumps(state.to_mapping()))
    elif options.once or not sys.stdout.isatty():
        _print(state)
    else:
        _watch(run, every)
    return 0


def _print(state: RunState) -> None:
    from rich.console import Console

    from ...observe.figures.live import render

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(width=columns, highlight=False).print(render(state, columns))


def _watch(run: Path, every_seconds: float) -> None:
    """Draw until q, Ctrl-C, or the end of the run."""
    from rich.console import Console
    from rich.live import Live

    from ...observe.figures.live import read_state, render

    console = Console(highlight=False)
    with _keys() as pressed, Live(console=console, auto_refresh=False, transient=False) as live:
        try:
            while True:
                state = read_state(run)
                live.update(render(state, console.width), refresh=True)
                if state.is_over or pressed(every_seconds) == "q":
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys while inside; give what waits for one, which returns an empty text when none came."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read_key(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""


def _over_ssh(options: argparse.Namespace, host: str, run: str) -> int:
    """Run the same command on the other host; return its exit code."""
    words = [options.python, "-m", "farandole", "top", run, "--every", options.every]
    words += [name for name, typed in (("--once", options.once), ("--json", options.json)) if typed]
    watches = sys.stdout.isatty() and not options.once and not options.json
    ssh = shlex.split(options.ssh_command)
    if not ssh or shutil.which(ssh[0]) is None:
        raise ConfigError(f"--ssh-command {options.ssh_command!r}: no such command")
    return subprocess.call([*ssh, *(["-t"] if watches else []), host, shlex.join(words)])


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise ConfigError(f"--every {text}: expected seconds from 0.1 to 3600")
    return seconds
