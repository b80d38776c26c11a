"""The largest micro-batch by trials: the search, and trials that fail in all ways without harm to this process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.cli.main import run
from farandole.train.analysis import find_micro_batch
from farandole.train.analysis.find_micro_batch import largest_that_fits, micro_batches, run_in_child
from farandole.train.analysis.trial import TrialRequest, TrialResult
from farandole.train.analysis.user_code import zeros_of

HERE = "tests.unit.train.test_find_micro_batch"
PATH = (str(Path(__file__).parents[3]), *sys.path)
MB = 10**6
SECONDS = 100.0


def make_model() -> nn.Module:
    return nn.Linear(25, 25)  # narrow: a trial is to take memory, not time


def make_batch(samples: int) -> torch.Tensor:
    """100 MB a sample, and as much for what comes out."""
    return torch.ones(samples * 1_000_000, 25, dtype=torch.float32)


def killed_at_two(samples: int) -> torch.Tensor:
    if samples == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(samples, 25, dtype=torch.float32)


def faulty(samples: int) -> torch.Tensor:
    return torch.ones(samples, 26, dtype=torch.float32)


def sleeps(samples: int) -> torch.Tensor:
    time.sleep(1000)
    return torch.ones(samples, 25, dtype=torch.float32)


@pytest.mark.parametrize("global_batch", [1, 7, 96, 100])
@pytest.mark.parametrize("ranks", [1, 4])
def test_micro_batches_keep_the_global_batch(global_batch: int, ranks: int) -> None:
    if global_batch % ranks:
        with pytest.raises(fd.ConfigError, match=f"{global_batch} is not divisible by {ranks} ranks"):
            micro_batches(global_batch, ranks)
        return
    sizes = micro_batches(global_batch, ranks)
    assert sizes[0] == 1
    assert sizes[-1] == global_batch // ranks
    for size in sizes:
        assert size * ranks * (global_batch // (size * ranks)) == global_batch, "no sample more or less"


def test_the_search_finds_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in (micro_batches(96, 1), micro_batches(97, 1), micro_batches(1, 1), micro_batches(1024, 2)):
        for limit in sizes:

            def trial(request: TrialRequest, _: float, limit: int = limit) -> TrialResult:
                return TrialResult(request.samples, fits=request.samples <= limit)

            monkeypatch.setattr(find_micro_batch, "run_in_child", trial)
            trials = largest_that_fits(TrialRequest("", 0), sizes, trial_seconds=1)
            tried = [each.samples for each in trials]
            assert max(each.samples for each in trials if each.fits) == limit, f"{limit} of {sizes}"
            assert len(tried) == len(set(tried)), f"no size twice: {tried}"
            assert all(size <= 2 * limit or size == next(s for s in sizes if s > limit) for size in tried), (
                f"never far beyond what fits: {tried}"
            )


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
def test_a_real_limit() -> None:
    request = TrialRequest(f"{HERE}:make_model", 0, f"{HERE}:make_batch", limit_bytes=1500 * MB, path=PATH)
    trials = largest_that_fits(request, micro_batches(8, 1), trial_seconds=SECONDS)
    fits = {trial.samples: trial.fits for trial in trials}
    assert fits[1], "200 MB, beside Python and torch"
    assert not fits.get(8, False), "1600 MB"
    failed = [trial for trial in trials if not trial.fits]
    assert all(trial.is_memory and "allocate memory" in trial.reason for trial in failed), failed
    assert all((trial.peak_bytes or 0) < 1500 * MB for trial in trials if trial.fits), trials


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
def test_a_trial_that_is_killed_does_not_fit() -> None:
    request = TrialRequest(f"{HERE}:make_model", 0, f"{HERE}:killed_at_two", path=PATH)
    trials = largest_that_fits(request, [1, 2], trial_seconds=SECONDS)
    assert [(trial.samples, trial.fits) for trial in trials] == [(1, True), (2, False)], trials
    assert trials[1].reason == "its process was ended by SIGKILL"


@pytest.mark.full("further")
@pytest.mark.timeout(300)
def test_a_trial_that_fails_at_once_is_an_error() -> None:
    request = TrialRequest(f"{HERE}:make_model", 0, f"{HERE}:faulty", path=PATH)
    with pytest.raises(fd.ConfigError, match="shapes cannot be multiplied"):
        largest_that_fits(request, [1, 2], trial_seconds=SECONDS)


@pytest.mark.full("further")
def test_a_trial_that_takes_too_long_is_ended() -> None:
    request = TrialRequest(f"{HERE}:make_model", 1, f"{HERE}:sleeps", path=PATH)
    result = run_in_child(request, 2.0)
    assert not result.fits
    assert result.reason == "took longer than 2 s"


def test_functions_that_another_process_cannot_import() -> None:
    with pytest.raises(fd.ConfigError, match="the function for the model cannot be imported"):
        fd.find_micro_batch(lambda: nn.Linear(1, 1), make_batch, global_batch=4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimiser": "sgd"}, "optimiser is not known; known: optimizer"),
        ({"precision": "fp16"}, "precision = 'fp16', expected one of fp32"),
        ({"trial_seconds": 0}, "trial_seconds = 0.0, expected a number above 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(fd.ConfigError, match=told):
        fd.find_micro_batch(make_model, make_batch, global_batch=4, **options)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--global-batch", "4"], "--find needs batches"),
        (["--input", "1,4"], "--find needs the samples of a step"),
        (["--input", "1,4", "--global-batch", "5", "--np", "2"], "global_batch = 5 is not divisible by 2 ranks"),
        (["--input", "1,4", "--global-batch", "4", "--stage", "3"], "--stage has no effect with --find"),
    ],
)
def test_bad_command_lines(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert run(["estimate", f"{HERE}:make_model", "--find", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_samples_of_a_trial_are_the_first_number_of_a_shape() -> None:
    found = zeros_of(["1,25", "4:int64"], 3)
    assert [(tuple(each.shape), each.dtype) for each in found] == [((3, 25), torch.float32), ((3,), torch.int64)]


@pytest.mark.full("further")
@pytest.mark.timeout(300)
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PATH[0])
    assert "tests" in {path.name for path in Path.cwd().iterdir()}
    words = ["--find", "--input", "1,25", "--global-batch", "3", "--np", "3", "--memory", "4GB"]
    assert run(["estimate", f"{HERE}:make_model", *words]) == 0, capsys.readouterr().err
    heard = capsys.readouterr()
    assert heard.out == "micro-batch 1, accumulate 1, on 3 ranks: 3 samples in a step\n"
    assert "trial: 1 sample fits" in heard.err
    assert HERE in sys.modules
