"""A plan over sizes: what the cost model predicts, and what goes wrong on top of it."""

from __future__ import annotations

import json
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.cli.main import run as cli
from farandole.core.cluster.cluster_file import write_cluster
from farandole.core.cluster.coefficient import Coefficient
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.observe.diagnose import diagnose
from farandole.plan.answer.inputs import write_inputs
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import predict
from farandole.plan.model.profile_file import write_profile
from farandole.plan.scale.drawing import parts_of, to_html
from farandole.plan.scale.failures import FailureModel
from farandole.plan.scale.loader import Loading
from farandole.plan.scale.noise import Noise
from farandole.plan.scale.page import to_mapping, to_text
from farandole.plan.scale.request import ScaleRequest, parse_factors, parse_sizes
from farandole.plan.scale.scaling import ScaleAnswer, simulate_scale, usual_batch
from farandole.plan.scale.simulated_run import SimulatedJob
from farandole.plan.scale.smallest_job import smallest_job
from farandole.plan.scale.step_roles import step_seconds
from farandole.plan.scale.work_of import work_of
from tests.unit.plan.cost.cases import cluster_of, transformer
from tests.unit.plan.simulated_jobs import all_ranks_step_seconds

PROFILE = transformer(16, 256, 64, 8, 1000)
CLUSTER = cluster_of(8, 64)
PLANS = {
    "data": Plan(),
    "zero 1": Plan(zero=1),
    "zero 3": Plan(zero=3),
    "hybrid": Plan(zero=3, shard=4),
    "tensor": Plan(tensor=2),
    "pipeline": Plan(pipeline=4, micro_batches=8),
    "interleaved": Plan(pipeline=2, schedule="interleaved", micro_batches=4),
    "int8": Plan(codec="int8"),
    "all": Plan(pipeline=2, tensor=2, zero=1),
}


def scaled(plan: Plan, ranks: str = "8..64", **changes: object) -> ScaleAnswer:
    values = {"global_batch": 64, "modes": ("weak",), **changes}
    return simulate_scale(PROFILE, CLUSTER, ScaleRequest(plan, parse_sizes(ranks), **values), predict)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLANS)
def test_without_faults_it_is_the_cost_model(name: str) -> None:
    found = scaled(PLANS[name])
    for point in found.points:
        prediction = predict(PROFILE, CLUSTER, Candidate(PLANS[name], point.ranks, point.global_batch))
        assert point.seconds == pytest.approx(prediction.seconds, rel=1e-9), f"{name} on {point.ranks}"
        assert sum(parts_of(point).values()) == pytest.approx(point.seconds), "the parts are the step"
    assert found.points[0].efficiency == 1.0, "beside itself"
    assert not found.left_out, found.left_out
    assert not [text for text in found.warnings if "simulated step" in text], found.warnings


@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_give_what_roles_give(name: str) -> None:
    request = ScaleRequest(PLANS[name], (8,), 64, slow_ranks={3: 1.5})
    job = smallest_job(PROFILE, CLUSTER, request, predict, steps=3)
    assert step_seconds(job.work, job.slow_ranks) == all_ranks_step_seconds(job), name
    point = scaled(PLANS[name], "8", slow_ranks={3: 1.5}).points[0]
    healthy = all_ranks_step_seconds(SimulatedJob(job.work, 8, steps=3))
    more = all_ranks_step_seconds(job) - healthy
    assert point.straggler_seconds == pytest.approx(more, abs=1e-9), "what the slow rank adds"
    assert 0 < point.straggler_seconds <= 0.51 * point.predicted_seconds, "at most half of the step"


def test_most_of_a_step_is_simulated() -> None:
    for name in ("data", "tensor", "pipeline", "zero 3"):
        candidate = Candidate(PLANS[name], 8, 64)
        prediction = predict(PROFILE, CLUSTER, candidate)
        work = work_of(PROFILE, CLUSTER, candidate, prediction).work
        assert work.exposed_seconds < 0.25 * prediction.seconds, f"{name}: the rest is taken as it is"


def test_faults_add_up() -> None:
    slow = scaled(Plan(), slow_ranks={3: 1.5}).points
    noisy = scaled(Plan(), noise=Noise(0.05)).points
    linked = scaled(Plan(), "16..64", slow_links={1: 4.0}).points
    for point in slow:
        assert point.straggler_seconds > 0.0, "a slow rank"
    assert noisy[0].noise_seconds > 0.0, "noise"
    assert linked[0].slow_link_seconds > 0.0, "a slow link"
    assert linked[0].seconds > linked[0].predicted_seconds, "in the step"
    assert linked[0].communication_share > slow[0].communication_share, "and in communication"
    for point in (*slow, *noisy, *linked):
        assert sum(parts_of(point).values()) == pytest.approx(point.seconds), "parts"


