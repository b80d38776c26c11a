"""Slurm's lists of nodes, expanded without asking Slurm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.slurm import expand_node_list
from farandole.core.vocabulary.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu5", ["gpu5"]),
        ("node[1-3,07],gpu5", ["node1", "node2", "node3", "node07", "gpu5"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]-[3,5].lan", ["rack1-3.lan", "rack1-5.lan", "rack2-3.lan", "rack2-5.lan"]),
        ("a,a", ["a", "a"]),
    ],
)
def test_lists(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        "a[",
        "a]",
        "a[]",
        "a[1-]",
        "a[-1]",
        "a[3-1]",
        "a[1,]",
        "a[[1]]",
        "a b",
        "a[x]",
        "a;b",
        "$(a)",
    ],
)
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_node_list(text, where="SLURM_JOB_NODELIST")
    assert "SLURM_JOB_NODELIST: " in str(caught.value)
    assert "is no list of nodes" in str(caught.value)


@pytest.mark.parametrize("text", ["a[1-99999999999]", "a[0-300][0-300]", "a[1-40000],b[1-40000]"])
def test_too_many_are_refused_before_they_are_made(text: str) -> None:
    with pytest.raises(ConfigError, match="more than 65536 nodes"):
        expand_node_list(text)


PREFIX = st.from_regex(r"[a-z][a-z.-]{0,5}", fullmatch=True)


@given(
    st.lists(
        st.tuples(PREFIX, st.integers(1, 4), st.integers(0, 9000), st.integers(0, 20)), min_size=1, max_size=5
    )
)
def test_ranges_keep_order_and_width(ranges: list[tuple[str, int, int, int]]) -> None:
    text = ",".join(f"{name}[{low:0{width}d}-{low + more}]" for name, width, low, more in ranges)
    expected = [
        f"{name}{number:0{width}d}" for name, width, low, more in ranges for number in range(low, low + more + 1)
    ]
    assert expand_node_list(text) == expected


@given(st.lists(st.from_regex(r"[a-zA-Z0-9_.-]{1,8}", fullmatch=True), min_size=1, max_size=9))
def test_plain_names_are_themselves(names: list[str]) -> None:
    assert expand_node_list(",".join(names)) == names


@given(st.text(alphabet="ab1[]-,07", max_size=14))
def test_any_text_is_a_list_or_an_error_of_ours(text: str) -> None:
    try:
        names = expand_node_list(text)
    except ConfigError:
        return
    assert names
    assert not any(letter in name for name in names for letter in "[],")
