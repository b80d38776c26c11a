"""``farandole demo``: the whole story on one machine, in a minute.

One process trains a real model, then two train it on the same samples; their curves, times and shares
are laid side by side, the ranks are verified, and a report is written. Everything runs through the
ordinary commands, as a user would run them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.env import inherited_environment
from ..core.vocabulary.errors import FarandoleError
from ..core.vocabulary.run_files import RUN, log_path
from ..core.vocabulary.units import format_rate, format_seconds
from ..launch.job.placement import available_cores
from ..launch.job.run_directory import make_run_directory
from ..launch.supervise.process import stopping_with_us
from ..observe.figures.summary import Summary, summarise, weighted_loss
from ..observe.records.run_reader import read_run
from ..observe.report import write_report
from .launch_ranks import end

STEPS = {"text": 60, "fashion-mnist": 300}
BATCH = {"text": 32, "fashion-mnist": 64}
LIMIT_SECONDS = 900.0


@dataclass
class DemoResult:
    """What the demo found."""

    directory: Path
    alone: Summary
    together: Summary
    largest_loss_difference: float
    """Between the two loss curves, at equal samples."""
    validation_losses: tuple[float, float]
    verification: dict[str, Any]
    report: Path
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 when the ranks verified and the curves agree."""
        return 0 if self.verification.get("passed") and self.curves_agree else 1

    @property
    def curves_agree(self) -> bool:
        """Whether the curves differ by rounding only, which training amplifies slowly."""
        return self.largest_loss_difference < 0.02

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "directory": str(self.directory),
            "one_process": self.alone.to_mapping(),
            "two_processes": self.together.to_mapping(),
            "largest_loss_difference": self.largest_loss_difference,
            "validation_losses": list(self.validation_losses),
            "verification": self.verification,
            "report": str(self.report),
            "seconds": round(self.seconds, 1),
            "notes": self.notes,
        }

    @property
    def text(self) -> str:
        """The comparison as a table, and the verdict."""
        rows = [("", "1 process", "2 processes"), *_rows(self)]
        lines = [f"{name:<26} {one:>14} {two:>14}" for name, one, two in rows]
        return "\n".join([*lines, "", *self._verdict(), *(f"note: {note}" for note in self.notes)])

    def _verdict(self) -> list[str]:
        lines = []
        gain = self.together.comparison
        if gain is not None:
            lines.append(f"2 processes are {gain.speedup:.2f}x as fast as 1 (efficiency {gain.efficiency:.2f}).")
        same = "the same curve" if self.curves_agree else "NOT the same curve"
        lines.append(
            f"At equal samples they trained {same}: losses differ by at most {self.largest_loss_difference:.1e}."
        )
        failed = [check for check in self.verification["checks"] if check["passed"] is False]
        lines += [f"verify: {check['name']}: {check['answer']}" for check in failed]
        if not failed:
            lines.append("verify: the ranks hold the same bits, saw different samples, and the loss moves.")
        lines.append(f"Report: {self.report}")
        return lines


