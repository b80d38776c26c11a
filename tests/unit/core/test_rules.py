"""The table of rules: each refuses what it says, none hides another, and docs/reference/plan.md shows them all."""

from __future__ import annotations

import pytest

from farandole.core.job_plan import refuse_plan
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.rules import FACTS, RULES, Rule, allows, broken, check
from farandole.core.vocabulary.spec import Plan
from farandole.plan.scaling import ScaleRequest, candidate_of
from tests.style.rule_rows import TABLE, example, rows


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule.values))
def test_a_rule_refuses_its_example_by_name_and_with_a_remedy(rule: Rule) -> None:
    values = example(rule)
    with pytest.raises(PlanError) as caught:
        check(values)
    for key, value in values.items():
        assert (FACTS.get(key) or f"{key} = ") in str(caught.value), f"{key} = {value}"
    if len(values) > 1:
        assert caught.value.remedy, "what to do instead"


def test_a_plan_as_by_default_breaks_none_alone_and_in_any_job() -> None:
    facts = dict.fromkeys(FACTS, True)
    assert broken({**vars(Plan()), **facts}) is None
    assert set().union(*(rule.values for rule in RULES)) <= {*vars(Plan()), *FACTS}, "no key that does not exist"


def test_a_degree_that_the_ranks_decide_is_refused_when_they_are_known() -> None:
    plan = Plan(pipeline="rest", accumulate=2)
    check({**vars(plan), "data": 2})
    with pytest.raises(PlanError, match=r"accumulate = 2 with pipeline = 2: .*; set micro_batches"):
        check({**vars(plan), "pipeline": 2})


def test_a_launcher_refuses_it_when_it_knows_the_ranks() -> None:
    refuse_plan(Plan(pipeline="rest", accumulate=2), 1)
    with pytest.raises(PlanError, match="accumulate = 2 with pipeline = 4"):
        refuse_plan(Plan(pipeline="rest", accumulate=2), 4)
    plan = Plan(tensor="rest", train_schedule={"0": "*"})
    with pytest.raises(PlanError, match=r"train_schedule = .* with tensor = 4"):
        candidate_of(plan, 4, ScaleRequest(plan, (4,), 8), "strong")


def test_spaces_around_a_value_change_nothing() -> None:
    assert Plan(sync=" every_step ", zero=1) == Plan(zero=1)
    with pytest.raises(PlanError, match='sync = "auto" with codec = "none"'):
        Plan(sync=" auto")


def test_what_a_key_could_be_beside_others() -> None:
    assert allows("balance", "speed", vars(Plan()))
    assert not allows("balance", "speed", vars(Plan(zero=3)))


def test_docs_show_every_rule() -> None:
    assert TABLE.read() == rows(), "run python -m tests.style"
