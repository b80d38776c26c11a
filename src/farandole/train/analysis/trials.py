"""`run_trials`: plans that are really run, one after the other. What goes wrong in a trial is its result.

[Note: a trial's processes] A trial is a ``farandole run`` of its own: on this machine, on the hosts of an
emulation, or on those that the request names. A launcher that is told to end, or killed, ends its ranks; so a
trial that hangs leaves no process behind. Its limit includes the start of its ranks.
"""

from __future__ import annotations

import json
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

from ...core.failures import is_out_of_memory
from ...core.vocabulary.degrees import OTHER_SAMPLES, degrees_of
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import FAILURE
from ...core.vocabulary.units import format_bytes, format_seconds
from ...launch.function_job import start_importing
from ...plan.candidate import Candidate

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
        return PlanTrial(candidate, **asdict(answer))
    if code is None:
        problem = f"took longer than {format_seconds(request.seconds)}"
        return PlanTrial(candidate, problem=problem)
    problem = _failure(run_directory) or _last_line(said) or f"its launcher ended with exit code {code}"
    return PlanTrial(candidate, problem=problem, is_memory=_is_memory(problem))


def _watch(command: Sequence[str], seconds: float) -> tuple[int | None, list[str], TrialSteps | None]:
    """Run `command`; return its exit code, or None if it took too long, its last lines, and rank 0's answer."""
    process = start_importing(command)
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


# What a trial's launcher and its ranks tell each other: the work on the command line, the answer in one line.


WORKER = "farandole.train.analysis.trial_worker"
MARK = "farandole-trial: "
"""Before the answer, in a line of rank 0 on stdout."""


@dataclass(frozen=True)
class TrialWork:
    """What each rank does."""

    model: str
    batch: str
    loss: str | None
    optimizer: str
    steps: int
    warm_up: int
    limit_bytes: int | None
    samples: int
    """Samples of one step of one rank, over all passes."""
    passes: int
    """Backward passes of a step, by the loop: the plan's `accumulate`."""


@dataclass(frozen=True)
class TrialSteps:
    """What rank 0 answers: of the slowest rank."""

    seconds: float
    low_seconds: float
    high_seconds: float
    peak_bytes: int
    """The most of any rank."""
    steps: int


@dataclass(frozen=True)
class TrialsRequest:
    """What all trials have in common."""

    model: str
    """Function without arguments that returns the model, ``module:function`` or ``file.py:function``."""
    batch: str
    """Function of the number of samples, or without arguments: see `analyse`."""
    loss: str | None = None
    optimizer: str = "adamw"
    steps: int = 20
    """Steps that count, after `warm_up` ones."""
    warm_up: int = 4
    seconds: float = 120.0
    """Limit of one trial."""
    limit_bytes: int | None = None
    """Memory of a rank; None: what there is."""
    hosts: str = ""
    """As ``farandole run -H``; empty: this machine, or the hosts of the emulation."""
    options: tuple[str, ...] = ()
    """Further options of ``farandole run``."""
    directory: Path | None = None
    """Where the run directories are kept, as ``trial-1``, ...; None: nowhere."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warm_up", 0), ("seconds", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"trials: {name} = {value}, expected at least {least}")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(f"trials: limit_bytes = {self.limit_bytes}, expected at least 1")


def work_of(candidate: Candidate, request: TrialsRequest) -> TrialWork:
    """Return what each rank does in a trial. Raises `ConfigError` where the samples do not divide."""
    plan = candidate.plan
    shares = degrees_of(plan, candidate.ranks).size_over(OTHER_SAMPLES)
    parts = plan.accumulate * max(1, plan.micro_batches)
    if candidate.global_batch < 1 or candidate.global_batch % (shares * parts):
        raise ConfigError(
            f"global_batch = {candidate.global_batch} does not divide by {shares} shares of {parts} micro-batches",
            remedy=f"take a multiple of {shares * parts}",
        )
    return TrialWork(
        model=request.model,
        batch=request.batch,
        loss=request.loss,
        optimizer=request.optimizer,
        steps=request.steps,
        warm_up=request.warm_up,
        limit_bytes=request.limit_bytes,
        samples=candidate.global_batch // shares,
        passes=plan.accumulate,
    )
