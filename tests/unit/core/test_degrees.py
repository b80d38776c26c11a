"""The degrees of a plan, and where each rank is in the mesh."""

from __future__ import annotations

import itertools
import re

import pytest

from farandole.core.vocabulary.degrees import ORDER, Degrees, degrees_of
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan


def test_the_innermost_degree_changes_fastest() -> None:
    degrees = Degrees(pipeline=2, data=2, tensor=2)
    assert [degrees.place(rank)["tensor"] for rank in range(8)] == [0, 1] * 4, "tensor ranks are neighbours"
    assert [degrees.place(rank)["pipeline"] for rank in range(8)] == [0] * 4 + [1] * 4, "stages are outermost"
    assert degrees.members(5, ["pipeline"]) == (1, 5), "rank 5 is the second stage of rank 1's pipeline"


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1, 1, 2), (1, 3, 2, 1, 2, 1), (2, 1, 1, 2, 1, 2), (1, 1, 1, 1, 1, 5)])
def test_members_of_any_degrees_divide_the_ranks(sizes: tuple[int, ...]) -> None:
    degrees = Degrees(**dict(zip(ORDER, sizes, strict=True)))
    for count in range(len(ORDER) + 1):
        for names in itertools.combinations(ORDER, count):
            groups = {degrees.members(rank, names) for rank in range(degrees.size)}
            assert sorted(itertools.chain(*groups)) == list(range(degrees.size)), f"{names} of {sizes}"
            assert {len(group) for group in groups} == {degrees.size_over(names)}, f"{names} of {sizes}"
            assert all(group[degrees.rank_over(rank, names)] == rank for group in groups for rank in group), names


def test_the_rest_is_what_other_degrees_leave() -> None:
    assert degrees_of(Plan(tensor=2), 8) == Degrees(data=4, tensor=2), "data is the rest by default"
    assert degrees_of(Plan(tensor="rest"), 8) == Degrees(tensor=8), "data gives way to another rest"
    assert degrees_of(Plan(data=2, zero=3, shard="rest"), 8) == Degrees(data=2, shard=4), "shard is the rest"


@pytest.mark.parametrize(
    ("plan", "size", "message"),
    [
        (Plan(tensor=3), 8, "tensor 3 needs a multiple of 3 ranks, but there are 8"),
        (Plan(data=2, tensor=2), 8, "data 2 x tensor 2 is 4 ranks, but there are 8"),
        (Plan(tensor="rest", pipeline="rest"), 8, 'pipeline and tensor are both "rest"'),
    ],
)
def test_degrees_that_do_not_fit_are_refused(plan: Plan, size: int, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        degrees_of(plan, size)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor": 0}, 'tensor = 0, expected at least 1, or "rest"'),
        ({"tensor": "half"}, "tensor: expected"),
        ({"shard": 2}, "shard = 2 with zero = 0, which shards nothing"),
        ({"shard": 2, "zero": 3, "shard_within": "host"}, "say who shares"),
    ],
)
def test_wrong_degrees_in_a_plan_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.from_mapping(values, where="a test")
