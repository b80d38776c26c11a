"""The answer of the planner: its text, its files, its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.answer import read_answer, read_why, to_mapping, to_text, why_path, write_answer
from farandole.plan.answer_page import render, write_page
from farandole.plan.candidate import Candidate
from farandole.plan.search.decide import search, to_try, with_trials
from farandole.plan.search.reasons import in_words, why_slower
from farandole.plan.search.result import Goal, PlanAnswer, SearchRequest
from tests.unit.plan.search.models import make_cluster, make_profile, predict_plainly


@pytest.fixture(scope="module")
def answer() -> PlanAnswer:
    """Return an answer with a pipeline, by the real cost model."""
    request = SearchRequest(8, 64, fixed={"pipeline": 4}, effort=200)
    return search(make_profile(), make_cluster(memory=2e9), request)


@pytest.fixture(scope="module")
def wide() -> PlanAnswer:
    """Return an answer with long names and every kind of plan."""
    profile = replace(make_profile(experts=8), name="a_model_with_a_very_long_name_" * 5)
    cluster = replace(make_cluster(ranks=16, inside=8), name="the.cluster.of.somebody.else " * 4)
    profile = replace(profile, notes=("a module without a recipe is replicated: " + "a.very.long.name." * 9,))
    return search(profile, cluster, SearchRequest(16, 64, effort=300), predict_plainly)


@pytest.fixture(scope="module")
def nothing() -> PlanAnswer:
    """Return an answer without a plan."""
    return search(make_profile(), make_cluster(memory=3e7), SearchRequest(8, 64, effort=60), predict_plainly)


@pytest.mark.full("further")
def test_the_text_has_everything_in_100_columns(answer: PlanAnswer, wide: PlanAnswer, nothing: PlanAnswer) -> None:
    """Plan, interval, memory by stage and category, parts of a step, reasons, changes, the script, warnings."""
    for each in (answer, wide, nothing):
        long = [line for line in to_text(each).splitlines() if len(line) > 100]
        assert not long, f"{long}"
    text = to_text(answer)
    for said in (
        "Plan: pipeline 4", "Step: ", " to ", "Memory of a rank, which may use 2 GB", "stage  weights",
        "What a step consists of", "computation", "what binds: ", "then: ", "Rejected, with the best plan of each",
        "a link twice as fast (network)", "4 GB of memory", "a global batch of 128", "call fd.step",
        "no unit was measured",
    ):  # fmt: skip
        assert said in text, f"{said!r} is not in\n{text}"
    assert "does not fit: the least is" in to_text(nothing)
    assert "Plan:" not in to_text(nothing)


def test_the_plan_file_is_the_plan(answer: PlanAnswer, tmp_path: Path) -> None:
    """`Plan.read` reads it, with what was predicted; the reasons beside it give the same answer back."""
    path = tmp_path / "best.toml"
    write_answer(answer, path)
    plan = Plan.read(path)
    assert plan == answer.plan
    assert plan.predicted["step_seconds"] == pytest.approx(answer.plan.predicted["step_seconds"])
    assert plan.predicted["ranks"] == 8
    assert why_path(path).name == "best.why.json"
    assert read_answer(path) == answer
    assert "farandole explain" in path.read_text().splitlines()[1]


def test_an_edited_plan_is_not_the_one_that_is_explained(answer: PlanAnswer, tmp_path: Path) -> None:
    """Every key that differs is named with both values."""
    path = tmp_path / "plan.toml"
    write_answer(answer, path)
    path.write_text(path.read_text().replace("clip", "clip").replace("accumulate = 1", "accumulate = 1\nzero = 3"))
    with pytest.raises(PlanError):
        read_answer(path)
    write_answer(answer, path)
    path.write_text(path.read_text().replace('buffers = "mean"', 'buffers = "local"'))
    with pytest.raises(PlanError, match=r"buffers = 'local' \('mean' there\)"):
        read_answer(path)


def test_files_that_are_not_there(answer: PlanAnswer, nothing: PlanAnswer, tmp_path: Path) -> None:
    """A plan without reasons, reasons without a plan, and a folder that cannot be written."""
    path = tmp_path / "plan.toml"
    path.write_text(answer.plan.to_toml())
    with pytest.raises(PlanError, match=r"there is no file .*plan\.why\.json; farandole plan"):
        read_answer(path)
    write_answer(nothing, path)
    with pytest.raises(PlanError, match="found no plan that fits"):
        read_answer(path)
    with pytest.raises(PlanError, match="holds the reasons of a plan"):
        read_answer(why_path(path))
    with pytest.raises(ConfigError, match="cannot write"):
        write_answer(answer, tmp_path / "nowhere" / "plan.toml")
    with pytest.raises(ConfigError, match="cannot write"):
        write_page(answer, tmp_path / "nowhere" / "page.html", plan_name="plan.toml")


def _changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split(".")

    def change(mapping: dict[str, Any]) -> None:
        place: Any = mapping
        for each in parents:
            place = place[int(each)] if isinstance(place, list) else place[each]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_changed("kind", "other"), "holds no reasons of a plan"),
        (_changed("version", 99), "version 99, expected at most 1"),
        (_changed("version", True), "version True"),
        (_changed("limit_bytes", "16 GB"), "why.json: limit_bytes = '16 GB', expected a whole number"),
        (
            _changed("best.prediction.seconds", "fast"),
            "why.json: best.prediction.seconds = 'fast', expected a number",
        ),
        (_changed("best.prediction.memory.0.weights_bytes", 1.5), "memory.0.weights_bytes = 1.5"),
        (_changed("best.candidate.plan.tensr", 2), "unknown key 'tensr'"),
        (_changed("families.0.status", "fine"), "why.json: families.0.status = 'fine', expected one of 'chosen'"),
        (_changed("best.prediction.terms.luck", 1.0), "best.prediction.terms.luck: expected one of 'compute'"),
        (_changed("frontier", {}), "why.json: frontier = {}, expected a list"),
        (_changed("counts", None), "counts is missing"),
        (_changed("more", 1), "why.json: more: unknown key"),
    ],
)
def test_reasons_are_read_strictly(
    answer: PlanAnswer, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """Each wrong value is an error with its path."""
    mapping = json.loads(json.dumps(to_mapping(answer)))
    change(mapping)
    path = tmp_path / "plan.why.json"
    path.write_text(json.dumps(mapping))
    with pytest.raises(PlanError) as raised:
        read_why(path)
    assert said in str(raised.value), f"{raised.value}"


def test_no_json(tmp_path: Path) -> None:
    """What is no JSON, or nested without end, is said to be none."""
    path = tmp_path / "plan.why.json"
    for text in ("{", "[" * 100_000, "[]", "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(PlanError):
            read_why(path)


class _Page(HTMLParser):
    """What a page has: texts, titles, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.fetched: list[str] = []
        self.titles: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.fetched.append(f"{tag} {name}={value}")
            if name == "title" and value:
                self.titles.append(value)

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] == "title":
            self.titles.append(data)
        self.texts.append(data)


