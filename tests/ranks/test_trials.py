"""Trials of plans: what works is timed, and what fails, hangs or needs too much memory is a result."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate
from farandole.train.analysis.trial_worker import interval_of_median
from farandole.train.analysis.trials import PlanTrial, TrialsRequest, run_trials

_FUNCTIONS = """\
    import time

    import torch
    from torch import nn


    def make_model():
        blocks = [nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64)) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Linear(64, 8))


    def make_batch(samples):
        return torch.randn(samples, 64)


    def fails():
        raise ValueError("no such width")


    def hangs():
        time.sleep(600)


    def make_large(samples):
        return torch.zeros(samples, 4_000_000_000)
"""


def _tried(where: Path, candidate: Candidate, **changes: object) -> PlanTrial:
    file = where / "functions.py"
    file.write_text(textwrap.dedent(_FUNCTIONS))
    names = {
        "model": "make_model",
        "batch": "make_batch",
        **{k: v for k, v in changes.items() if k in ("model", "batch")},
    }
    rest = {key: value for key, value in changes.items() if key not in names}
    request = TrialsRequest(f"{file}:{names['model']}", f"{file}:{names['batch']}", steps=4, warm_up=1, **rest)  # type: ignore[arg-type]
    heard: list[PlanTrial] = []
    found = run_trials([candidate], request, heard=heard.append)
    assert heard == found, "each trial is told"
    return found[0]


def _processes_of(directory: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in text:
            found.append(text)
    return found


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
def test_a_pipeline_is_tried_by_its_plan(tmp_path: Path) -> None:
    plan = Plan(pipeline=2, micro_batches=2)
    trial = _tried(tmp_path, Candidate(plan, ranks=2, global_batch=8), directory=tmp_path / "kept")
    assert trial.works, trial.problem
    assert trial.seconds is not None, "it works"
    assert trial.low_seconds is not None, "it works"
    assert trial.high_seconds is not None, "it works"
    assert 0 < trial.low_seconds <= trial.seconds <= trial.high_seconds, f"an interval: {trial.to_text()}"
    assert trial.steps == 4, "without the first one"
    assert trial.peak_bytes is not None, "memory of a rank"
    assert trial.peak_bytes > 50e6, "Python and torch are in it"
    assert (tmp_path / "kept/trial-1/run/plan.toml").exists(), "the run directory is kept where it was asked for"
    assert not _processes_of(tmp_path), "no process is left"


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("changes", "said", "is_memory"),
    [
        ({"model": "fails"}, "rank 0: .*ValueError: no such width.*functions.py:17", False),
        ({"model": "hangs", "seconds": 10.0}, "took longer than 10 s", False),
        ({"batch": "make_large", "limit_bytes": 4 * 10**9}, "can't allocate memory", True),
    ],
)
def test_what_goes_wrong_is_a_result(
    tmp_path: Path, changes: dict[str, object], said: str, *, is_memory: bool
) -> None:
    trial = _tried(tmp_path, Candidate(Plan(accumulate=2), ranks=1, global_batch=4), **changes)
    assert not trial.works, trial.to_text()
    assert re.search(said, trial.problem), trial.problem
    assert trial.is_memory is is_memory, trial.problem
    assert trial.to_text() == f"failed: {trial.problem}", "one line"
    assert not _processes_of(tmp_path), "no process is left"


def test_what_cannot_be_started_is_a_result_and_wrong_limits_are_errors(tmp_path: Path) -> None:
    trial = _tried(tmp_path, Candidate(Plan(accumulate=2), ranks=2, global_batch=6))
    assert trial.problem.startswith("global_batch = 6 does not divide by 2 shares of 2 micro-batches"), (
        trial.problem
    )
    trial = _tried(tmp_path, Candidate(Plan(tensor=3), ranks=4, global_batch=8))
    assert "tensor 3 needs a multiple of 3 ranks" in trial.problem, trial.problem
    for name, value in (("steps", 0), ("warm_up", -1), ("seconds", float("nan")), ("limit_bytes", 0)):
        with pytest.raises(ConfigError, match=f"trials: {name} = {value}, expected at least"):
            TrialsRequest("a:b", "a:c", **{name: value})  # type: ignore[arg-type]


def test_an_interval_of_a_median_needs_no_distribution() -> None:
    assert interval_of_median([float(n) for n in range(101)]) == (40.0, 61.0), "the 41st to the 62nd of 101"
    assert interval_of_median([2.0]) == (2.0, 2.0), "one alone"
