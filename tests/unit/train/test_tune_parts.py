"""What surrounds the tuner's decisions: predictions, the history, settings, loaders, and what people read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.cli.commands import tune
from farandole.comm.autotune.profile import Look
from farandole.core.bucket_plan import ExchangeKeys
from farandole.core.env import SETTINGS, TUNE, TuneSettings, changed_environment, read_tune_settings
from farandole.core.link import LinkModel
from farandole.core.step_model import CodecSpeed, Gradient, StepProfile
from farandole.core.vocabulary.errors import ConfigError, FarandoleError, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.observe.figures.summary import read_tuning, trial_rows, tuning_page, verdict_of
from farandole.observe.records.progress import progress_line
from farandole.train.data.worker_cores import LEAST_BATCHES, WorkerTrials
from farandole.train.tune_decision import (
    PatternSearch,
    StepBlock,
    TuneDecision,
    TuneLimits,
    bucket_grid,
    layout_of,
    predicted_seconds,
    rank_by_prediction,
)
from farandole.train.tuner import TuneHistory, TuningRecord, _judge

MIB = 2**20
START = ExchangeKeys(4 * MIB, MIB, "none", "flat", 1, 1)
SIZES = bucket_grid(32 * MIB)


def look_at(bytes_per_second: float, latency_seconds: float) -> Look:
    """Return 64 gradients of 512 KiB that are ready in 0.1 s, over a link."""
    gradients = [Gradient(f"{i}", MIB // 2, 0.1 * (i + 1) / 64, 256, 512, True, False) for i in range(64)]
    speeds = {"none": CodecSpeed(1e-10, 1.0), "bf16": CodecSpeed(2e-10, 0.5), "int8": CodecSpeed(3e-10, 0.27)}
    flat = StepProfile(gradients, 0.05, 0.1, 2, False, speeds)
    inside = StepProfile(gradients, 0.05, 0.1, 1, False, {"none": CodecSpeed(0.0, 1.0)}, 2, 1e-10, 1e-5)
    links = {"flat": LinkModel(bytes_per_second, latency_seconds), "shared": LinkModel(float("inf"), 0.0)}
    return Look({"flat": flat, "shared": inside}, links)


def test_the_best_by_the_step_model_comes_first_and_others_are_far_from_it() -> None:
    look = look_at(50e6, 0.01)
    names = ("bucket_bytes", "first_bucket_bytes")
    ranked, refused = rank_by_prediction(look, START, Plan(), names, SIZES, lossy=False)
    seconds = [predicted_seconds(look, keys) for keys in ranked]
    assert seconds[0] == min(
        predicted_seconds(look, replace(START, bucket_bytes=size, first_bucket_bytes=min(size, MIB)))
        for size in SIZES
    ), "none of the grid is better"
    assert {keys.codec for keys in ranked} == {"none"}, "nothing lossy was allowed"
    assert {keys.route for keys in ranked} == {"flat"}, "the route was not to be tuned"
    assert all(
        max(a.bucket_bytes, b.bucket_bytes) >= 4 * min(a.bucket_bytes, b.bucket_bytes)
        for i, a in enumerate(ranked) for b in ranked[:i]
    ), ranked  # fmt: skip
    assert not refused, refused


def test_lossy_codecs_and_routes_are_ranked_where_they_may_be_tried() -> None:
    slow = look_at(20e6, 0.0001)
    ranked, _ = rank_by_prediction(slow, START, Plan(), SETTINGS, SIZES, lossy=True)
    assert ranked[0].route == "shared", "memory is faster than this link"
    crossing = Look({"flat": slow.profiles["flat"]}, {"flat": slow.links["flat"]})
    ranked, _ = rank_by_prediction(crossing, START, Plan(), SETTINGS, SIZES, lossy=True)
    assert ranked[0].codec == "int8", "the smallest of them, on a slow link"
    ranked, refused = rank_by_prediction(slow, START, Plan(sync="local:H=4"), SETTINGS, SIZES, lossy=True)
    assert refused, "local steps have no route: such a plan cannot be written"
    fast = look_at(1e12, 0.0)
    ranked, _ = rank_by_prediction(fast, START, Plan(), ("codec",), SIZES, lossy=True)
    assert {keys.codec for keys in ranked} == {"none"}, "a codec that saves less than 3 % is not tried"


def test_settings_of_the_same_buckets_have_one_layout() -> None:
    look = look_at(50e6, 0.001)
    large = replace(START, bucket_bytes=64 * MIB, first_bucket_bytes=64 * MIB)
    larger = replace(START, bucket_bytes=128 * MIB, first_bucket_bytes=128 * MIB)
    assert layout_of(look, large) == layout_of(look, larger), "one bucket each"
    assert layout_of(look, large) != layout_of(look, START), "eight"
    assert layout_of(None, large) != layout_of(None, larger), "not known: two"


def test_a_plan_with_the_keys_is_a_plan_and_comes_back_from_json() -> None:
    coded = replace(START, codec="int8", connections=2)
    plan = coded.on(Plan(clip_norm=1.0))
    assert (plan.codec, plan.connections, plan.clip_norm) == ("int8", 2, 1.0), plan
    assert ExchangeKeys.from_mapping(json.loads(json.dumps(coded.to_mapping()))) == coded, "the same"
    assert coded.to_text(START) == "codec int8, connections 2", "what is different"
    for wrong in ({"bucket_bytes": "4"}, {"route": 1}, {"connections": True}, {"more": 1}):
        with pytest.raises(TypeError):
            ExchangeKeys.from_mapping({**coded.to_mapping(), **wrong})
    with pytest.raises(PlanError, match="which carries gradients of each step"):
        replace(START, route="shared").on(Plan(sync="local:H=4"))


# -- the history -----------------------------------------------------------------------------------


def test_what_won_is_found_again_over_such_a_link_alone(tmp_path: Path) -> None:
    with changed_environment({"XDG_CACHE_HOME": str(tmp_path)}):
        history = TuneHistory("0123456789abcdef")
        assert history.find(1e8) is None, "nothing yet"
        history.keep(START, 1e8, settled=True)
        small = replace(START, bucket_bytes=MIB)
        history.keep(small, 1e9, settled=False)
        assert TuneHistory("0123456789abcdef").find(1.3e8) == (START, True), "about the same link"
        assert history.find(0.9e9) == (small, False), "another one"
        assert history.find(5e6) is None, "a link of which nothing is known"
        assert history.find(None) is None, "no link"
        assert TuneHistory("fedcba9876543210").find(1e8) is None, "another job"
        history.keep(small, 1.1e8, settled=True)
        history.keep(small, 1.1e8, settled=False)
        assert history.find(1e8) == (small, True), "the newest counts, and the search stays complete"
        path = tmp_path / "farandole" / "tune" / "0123456789abcdef.json"
        assert path.stat().st_mode & 0o777 == 0o600, "private"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"version": 2}', '{"version": 1, "entries": 3}', '{"version": 1, "entries": [1, {}]}',
             '{"version": 1, "entries": [{"link": 1e8, "keys": {"bucket_bytes": -1}, "settled": true}]}',
             '{"version": 1, "entries": [{"link": "fast", "keys": {}, "settled": true}]}'],
)  # fmt: skip
def test_a_history_that_says_nonsense_says_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "farandole" / "tune" / "ab.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with changed_environment({"XDG_CACHE_HOME": str(tmp_path)}):
        history = TuneHistory("ab")
        assert history.find(1e8) is None, text
        history.keep(START, 1e8, settled=True)
        assert history.find(1e8) == (START, True), "and is written anew"


def test_without_a_place_for_caches_nothing_is_kept() -> None:
    with changed_environment({"XDG_CACHE_HOME": "relative", "HOME": "relative"}):
        history = TuneHistory("ab")
        history.keep(START, 1e8, settled=True)
        assert history.find(1e8) is None, "there is none"


# -- settings --------------------------------------------------------------------------------------


def test_settings_travel_to_the_ranks() -> None:
    settings = TuneSettings(("bucket_bytes",), True, 0.1, 3, 1000, False)
    assert read_tune_settings({TUNE: settings.to_text()}) == settings, "the same"
    assert read_tune_settings({}) is None, "not tuned"
    assert "codec" not in TuneSettings().names, "all codecs to try are lossy"
    for text in ("1", "{", '{"more": 1}', '{"names": 3}'):
        with pytest.raises(ConfigError, match=TUNE):
            read_tune_settings({TUNE: text})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "0"], "--budget 0.0: expected a share"),
        (["--budget", "nan"], "--budget nan"),
        (["--budget", "2"], "--budget 2.0"),
        (["--budget", "x"], "expected a number"),
        (["--trials", "0"], "--trials 0: expected at least 1"),
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--settings", "buckets"], "--settings 'buckets': expected some of bucket_bytes,"),
        (["--settings", ""], "--settings '': expected some of"),
        (["--settings", "codec"], "add --allow-lossy"),
        (["--set", "codec=auto"], 'codec = "auto" in farandole tune: it chooses codec, buckets'),
        (["--set", "zero=1"], "zero = 1"),
        (["--set", "nothing=1"], "nothing"),
        (["--plan", "no.toml"], "no.toml"),
        (["--include", "a"], "add -H or --hostfile"),
        (["-np", "0"], "0"),
    ],
)
def test_bad_input_starts_nothing(words: list[str], said: str) -> None:
    with pytest.raises(FarandoleError) as raised:
        tune.main([*words, "--", "python", "-c", "pass"])
    assert said in str(raised.value), raised.value
    assert raised.value.exit_code == 2, "bad usage"


# -- loaders ---------------------------------------------------------------------------------------


def iterations(
    wait_seconds: Sequence[float], *, most: int = 8, workers: int = 2, batches: int = 20
) -> WorkerTrials:
    """Let a loader be iterated over, once a wait: of each batch, beside 0.1 s of computing."""
    trials, now = WorkerTrials(most), 0.0
    for wait in wait_seconds:
        workers = trials.begin(workers)
        for _ in range(batches):
            trials.note(now, now + wait)
            now += wait + 0.1
    workers = trials.begin(workers)
    return trials


def test_workers_are_doubled_while_steps_become_shorter() -> None:
    trials = iterations([0.1, 0.05, 0.0])
    assert trials.workers == 8, trials.said
    assert len(trials.said) == 2, trials.said
    assert iterations([0.1, 0.05, 0.02, 0.02]).workers == 8, "no more than there are cores"


def test_workers_that_gain_nothing_are_taken_back_for_good() -> None:
    trials = iterations([0.1, 0.1, 0.1, 0.1])
    assert trials.workers == 2, trials.said
    assert "back to 2" in trials.said[0], trials.said
    assert len(trials.said) == 1, "once"


def test_loaders_that_are_left_alone() -> None:
    assert iterations([0.001, 0.1]).workers == 2, "steps did not wait"
    assert iterations([0.1], workers=0).workers == 0, "augmentation would draw other numbers"
    assert iterations([0.1], batches=LEAST_BATCHES - 1).workers == 2, "too few batches to say"
    assert iterations([0.1], most=2).workers == 2, "no core is left"


# -- what people read ------------------------------------------------------------------------------


def finished() -> TuningRecord:
    decision = TuneDecision(
        START, PatternSearch([replace(START, bucket_bytes=MIB)], SIZES, SETTINGS), TuneLimits(trials=1)
    )
    step = 8
    for seconds in (0.1, 0.08, 0.1, 0.08):
        step += 7
        decision.take(StepBlock((seconds,) * 5, 0.05), step, 1000)
    return TuningRecord(Plan(route="auto", predicted={"step_seconds": 0.1}), {"ranks": 2}, ["a note"], decision)


def test_a_tuned_run_is_told_and_its_plan_is_read_by_run(tmp_path: Path) -> None:
    outcome = finished()
    outcome.write(tmp_path)
    found = read_tuning(tmp_path)
    assert found is not None, "it was written"
    page = "\n".join(tuning_page(found, "runs/x", "python train.py"))
    assert "bucket_bytes 1.05 MB: steps are 20.0 % shorter (20.0 to 20.0 %)." in page, page
    assert "adopted" in page, page
    assert "farandole run --plan runs/x/tuned.toml -- python train.py" in page, page
    assert "note: a note" in page, page
    assert "compare the loss" not in page, page
    begin = ["farandole", "emulate", "--hosts", "2", "--rate", "20mbit", "--"]
    typed = [*begin, "farandole", "tune", "--allow-lossy", "--", "python", "train.py"]
    found["best"]["codec"] = "powersgd:rank=4"
    emulated = tuning_page(found, "runs/x", "python train.py", typed)
    line = f"{' '.join(begin)} farandole run --plan runs/x/tuned.toml -- python train.py"
    assert emulated[-1] == f"next: {line}"
    assert emulated[-2].endswith("compare the loss")
    for words in ([*begin[:-1], *typed[7:]], [*begin, "python", "-m", *typed[7:]]):
        assert tuning_page(found, "runs/x", "python train.py", words)[-1] == emulated[-1], words
    assert tuning_page(found, "runs/x", "x", ["farandole", "tune"])[-1].startswith("next: farandole run --plan")
    plan = Plan.read(tmp_path / "tuned.toml")
    assert plan == Plan(bucket_bytes=MIB), "the route stays open"
    assert not plan.predicted, "that was predicted for other settings"
    assert trial_rows(found)[0][0] == "15", "the step before the trial"


def test_a_run_of_which_nothing_could_be_tuned_is_told(tmp_path: Path) -> None:
    TuningRecord(Plan(), notes=["one rank exchanges no gradients"]).write(tmp_path)
    found = read_tuning(tmp_path)
    assert found is not None, "it was written"
    assert verdict_of(found) == "Nothing of the exchange was tuned: one rank exchanges no gradients.", found
    assert not (tmp_path / "tuned.toml").exists(), "there is no better plan"
    assert "did not call farandole.init" in tuning_page(None, "runs/x", "x")[0], "a script without us"


@pytest.mark.parametrize(
    "change", [{"best": 3}, {"trials": [1]}, {"gain": {}}, {"notes": None}, {"start": {}}, {"loader": [3]}]
)
def test_a_file_of_another_kind_is_no_tuning(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text(json.dumps({**finished().to_mapping(), **change}))
    assert read_tuning(tmp_path) is None, change


def test_the_progress_line_says_what_is_tuned() -> None:
    line = progress_line({"step": 20, "seconds": 0.1, "tuning": "trial 2 of at most 10"})
    assert line.endswith("tuning: trial 2 of at most 10"), line


def test_memory_that_is_nearly_used_up_is_an_alarm() -> None:
    assert not _judge(10, 100, "the memory"), "a tenth is left"
    assert "nearly used up (1 B of 100 B left)" in _judge(1, 100, "the memory"), _judge(1, 100, "the memory")