def test_the_page_is_one_file_with_all_drawings(answer: PlanAnswer) -> None:
    """Frontier, mesh, schedule and breakdown are there; nothing is fetched; a pointer reads plans and ranks."""
    text = render(answer, plan_name="plan.toml")
    page = _Page()
    page.feed(text)
    assert not page.fetched, f"{page.fetched}"
    assert "http" not in text
    assert "url(" not in text
    assert "script" not in page.opened, "the page needs no script"
    assert answer.best is not None
    best = in_words(answer.best.candidate)
    assert any(best in title and "ms" in title for title in page.titles), "no dot tells the chosen plan"
    dots = text.count('class="dot')
    assert dots >= len(answer.points), f"{dots} dots of {len(answer.points)} plans"
    assert [title for title in page.titles if title.startswith("rank 7: pipeline 3 of 4")], (
        "rank 7 is not in the mesh"
    )
    assert "host 1" in page.texts
    assert any(title.startswith("forward of micro-batch 0, stage 0") for title in page.titles), "no schedule"
    assert any(title.startswith("computation: ") for title in page.titles), "no breakdown"
    for family in answer.families:
        assert family.name in page.texts, f"{family.name} is not on the page"


def test_a_page_escapes_and_a_page_without_a_plan(wide: PlanAnswer, nothing: PlanAnswer) -> None:
    """Names are text, whatever they hold; without a plan the page says what would make one fit."""
    evil = replace(wide, model="<script>alert(1)</script>", warnings=("<b>&",))
    text = render(evil, plan_name='"><img src=x>')
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert re.search(r"does not fit: the least is", render(nothing, plan_name="plan.toml"), re.I)


def test_large_jobs_are_drawn_in_part() -> None:
    """Thousands of ranks: some hosts and some micro-batches are drawn, and the page says how many are not."""
    request = SearchRequest(512, 4096, fixed={"pipeline": 8, "micro_batches": 64, "schedule": "1f1b"}, effort=20)
    large = search(make_profile(blocks=16), make_cluster(ranks=512, inside=8), request, predict_plainly)
    text = render(large, plan_name="plan.toml")
    assert "and 52 more hosts alike" in text
    assert "micro-batches" in text
    assert len(text) < 1_500_000, f"{len(text)} characters"


