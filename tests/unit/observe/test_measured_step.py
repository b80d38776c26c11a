"""The batch that a run's link asks for: predicted from one run, true in another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.cli.main import run as command
from farandole.core.step_model import MeasuredStep
from farandole.core.vocabulary.errors import ConfigError
from farandole.observe.diagnose import measured_step
from farandole.observe.figures.summary import summarise
from farandole.plan.batch_advice import advise_run
from tests.unit.observe.runs import make_run
from tests.unit.observe.synthetic import Machine, write_run

SLOW = Machine(ranks=2, steps=40, bytes_per_second=200e6, noise=0.0)
"""32 MB in a step at 200 MB/s: 160 ms, behind 60 ms of backward."""


def with_batch(factor: float) -> Machine:
    """The same machine with `factor` times the batch: passes take so much longer, the optimizer does not."""
    seconds = {name: each if name == "optimizer" else factor * each for name, each in SLOW.seconds.items()}
    return replace(SLOW, seconds=seconds, samples=lambda rank, step: round(8 * factor))


def exposed_share(step: MeasuredStep) -> float:
    return step.exposed_seconds / (step.growing_seconds + step.fixed_seconds + step.exposed_seconds)


def test_the_batch_that_hides_is_predicted_from_another_one(tmp_path: Path) -> None:
    step = measured_step(write_run(tmp_path / "run", SLOW))
    assert step.global_batch == 16, "8 samples on each of 2 ranks"
    assert exposed_share(step) > 0.4, "the link is slow"
    hides = advise_run(step).hiding["none"]
    assert hides is not None, "a batch hides"
    for batch, most in ((hides, 0.06), (hides // 2, 1.0)):
        other = measured_step(write_run(tmp_path / f"run{batch}", with_batch(batch / 16)))
        seconds, exposed = step.at(batch, "none")
        total = other.growing_seconds + other.fixed_seconds + other.exposed_seconds
        assert seconds == pytest.approx(total, rel=0.03), f"the step of {batch} samples"
        assert exposed_share(other) <= most, f"at {batch} samples"
        assert exposed / seconds == pytest.approx(exposed_share(other), abs=0.02), f"at {batch} samples"


def test_a_codec_hides_behind_a_smaller_batch(tmp_path: Path) -> None:
    hiding = advise_run(measured_step(write_run(tmp_path, SLOW))).hiding
    assert 0 < (hiding["int8"] or 0) < (hiding["bf16"] or 0) < (hiding["none"] or 0), "by the bytes that are sent"


def test_the_critical_batch_of_the_run_is_used_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = {"critical_batch": 480.0, "critical_batch_low": 400.0, "critical_batch_high": None}
    write_run(tmp_path, replace(SLOW, setup=setup))
    text = summarise(tmp_path).to_text()
    assert "480 samples (95%: 400 to more), trained with 16" in text, text
    assert command(["diagnose", str(tmp_path), "--batch-size"]) == 0, "done"
    text = capsys.readouterr().out
    assert "The critical batch is 480 samples" in text, text
    assert max(map(len, text.splitlines())) <= 100, text
    assert command(["diagnose", str(tmp_path), "--batch-size", "--json", "--critical-batch", "64"]) == 0, "done"
    values = json.loads(capsys.readouterr().out)
    assert values["question"]["critical_batch"] == 64, "what was given comes before what was measured"
    assert values["recommended"]["codec"] == "none", "that of the run"


def test_runs_that_do_not_say_it_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = write_run(tmp_path / "alone", replace(SLOW, ranks=1))
    divided = write_run(tmp_path / "tensor", replace(SLOW, plan={"tensor": 2}))
    sharded = write_run(tmp_path / "zero", replace(SLOW, plan={"zero": 3}))
    unknown = write_run(tmp_path / "samples", replace(SLOW, samples=lambda rank, step: 0))
    plain = make_run(tmp_path / "buckets", compute=[0.02, 0.02])
    for run, word in (
        (alone, "one rank"), (divided, "tensor = 2"), (sharded, "zero = 3"), (unknown, "samples are unknown"),
        (plain, "times of buckets"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            measured_step(run)
    assert command(["diagnose", str(divided), "--batch-size"]) == 2, "bad input"
    assert "Traceback" not in capsys.readouterr().err, "an error of one line"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--critical-batch", "5"], "--critical-batch is for --batch-size"),
        (["--batch-size", "--critical-batch", "0"], "critical batch 0"),
        (["--batch-size", "--critical-batch", "-1"], "critical batch -1"),
        (["--batch-size", "--critical-batch", "nan"], "critical batch nan"),
        (["--batch-size", "--critical-batch", "many"], "expected a number"),
        (["--batch-size", "--fail-over", "10"], "--fail-over has no effect"),
    ],
)
def test_lines_without_sense_are_refused(
    tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, SLOW)
    assert command(["diagnose", str(tmp_path), *words]) == 2, "bad usage"
    assert reason in capsys.readouterr().err, reason
