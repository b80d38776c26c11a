"""A plan over sizes: what the cost model predicts, what failures cost, and how often to save."""

from __future__ import annotations

import json
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import pytest

from farandole.cli.main import run as cli
from farandole.core.cluster import Coefficient
from farandole.core.cluster_file import write_cluster
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.answer import write_inputs
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import predict
from farandole.plan.profile import write_profile
from farandole.plan.scaling import (
    FailureModel,
    ScaleAnswer,
    ScaleRequest,
    best_interval,
    parse_sizes,
    parse_slow_ranks,
    simulate_scale,
    usual_batch,
)
from farandole.plan.scaling_page import parts_of, to_html, to_mapping, to_text
from tests.unit.plan.cost.cases import cluster_of, transformer

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
    "two versions": Plan(pipeline=4, micro_batches=8, weight_versions=2),
    "all": Plan(pipeline=2, tensor=2, zero=1),
}


def scaled(plan: Plan, ranks: str = "8..64", **changes: object) -> ScaleAnswer:
    values = {"global_batch": 64, "modes": ("weak",), **changes}
    return simulate_scale(PROFILE, CLUSTER, ScaleRequest(plan, parse_sizes(ranks), **values), predict)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLANS)
def test_it_is_the_cost_model(name: str) -> None:
    found = scaled(PLANS[name])
    for point in found.points:
        prediction = predict(PROFILE, CLUSTER, Candidate(PLANS[name], point.ranks, point.global_batch))
        assert point.seconds == prediction.seconds, f"{name} on {point.ranks}"
        assert sum(parts_of(point).values()) == pytest.approx(point.seconds), "the parts are the step"
    assert found.points[0].efficiency == 1.0, "beside itself"
    assert not found.left_out, found.left_out


def test_slow_ranks_are_those_of_the_cost_model() -> None:
    plain = scaled(Plan(), "8").points[0]
    slow = scaled(Plan(), slow_ranks={3: 1.5}).points
    for point in slow:
        terms = point.prediction.terms
        more = 0.5 * (terms["compute"] + terms["optimizer"])
        assert terms["straggler"] == pytest.approx(more), "half of what a rank computes"
        assert point.waiting_seconds == terms["straggler"], "ranks wait for it"
    assert slow[0].seconds == pytest.approx(plain.seconds + slow[0].waiting_seconds), "in the step"
    known = simulate_scale(
        PROFILE, replace(CLUSTER, rank_speeds={3: 0.5}), ScaleRequest(Plan(), (8,), 64, modes=("weak",)), predict
    )
    asked = scaled(Plan(), "8", slow_ranks={3: 2.0})
    assert known.points[0].seconds == asked.points[0].seconds, "one of the cluster file is the same"


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


def test_how_often_to_save() -> None:
    found = scaled(Plan(), "8..64", failures=FailureModel(10_800, 64)).points
    for point in found:
        between = point.failure_seconds or 0.0
        assert point.save_every_seconds == best_interval(30.0, between), "Daly's interval"
        assert point.save_every_seconds == pytest.approx((2 * 30.0 * between) ** 0.5, rel=0.03), "near Young's"
    given = scaled(Plan(), "8", failures=FailureModel(10_800, save_every_seconds=600.0)).points[0]
    assert given.save_every_seconds == 600.0, "as asked for"
    assert scaled(Plan(), "8").points[0].save_every_seconds is None, "without failures"


def test_data_that_comes_too_slowly() -> None:
    plain = scaled(Plan(), "8").points[0]
    slow = scaled(Plan(), "8", storage_bytes_per_second=1000.0).points[0]
    assert slow.seconds == pytest.approx(PROFILE.batch_bytes * 64 / 1000.0), "storage is the limit"
    tensor = scaled(Plan(tensor=2), "8", storage_bytes_per_second=1000.0).points[0]
    assert tensor.seconds == pytest.approx(PROFILE.batch_bytes * 64 / 1000.0), "of each sample once"
    assert scaled(Plan(), "8", loader_workers=4).points[0].seconds == plain.seconds, "no speed is known: no limit"

    def loaded(**changes: float) -> float:
        cluster = replace(CLUSTER, loader_bytes_per_second=Coefficient(1000.0, low=900.0, high=1100.0))
        request = ScaleRequest(Plan(), (8,), 64, modes=("weak",), **changes)  # type: ignore[arg-type]
        return simulate_scale(PROFILE, cluster, request, predict).points[0].seconds

    one = PROFILE.batch_bytes * 8 / 1000.0
    assert loaded() == pytest.approx(one), "one worker"
    assert loaded(loader_workers=4) == pytest.approx(max(plain.seconds, one / 4)), "four workers"
    assert loaded(storage_bytes_per_second=4000.0) == pytest.approx(2 * one), "the slower of both"
    assert loaded(storage_bytes_per_second=1e12) == pytest.approx(one), "the slower of both"