def test_trials_rank_again(answer: PlanAnswer) -> None:
    """What was measured decides; a failed trial is recorded, and where all fail the prediction stays."""
    profile, cluster = make_profile(), make_cluster(memory=2e9)
    tried = to_try(answer, 3)
    assert len(tried) == 3
    assert tried[0].family == answer.families[0].name
    first, second, third = (each.candidate for each in tried)

    def ran(*seconds: float | None) -> PlanAnswer:
        candidates: tuple[Candidate, ...] = (first, second, third)
        measured = [
            (each, took, "ok" if took else "out of memory") for each, took in zip(candidates, seconds, strict=True)
        ]
        return with_trials(answer, measured, profile, cluster)

    again = ran(0.3, 0.2, None)
    assert again.best is not None
    assert again.best.candidate == second
    assert again.families[0].name == tried[1].family
    lost = next(each for each in again.families if each.name == tried[0].family)
    assert lost.status == "slower"
    assert lost.reason == "measured: 300 ms, 100 ms slower", f"{lost.reason}"
    assert [each.seconds for each in again.trials] == [0.3, 0.2, None]
    assert "out of memory" in " ".join(to_text(again).split())
    failed = ran(None, None, None)
    assert failed.best == answer.best
    assert "no trial worked" in failed.warnings[-1]
    crashed = ran(None, 0.2, 0.4)
    assert next(each for each in crashed.families if each.name == tried[0].family).reason == "its trial failed"
    kept = ran(0.2, 0.3, 0.4)
    assert kept.best == answer.best
    assert kept.changes == answer.changes


def test_what_is_said_after_trials_is_of_the_plan_that_won(answer: PlanAnswer) -> None:
    """Interval, why the others lost, what would change, warnings: no number of the plan that lost stays."""
    profile, cluster = make_profile(), make_cluster(memory=2e9)
    first, second = (each.candidate for each in to_try(answer, 2))
    again = with_trials(answer, [(first, 0.3, "ok"), (second, 0.2, "ok")], profile, cluster)
    assert again.best is not None
    assert again.best.prediction.low_seconds < again.best.prediction.seconds < again.best.prediction.high_seconds
    assert again.plan.predicted["low_seconds"] < again.plan.predicted["step_seconds"]
    assert again.families[0].option is again.best
    for change in again.changes:
        assert change.option is not None, change.what
        assert change.option.family == again.best.family, "a plan that was slow when it ran is no promise"
        grown = change.option.samples_per_second / again.best.samples_per_second - 1
        assert change.gain == pytest.approx(grown), change.what
    tried = {each.plan for each in again.trials}
    for family in again.families[1:]:
        if family.status == "slower" and family.option and in_words(family.option.candidate) not in tried:
            assert family.reason == why_slower(family.option, again.best, "throughput"), family.name
    assert set(again.best.prediction.warnings) <= set(again.warnings)


@pytest.mark.parametrize(("goal", "wins"), [("throughput", 1), ("memory", 0), ("cost", 0), ("time", 1)])
def test_trials_decide_by_the_goal(answer: PlanAnswer, goal: Goal, wins: int) -> None:
    """A faster plan on twice the ranks with more memory costs more, and wins where the time of a step counts."""
    few = replace(answer.families[0].option, candidate=replace(to_try(answer, 1)[0].candidate, ranks=4))  # type: ignore[type-var]
    assert few is not None, "it is the chosen one"
    many = to_try(answer, 2)[1]
    bigger = [replace(each, activations_bytes=10**9) for each in many.prediction.memory]
    many = replace(many, prediction=replace(many.prediction, memory=tuple(bigger)))
    families = [replace(answer.families[0], option=few), replace(answer.families[1], option=many)]
    asked = replace(answer, request=replace(answer.request, goal=goal), families=tuple(families), best=few)
    measured = [(few.candidate, 0.3, "ok"), (many.candidate, 0.2, "ok")]
    again = with_trials(asked, measured, make_profile(), make_cluster(memory=2e9))
    assert again.families[0].name == families[wins].name
    lost = {
        "memory": "200 ms, 100 ms faster, with more memory",
        "cost": "200 ms, 100 ms faster, for more rank-seconds",
    }
    assert again.families[1].reason == f"measured: {lost.get(goal, '300 ms, 100 ms slower')}"