def run_demo(
    dataset: str,
    directory: Path | None,
    *,
    steps: int | None,
    run_directory: str | None,
    say: Callable[[str], None],
) -> DemoResult:
    """Run the demo; `say` gets a line of progress now and then.

    Raises `FarandoleError` (or the `DataError` of the data set) when one of its runs fails.
    """
    begin = time.monotonic()
    home = make_run_directory(run_directory, f"demo-{dataset}")
    (home / RUN).unlink(missing_ok=True)  # no run itself: those below take directories of their own
    count = STEPS[dataset] if steps is None else steps
    script = ["-m", "farandole.bench.demo_train", "--dataset", dataset, "--steps", str(count)]
    script += ["--batch-size", str(BATCH[dataset])]
    if directory is not None:
        script += ["--data", str(directory.resolve())]
    notes = []
    if len(available_cores()) < 2:
        notes.append("this machine has one core: two processes share it, no speedup is to be expected")
    runs, losses = [], []
    for size in (1, 2):
        say(f"{size} process{'es' * (size > 1)}: {count} steps of {BATCH[dataset]} samples, one thread each")
        run = home / f"np{size}"
        _command(["run", "-np", str(size), "--run-dir", str(run), "--json", "--", sys.executable, *script], say)
        runs.append(run)
        losses.append(_validation_loss(run))
    say("verify: 2 processes, 3 steps")
    checked = home / "verify"
    answer = _command(
        ["verify", "-np", "2", "--steps", "3", "--run-dir", str(checked), "--json", "--", sys.executable, *script],
        say,
        accept=(0, 1),
    )
    alone, together = summarise(runs[0]), summarise(runs[1], baseline=runs[0])
    report = write_report(runs[1], home / "report.html", baseline=runs[0])
    return DemoResult(
        directory=home,
        alone=alone,
        together=together,
        largest_loss_difference=_largest_difference(*(_curve(run) for run in runs)),
        validation_losses=(losses[0], losses[1]),
        verification=answer,
        report=report,
        seconds=time.monotonic() - begin,
        notes=notes,
    )


def _command(words: Sequence[str], say: Callable[[str], None], *, accept: Sequence[int] = (0,)) -> dict[str, Any]:
    """Run one of our own commands with one thread a rank; return its JSON, pass on its progress."""
    environment = inherited_environment({"OMP_NUM_THREADS": "1"})
    process = subprocess.Popen(
        [sys.executable, "-m", "farandole", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
    )  # fmt: skip
    assert process.stdout is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    lines = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip())
            if line.startswith("step "):
                say("  " + line.rstrip())
        text = process.stdout.read()
        process.wait(LIMIT_SECONDS)
    finally:
        end(process)
    if process.returncode not in accept:
        errors = [line for line in lines if line.startswith(("farandole:", "  "))] or lines
        raise FarandoleError("\n".join(["a run of the demo failed", *errors]))
    result: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return result


def _validation_loss(run: Path) -> float:
    for line in reversed(log_path(run, 0).read_text(errors="replace").splitlines()):
        if line.startswith('{"steps"'):
            return float(json.loads(line)["validation_loss"])
    return math.nan


def _curve(run: Path) -> list[float]:
    """Return the loss of each step: the mean over the ranks, by samples."""
    by_step: dict[int, list[tuple[float, int]]] = {}
    for timeline in read_run(run).timelines:
        for row in timeline.steps:
            if row.loss is not None:
                by_step.setdefault(row.step, []).append((row.loss, row.samples))
    return [weighted_loss(by_step[step]) for step in sorted(by_step)]


def _largest_difference(one: Sequence[float], two: Sequence[float]) -> float:
    if not one or len(one) != len(two):
        return math.inf
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def _rows(result: DemoResult) -> list[tuple[str, str, str]]:
    both = (result.alone, result.together)

    def row(name: str, show: Callable[[Summary], str]) -> tuple[str, str, str]:
        return name, show(both[0]), show(both[1])

    def share(summary: Summary, name: str) -> str:
        value = None if summary.shares is None else summary.shares[name]
        return "unknown" if value is None else f"{value:.1%}"

    def number(value: float | None, show: Callable[[float], str]) -> str:
        return "unknown" if value is None else show(value)

    return [
        row("loss, last step", lambda s: number(s.last_loss, lambda v: f"{v:.4f}")),
        ("loss, validation", f"{result.validation_losses[0]:.4f}", f"{result.validation_losses[1]:.4f}"),
        row("training time", lambda s: number(s.training_seconds, format_seconds)),
        row("samples/s", lambda s: number(s.samples_per_second, format_rate)),
        row("step, median", lambda s: number(s.step_seconds, format_seconds)),
        row("compute", lambda s: share(s, "compute")),
        row("exposed communication", lambda s: share(s, "communication")),
        row("waiting for others", lambda s: share(s, "waiting")),
        row("data loading", lambda s: share(s, "data")),
    ]
