"""``farandole bench suite``: each benchmark in a process of its own, their tables in one file of Markdown."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..codecs.table import format_codecs
from ..collectives.collectives import format_collectives
from ..measure.launch_ranks import Say, end
from ..measure.machine import busy_note, machine_facts, machine_line
from ..measure.table import format_markdown
from ..scaling.table import write_result
from ..step.step import format_step
from .entries import SUITES

ENTRY_SECONDS = 3600.0
"""A benchmark that takes longer is stopped and counts as failed."""
_FORMATS: dict[str, Callable[..., str]] = {
    "collectives": format_collectives, "codecs": format_codecs, "step": format_step,
}  # fmt: skip


def run_suite(
    name: str, rate: str, out: Path, *, congestion_control: str | None = None, say: Say
) -> dict[str, Any]:
    """Run the suite `name` over links of `rate`, or the loopback (``none``); write `out` after every benchmark.

    Emulated hosts use `congestion_control`; None: the usual one.

    Returns the results as plain values. One that fails leaves its reason, and the others run all the same.
    """
    facts = machine_facts()
    note = busy_note(facts)
    result: dict[str, Any] = {"machine": facts, "suite": name, "rate": rate, "notes": [note] if note else []}
    result["entries"] = entries = list[dict[str, Any]]()
    for number, entry in enumerate(SUITES[name], start=1):
        words = entry.command(rate)
        if congestion_control is not None and entry.emulates(rate):
            words += ["--congestion-control", congestion_control]
        say(f"{number} of {len(SUITES[name])}: farandole bench {shlex.join(words)}")
        entries.append({"title": entry.title, "command": words, **_run(words)})
        write_result(out, to_markdown(result))
        write_result(numbers_beside(out), json.dumps(result) + "\n")
    return result


def numbers_beside(out: Path) -> Path:
    """Return where the numbers of the page `out` go."""
    return out.with_suffix(".json")


def _run(words: list[str]) -> dict[str, Any]:
    from ...launch.supervise.process import stopping_with_us

    command = [sys.executable, "-m", "farandole", "bench", *words, "--json"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
    )
    with process:
        try:
            out, _ = process.communicate(timeout=ENTRY_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {ENTRY_SECONDS:.0f} s"}
        finally:
            end(process)
    if process.returncode:
        return {"failed": f"exit code {process.returncode}; what it said is on the standard error"}
    return {"result": json.loads(out)}


def to_markdown(result: dict[str, Any]) -> str:
    """Return the page: machine, then each benchmark with its command and table."""
    lines = [f"# Results of the {result['suite']} suite", "", machine_line(result["machine"]), ""]
    lines += [f"Note: {note}." for note in result["notes"]]
    lines += [
        "Medians with 95 % bootstrap intervals; what is compared was interleaved. Columns: docs/bench.md.",
        "",
    ]
    for entry in result["entries"]:
        lines += [f"## {entry['title']}", "", f"`farandole bench {shlex.join(entry['command'])}`", ""]
        lines += [_body(entry).strip(), ""]
    return "\n".join(lines)


def _body(entry: dict[str, Any]) -> str:
    if "failed" in entry:
        return f"No numbers: {entry['failed']}."
    return _FORMATS[entry["command"][0]](entry["result"], table=format_markdown)