def test_a_slow_rank_of_the_cluster_file_is_one() -> None:
    cluster = replace(CLUSTER, rank_speeds={3: 0.5})
    request = ScaleRequest(Plan(), (8,), 64, modes=("weak",))
    known = simulate_scale(PROFILE, cluster, request, predict).points[0]
    asked = scaled(Plan(), "8", slow_ranks={3: 2.0}).points[0]
    assert known.seconds == pytest.approx(asked.seconds), "the same, and not twice"


def test_weak_and_strong_scaling() -> None:
    found = scaled(Plan(), modes=("weak", "strong"))
    assert [point.global_batch for point in found.of("weak")] == [64, 128, 256, 512], "the samples of a rank"
    assert {point.global_batch for point in found.of("strong")} == {64}, "the global batch"
    few = scaled(Plan(), "8..128", modes=("strong",), global_batch=32)
    assert few.left_out[0].ranks == (64, 128), few.left_out
    assert "does not divide" in few.left_out[0].why, few.left_out


def test_the_batch_is_that_of_the_prediction() -> None:
    plan = Plan(data=8, tensor=2, predicted={"step_seconds": 1.0, "ranks": 16.0, "global_batch": 24.0})
    assert usual_batch(plan, PROFILE, 8) == 12, "3 samples on each of 4 replicas"
    edited = replace(plan, data=4)
    assert usual_batch(edited, PROFILE, 8) == 8, "edited by hand: 4 x 2 ranks are not 16"
    assert usual_batch(Plan(), PROFILE, 8) == 16, "the profile's batch on each of 8"
    assert usual_batch(Plan(pipeline=2), PROFILE, 8) == 32, "in each of 4 passes of 4 replicas"


def test_what_grows() -> None:
    assert scaled(Plan(zero=3, data=1, shard=8)).grows == "shard", "all ranks share"
    assert scaled(Plan(data=2, tensor=4)).points[-1].degrees == "data 16 x tensor 4", "the data degree"
    assert not scaled(Plan(data=2, tensor=4)).assumptions, "as the plan says on the smallest size"
    assert any("not the plan's 4" in text for text in scaled(Plan(data=4, tensor=4)).assumptions), "it says so"
    assert scaled(Plan(data=2, expert="rest"), "8").grows == "expert", "what is the rest"


def test_failures_and_goodput() -> None:
    found = scaled(Plan(), "8..64", failures=FailureModel(10_800, 64)).points
    assert [point.failure_seconds for point in found] == [86_400, 43_200, 21_600, 10_800], "in proportion"
    goodputs = [point.goodput for point in found]
    assert goodputs == sorted(goodputs, reverse=True), "more ranks fail more often"
    assert all(0.8 < each < 1 for each in goodputs), goodputs
    assert scaled(Plan(), "8").points[0].goodput == 1.0, "without failures"


def test_data_that_comes_too_slowly() -> None:
    plain = scaled(Plan(), "8").points[0]
    slow = scaled(Plan(), "8", loading=Loading(storage_bytes_per_second=1000.0)).points[0]
    assert slow.seconds == pytest.approx(PROFILE.batch_bytes * 64 / 1000.0), "storage is the limit"
    assert scaled(Plan(), "8", loading=Loading(1e12, 4)).points[0].seconds == plain.seconds, "no limit"
    loader = replace(CLUSTER, loader_bytes_per_second=Coefficient(1000.0))
    request = ScaleRequest(Plan(), (8,), 64, modes=("weak",), loading=Loading(1000.0, 1))
    known = simulate_scale(PROFILE, loader, request, predict).points[0]
    assert known.seconds == pytest.approx(PROFILE.batch_bytes * 8 / 1000.0), "not counted twice"
    helped = replace(request, loading=Loading(1000.0, 4))
    more = simulate_scale(PROFILE, loader, helped, predict).points[0]
    assert more.seconds == pytest.approx(max(plain.seconds, known.seconds / 4)), "four workers"


