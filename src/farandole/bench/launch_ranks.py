"""Run a benchmark's ranks on emulated hosts, or on this one, and read what rank 0 found.

Imports no torch: the process that makes the hosts forks, and may have one thread only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.vocabulary import run_files
from ..core.vocabulary.errors import ConfigError, FarandoleError
from ..core.vocabulary.units import format_bits_per_second
from ..launch.supervise.process import stopping_with_us

if TYPE_CHECKING:
    from ..launch.namespaces import LinkChange

Say = Callable[[str], None]
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = tuple(128 + number for number in _ENDING)
"""Exit codes of a run that was told to end, and with it the benchmark."""
_END_SECONDS = 30.0
"""A job that is told to end takes a few seconds at most."""


@dataclass(frozen=True)
class Hosts:
    """Where the ranks are. `bits_per_second` None: all of them on this host, over its loopback."""

    count: int
    slots: int
    bits_per_second: float | None
    congestion_control: str | None = None
    """What TCP uses on emulated hosts. None: see `launch.namespaces`."""

    def __post_init__(self) -> None:
        from ..launch.namespaces import check_shape, choose

        if self.congestion_control is not None and self.loopback:
            raise ConfigError(
                f"--congestion-control {self.congestion_control!r}: nothing is emulated here",
                remedy="give a --rate and two hosts, or leave it out",
            )
        choose(self.congestion_control)
        check_shape(self.count, self.slots, {})
        if self.size < 2:
            raise ConfigError(
                f"--hosts {self.count} --slots {self.slots}: one rank has no other to exchange with",
                remedy="give at least two hosts or two slots",
            )

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.count * self.slots

    @property
    def loopback(self) -> bool:
        """Whether all ranks are on this host and nothing is emulated."""
        return self.bits_per_second is None or self.count == 1

    @property
    def parties(self) -> int:
        """How many share the data as far as links are concerned: hosts, or ranks where there are no links."""
        return self.size if self.loopback else self.count

    def to_text(self) -> str:
        """Say it in a line."""
        if self.loopback or self.bits_per_second is None:
            return f"{self.size} ranks on this host, over its loopback"
        return (
            f"{self.count} hosts of {self.slots} rank(s), links of {format_bits_per_second(self.bits_per_second)}"
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "hosts": 1 if self.loopback else self.count,
            "ranks": self.size,
            "bits_per_second": None if self.loopback else self.bits_per_second,
        }


def run_on_hosts(
    hosts: Hosts, module: str, words: Sequence[str], *, say: Say, changes: Sequence[LinkChange] = ()
) -> dict[str, Any]:
    """Run ``python -m module words --output FILE`` on every rank; return the JSON of FILE.

    `changes` are made to the links meanwhile, of emulated hosts only. What ranks print goes to stderr. Raises
    `FarandoleError` when a rank fails, `LaunchError` where hosts cannot be made. The result says which congestion
    control TCP of the ranks used.
    """
    say(hosts.to_text())
    directory = Path(tempfile.mkdtemp(prefix="farandole-bench-"))
    code = 0
    try:
        output = directory / "result.json"
        command = [sys.executable, "-m", "farandole", "run", "--quiet", "--run-dir", str(directory / "run")]
        command += ["-np", str(hosts.size), "--", sys.executable, "-m", module, *words, "--output", str(output)]
        if hosts.loopback:
            command.append("--loopback")
        code = run_here(command) if hosts.loopback else _run_emulated(hosts, command, changes, say)
        if code or not output.exists():
            problem = FarandoleError(
                f"the ranks of the benchmark failed (exit code {code})", remedy="what they said is above"
            )
            problem.exit_code = code if code > 128 else 1
            raise problem
        result: dict[str, Any] = json.loads(output.read_text())
        facts = json.loads((directory / "run" / run_files.RUN).read_text())  # written where the ranks are
        return {**result, "congestion_control": facts["congestion_control"]}
    finally:
        remove_unless_failed(directory, code)


def remove_unless_failed(directory: Path, code: int) -> None:
    """Remove what a run left, unless it failed by itself: what it said names its logs, which shall be there."""
    if code in (0, *STOPPED):
        shutil.rmtree(directory, ignore_errors=True)


def run_here(command: Sequence[str]) -> int:
    """Run a command that prints to our stderr and ends with us; return its exit code."""
    from ..launch.supervise.process import stopping_with_us

    process = subprocess.Popen(
        list(command),
        stdout=sys.stderr.fileno(),
        preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
    )
    try:
        return process.wait()
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End one of our own commands, if it still runs, so that it leaves nothing behind."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make a signal that ends us raise instead, so that runs are stopped and their directories removed; once.

    A second one, as ``timeout`` sends to the process and then to its group, would cut that short.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    wanted = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    previous = {number: signal.getsignal(number) for number in wanted}
    try:
        for number in wanted:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_emulated(hosts: Hosts, command: Sequence[str], changes: Sequence[LinkChange], say: Say) -> int:
    from ..launch.namespaces import Network, become_root_here, run_session

    if os.geteuid() != 0:
        become_root_here()
    made = Network(hosts.count, hosts.slots, hosts.bits_per_second, congestion_control=hosts.congestion_control)
    with made as network:
        if network.note:
            say(network.note)
        return run_session(network, command, changes, stdout=sys.stderr.fileno(), say=say).exit_code


# Run a job of ``farandole run`` whose rank 0 reports by lines of JSON: its progress, and its result.
#
# For jobs that may run anywhere, over ssh too: nothing but the output of rank 0 comes back. Imports no torch.


_ROW = re.compile(r"\[0\] (\{.*\})")
_KEPT_LINES = 200


class FollowedJob(NamedTuple):
    """How a job ended."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    result: dict[str, Any] | None
    output: list[str]
    """The last lines of what else it printed."""


