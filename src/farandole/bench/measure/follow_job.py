"""Run a job of ``farandole run`` whose rank 0 reports by lines of JSON: its progress, and its result.

For jobs that may run anywhere, over ssh too: nothing but the output of rank 0 comes back. Imports no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...launch.supervise.process import stopping_with_us

_ROW = re.compile(r"\[0\] (\{.*\})")
_KEPT_LINES = 200

Say = Callable[[str], None]


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