def test_text_json_and_page() -> None:
    found = scaled(PLANS["all"], slow_ranks={3: 1.5}, modes=("weak", "strong"), failures=FailureModel(3600))
    text = to_text(found)
    assert max(map(len, text.splitlines())) <= 100, text
    assert "rank 3 computes 1.5 times as long" in text, text
    assert json.loads(json.dumps(to_mapping(found)))["points"][0]["ranks"] == 8, "plain values"
    page = to_html(found)
    for drawing in page.split("<svg")[1:]:
        xml.dom.minidom.parseString("<svg" + drawing.split("</svg>")[0] + "</svg>")
    assert page.count("<svg") == 4, "two drawings a mode"
    assert "http" not in page, "nothing outside of it"


def test_requests_that_cannot_be() -> None:
    for words in (["3"], ["3:"], ["x:2"], ["3:0.9"], ["3:nan"], ["3:2", "3:4"], ["-1:2"]):
        with pytest.raises(ConfigError):
            parse_factors(words, "--slow-rank")
    for text in ("", "0", "8..4", "8...16", "1.5", "8,", "9999999", "8..", "-8", "٨"):
        with pytest.raises(ConfigError):
            parse_sizes(text)
    assert parse_sizes("8..48") == (8, 16, 32, 48), "doubles, and the last"
    assert parse_sizes("16,8,8") == (8, 16), "in order, once"
    with pytest.raises(PlanError, match="multiple of 3"):
        scaled(Plan(tensor=3), "8")
    with pytest.raises(ConfigError, match="ranks 0 to 7"):
        scaled(Plan(), slow_ranks={8: 2.0})
    with pytest.raises(ConfigError, match="do not fill hosts"):
        scaled(Plan(), "12")
    with pytest.raises(ConfigError, match="network"):
        simulate_scale(PROFILE, cluster_of(8), ScaleRequest(Plan(), (64,), 64), predict)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, profile = tmp_path / "cluster.toml", tmp_path / "model.json"
    write_cluster(CLUSTER, cluster)
    write_profile(PROFILE, profile)
    (tmp_path / "plan.toml").write_text("pipeline = 2\n")
    files = ["--cluster", str(cluster), "--profile", str(profile)]
    run = str(tmp_path / "run")
    words = ["simulate", str(tmp_path / "plan.toml"), *files, "--gpus", "8..32", "--slow-rank", "3:1.5", "--json"]
    words += ["--global-batch", "64"]
    assert cli([*words, "--run-dir", run, "--html", str(tmp_path / "page.html"), "--fail-every", "1h/rank"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in answer["points"]] == [8, 16, 32] * 2, answer
    assert "<svg" in (tmp_path / "page.html").read_text(), "the drawing"
    assert diagnose(Path(run)).verdict.startswith("Simulated."), "the run"
    assert cli(["simulate", *files, "--gpus", "8", "--noise-from", run]) == 0, "its noise, resampled"
    assert cli(["simulate", *files, "--gpus", "8", "--set", "tensor=3"]) == 2, "3 ranks do not divide 8"
    assert "multiple of 3" in capsys.readouterr().err, "why"
    for bad in (
        ["--gpus", "8", "--restart", "3m"], ["--gpus", "8", "--noise", "2"], ["--gpus", "8", "--noise-from", "x"],
        [], ["--gpus", "8", "--storage-rate", "0"], ["--gpus", "8", "--global-batch", "7"],
        ["--gpus", "512", "--run-dir", str(tmp_path / "large")], ["--gpus", "8", "--run-dir", run],
        ["--gpus", "8", "--fail-every", "3h", "--checkpoint-seconds", "0"], ["--gpus", "8", "--noise", "nan"],
    ):  # fmt: skip
        assert cli(["simulate", *files, *bad]) == 2, bad
        assert "Traceback" not in capsys.readouterr().err, bad
    assert not (tmp_path / "large").exists(), "nothing half written"
    assert cli(["simulate", "--gpus", "8"]) == 2, "neither cluster nor profile"
    plan = tmp_path / "plan.toml"
    assert cli(["simulate", str(plan), "--gpus", "8"]) == 2, "nothing beside the plan"
    assert "plan.cluster.toml" in capsys.readouterr().err, "it says what it looked for"
    write_inputs(PROFILE, CLUSTER, plan)
    assert cli(["simulate", str(plan), "--gpus", "8", "--json"]) == 0, "what the planner left there"
    assert json.loads(capsys.readouterr().out)["model"] == PROFILE.name, "the profile's"