def follow_job(command: Sequence[str], say: Say, end_seconds: float) -> FollowedJob:
    """Run the job, pass its progress to `say`; end it at `end_seconds` of `time.monotonic`."""
    process = subprocess.Popen(
        list(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
    )  # fmt: skip
    assert process.stderr is not None, "it is a pipe"
    result, output = None, []
    late = threading.Timer(max(0.0, end_seconds - time.monotonic()), process.terminate)
    late.daemon = True
    late.start()
    with process:
        try:
            for line in process.stderr:
                message = read_message(line)
                if message is None:
                    output.append(line.rstrip())
                    del output[:-_KEPT_LINES]
                elif "progress" in message:
                    say(str(message["progress"]))
                elif "result" in message:
                    result = message["result"]
        finally:
            late.cancel()
            if process.poll() is None:
                process.terminate()
            late.join()
    return FollowedJob(process.returncode, result, output)


def read_message(line: str) -> dict[str, Any] | None:
    """Return what rank 0 reports; None for any other line."""
    row = _ROW.fullmatch(line.rstrip())
    if row is None:
        return None
    try:
        message: Any = json.loads(row.group(1))
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.keys() & {"progress", "result"} else None


def account_of(code: int, output: Sequence[str]) -> tuple[str, ...]:
    """Return what the launcher printed of a failure: all from its first line on, or the last lines there are."""
    first = next((i for i, line in enumerate(output) if line.startswith("farandole:") and "failed" in line), None)
    lines = list(output[first:] if first is not None else output[-10:])
    return tuple(plain_line(line) for line in lines) or (
        f"the job ended with exit code {code}, and printed nothing",
    )


def refusal(output: Sequence[str]) -> str:
    """Return why a job was refused: as the launcher says it of the first rank that was, or of its own options."""
    failed = [line for line in output if line.startswith("farandole:") and "failed" in line]
    return plain_line([*failed[:1], *output[-1:], "the job was refused"][0])


def plain_line(line: str) -> str:
    """Return a line of the launcher without its name."""
    return line.removeprefix("farandole: ")
