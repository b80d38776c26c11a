"""`run_trials`: plans that are really run, one after the other. What goes wrong in a trial is its result.

[Note: a trial's processes] A trial is a ``farandole run`` of its own: on this machine, on the hosts of an
emulation, or on those that the request names. A launcher that is told to end, or killed, ends its ranks; so a
trial that hangs leaves no process behind. Its limit includes the start of its ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ...core.environ.env import inherited_environment
from ...core.failures import is_out_of_memory
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import FAILURE
from ...core.vocabulary.units import format_bytes, format_seconds
from ...launch.supervise.process import stopping_with_us
from ...plan.candidate import Candidate
from .contract import MARK, WORKER, TrialsRequest, TrialSteps, work_of

__all__ = ["PlanTrial", "TrialsRequest", "run_trials"]

END_SECONDS = 15.0
"""From telling a launcher to end to killing it; it needs 4 s at most."""
_KEPT_LINES = 60


@dataclass(frozen=True)
class PlanTrial:
    """What became of a plan that was run."""

    candidate: Candidate
    seconds: float | None = None
    """Median of the steps of the slowest rank; None: it did not get there, see `problem`."""
    low_seconds: float | None = None
    high_seconds: float | None = None
    """The interval of that median, with at least 95 % confidence, by order statistics."""
    peak_bytes: int | None = None
    """Most memory of a rank: resident, or of torch's allocator on an accelerator."""
    steps: int = 0
    """Steps that count."""
    problem: str = ""
    """Why there is no time: what the first rank that failed said."""
    is_memory: bool = False
    """Whether memory is the reason, as far as is known."""

    @property
    def works(self) -> bool:
        """Whether the plan ran to its end."""
        return self.seconds is not None

    def to_text(self) -> str:
        """Return one line to be read."""
        if self.seconds is None or self.low_seconds is None or self.high_seconds is None:
            return f"failed: {self.problem}"
        peak = f", {format_bytes(self.peak_bytes)} a rank" if self.peak_bytes else ""
        interval = f"{format_seconds(self.low_seconds)} to {format_seconds(self.high_seconds)}"
        return f"{format_seconds(self.seconds)} a step ({interval}, {self.steps} steps){peak}"


def run_trials(
    candidates: Sequence[Candidate],
    request: TrialsRequest,
    *,
    heard: Callable[[PlanTrial], None] = lambda trial: None,
) -> list[PlanTrial]:
    """Run each of `candidates` for some steps, one after the other, and return what became of them, in order.

    Args:
        candidates: plans with their ranks and samples.
        request: the training, and the limits of a trial.
        heard: told each trial when it ends.

    Nothing that a trial does is an error here: one that fails, hangs or runs out of memory is a `PlanTrial` with
    its `problem`. What ends this process ends the trial.
    """
    trials = []
    for number, candidate in enumerate(candidates, 1):
        with _folder(request.directory, f"trial-{number}") as folder:
            trial = _run(candidate, request, Path(folder))
        trials.append(trial)
        heard(trial)
    return trials


class _folder:  # noqa: N801 - used as a function
    """A folder for a trial, which goes with it unless the user keeps it."""

    def __init__(self, kept: Path | None, name: str) -> None:
        self._temporary = kept is None
        self._path = Path(tempfile.mkdtemp(prefix="farandole-trial-")) if kept is None else kept / name

    def __enter__(self) -> Path:
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path

    def __exit__(self, *_: object) -> None:
        if self._temporary:
            shutil.rmtree(self._path, ignore_errors=True)


def _run(candidate: Candidate, request: TrialsRequest, folder: Path) -> PlanTrial:
    try:
        work = work_of(candidate, request)
    except ConfigError as error:
        return PlanTrial(candidate, problem=str(error))
    plan, run_directory = folder / "plan.toml", folder / "run"
    plan.write_text(candidate.plan.to_toml(), encoding="utf-8")
    shutil.rmtree(run_directory, ignore_errors=True)
    command = [
        sys.executable, "-m", "farandole", "run", "--quiet", "-np", str(candidate.ranks), "--plan", str(plan),
        "--run-dir", str(run_directory), *(["-H", request.hosts] if request.hosts else []), *request.options,
        "--", sys.executable, "-m", WORKER, json.dumps(asdict(work)),
    ]  # fmt: skip
    code, said, answer = _watch(command, request.seconds)
    if answer is not None and code == 0:
        return _result(candidate, answer)
    if code is None:
        problem = f"took longer than {format_seconds(request.seconds)}"
        return PlanTrial(candidate, problem=problem)
    problem = _failure(run_directory) or _last_line(said) or f"its launcher ended with exit code {code}"
    return PlanTrial(candidate, problem=problem, is_memory=_is_memory(problem))


def _result(candidate: Candidate, answer: TrialSteps) -> PlanTrial:
    return PlanTrial(
        candidate,
        seconds=answer.seconds,
        low_seconds=answer.low_seconds,
        high_seconds=answer.high_seconds,
        peak_bytes=answer.peak_bytes,
        steps=answer.steps,
    )


def _watch(command: Sequence[str], seconds: float) -> tuple[int | None, list[str], TrialSteps | None]:
    """Run `command`; return its exit code, or None if it took too long, its last lines, and rank 0's answer."""
    path = [str(Path(entry or ".").resolve()) for entry in sys.path]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env=inherited_environment({"PYTHONPATH": os.pathsep.join(path)}), start_new_session=True,
        preexec_fn=stopping_with_us(),  # noqa: PLW1509 - sets one flag, takes no lock
    )  # fmt: skip
    assert process.stdout is not None, "a pipe"
    assert process.stderr is not None, "a pipe"
    answers: list[TrialSteps] = []
    said: deque[str] = deque(maxlen=_KEPT_LINES)
    pumps = [
        threading.Thread(target=_read, args=(process.stdout, said, answers), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, said, []), daemon=True),
    ]
    for pump in pumps:
        pump.start()
    code: int | None = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end(process)
        for pump in pumps:
            pump.join(END_SECONDS)
        if not any(pump.is_alive() for pump in pumps):  # else something that a rank has started holds the pipes
            process.stdout.close()
            process.stderr.close()
    return code, list(said), answers[-1] if answers else None


def _end(process: subprocess.Popen[str]) -> None:
    """End the launcher, and so its ranks; see [Note: a trial's processes]."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read(source: IO[str], said: deque[str], answers: list[TrialSteps]) -> None:
    for line in source:
        _, found, text = line.partition(MARK)
        if found:
            answers.append(TrialSteps(**json.loads(text)))
        elif line.strip():
            said.append(line.strip())


def _failure(run_directory: Path) -> str:
    """Return what the launcher wrote of the first rank that failed."""
    try:
        failure: dict[str, Any] = json.loads((run_directory / FAILURE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    rank = failure.get("rank")
    cause = str(failure.get("cause", ""))
    return f"rank {rank}: {cause}" if rank is not None else cause


def _last_line(said: Sequence[str]) -> str:
    own = [line for line in said if line.startswith("farandole: ")]
    lines = own or list(said)
    return lines[-1].removeprefix("farandole: ") if lines else ""


def _is_memory(problem: str) -> bool:
    return is_out_of_memory(problem) or "SIGKILL" in problem