def test_text_json_and_page() -> None:
    found = scaled(PLANS["all"], slow_ranks={3: 1.5}, modes=("weak", "strong"), failures=FailureModel(3600))
    text = to_text(found)
    assert max(map(len, text.splitlines())) <= 100, text
    assert "rank 3 computes 1.5 times as long" in text, text
    assert "\nsave every 7:25\n" in text, text
    each = to_text(scaled(Plan(), "8,16", failures=FailureModel(3600, 8)))
    assert "save every 7:25 with 8 ranks, 5:09 with 16 ranks" in each, each
    assert json.loads(json.dumps(to_mapping(found)))["points"][0]["ranks"] == 8, "plain values"
    page = to_html(found)
    for drawing in page.split("<svg")[1:]:
        xml.dom.minidom.parseString("<svg" + drawing.split("</svg>")[0] + "</svg>")
    assert page.count('<svg class="bar"') == len(found.points), "what each step is made of"
    assert page.count("<svg") == len(found.points) + 2, "and throughput, once a mode"
    assert "http" not in page, "nothing outside of it"


def test_requests_that_cannot_be() -> None:
    for words in (["3"], ["3:"], ["x:2"], ["3:0.9"], ["3:nan"], ["3:2", "3:4"], ["-1:2"]):
        with pytest.raises(ConfigError):
            parse_slow_ranks(words)
    for text in ("", "0", "8..4", "8...16", "1.5", "8,", "9999999", "8..", "-8", "٨"):
        with pytest.raises(ConfigError):
            parse_sizes(text)
    assert parse_sizes("8..48") == (8, 16, 32, 48), "doubles, and the last"
    assert parse_sizes("16,8,8") == (8, 16), "in order, once"
    with pytest.raises(PlanError, match="multiple of 3"):
        scaled(Plan(tensor=3), "8")
    with pytest.raises(ConfigError, match="ranks 0 to 7"):
        scaled(Plan(), slow_ranks={8: 2.0})
    with pytest.raises(ConfigError, match="factor from 1"):
        scaled(Plan(), slow_ranks={3: 0.5})
    with pytest.raises(ConfigError, match="loader-workers 0"):
        scaled(Plan(), loader_workers=0)
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
    words = ["simulate", str(tmp_path / "plan.toml"), *files, "--gpus", "8..32", "--slow-rank", "3:1.5", "--json"]
    words += ["--global-batch", "64"]
    assert cli([*words, "--html", str(tmp_path / "page.html"), "--fail-every", "1h/rank"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in answer["points"]] == [8, 16, 32] * 2, answer
    assert "<svg" in (tmp_path / "page.html").read_text(), "the drawing"
    assert cli(["simulate", *files, "--gpus", "8", "--set", "tensor=3"]) == 2, "3 ranks do not divide 8"
    assert "multiple of 3" in capsys.readouterr().err, "why"
    for bad in (
        ["--gpus", "8", "--restart", "3m"], ["--gpus", "8", "--loader-workers", "0"],
        [], ["--gpus", "8", "--storage-rate", "0"], ["--gpus", "8", "--global-batch", "7"],
        ["--gpus", "8", "--fail-every", "3h", "--checkpoint-seconds", "0"],
    ):  # fmt: skip
        assert cli(["simulate", *files, *bad]) == 2, bad
        assert "Traceback" not in capsys.readouterr().err, bad
    assert cli(["simulate", "--gpus", "8"]) == 2, "neither cluster nor profile"
    plan = tmp_path / "plan.toml"
    assert cli(["simulate", str(plan), "--gpus", "8"]) == 2, "nothing beside the plan"
    assert "plan.cluster.toml" in capsys.readouterr().err, "it says what it looked for"
    write_inputs(PROFILE, CLUSTER, plan)
    assert cli(["simulate", str(plan), "--gpus", "8", "--json"]) == 0, "what the planner left there"
    assert json.loads(capsys.readouterr().out)["model"] == PROFILE.name, "the profile's"
