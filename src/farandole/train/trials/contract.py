"""What a trial's launcher and its ranks tell each other: the work on the command line, the answer in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...core.vocabulary.degrees import OTHER_SAMPLES, degrees_of
from ...core.vocabulary.errors import ConfigError
from ...plan.candidate import Candidate

WORKER = "farandole.train.trials.worker"
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
