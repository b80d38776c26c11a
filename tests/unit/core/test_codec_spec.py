"""Codecs by name: what is read, what is refused and how, and how plans carry them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.vocabulary.codec_spec import OPTIONS, CodecSpec
from farandole.core.vocabulary.config import parse_settings
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "feedback": st.booleans(),
    "exact": st.booleans(),
    "rounding": st.sampled_from(["nearest", "stochastic"]),
    "block": st.sampled_from([2**n for n in range(4, 17)]),
    "density": st.floats(0, 1, exclude_min=True),
    "momentum": st.floats(0, 1, exclude_max=True),
    "clip_norm": st.floats(0, 1e6),
    "warmup_steps": st.integers(0, 10**6),
    "value": st.floats(0, 1e6, exclude_min=True),
    "rank": st.integers(1, 10**4),
}


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Return what a person may write: some options, in any order, the first one perhaps without its name."""
    name = draw(st.sampled_from(sorted(OPTIONS)))
    known = list(OPTIONS[name])
    chosen = draw(st.lists(st.sampled_from(known), unique=True)) if known else []
    if "feedback" in chosen and {"momentum", "clip_norm"} & set(chosen):
        chosen.remove("feedback")
    words = []
    for position, key in enumerate(chosen):
        value = draw(VALUES[key])
        written = str(value).lower() if isinstance(value, bool) else str(value)
        bare = position == 0 and key == known[0] and draw(st.booleans())
        words.append(written if bare else f"{key}={written}")
    return name + (":" + ",".join(words) if words else "")


@given(texts())
def test_what_is_written_is_read_back(text: str) -> None:
    spec = CodecSpec.parse(text)
    assert set(spec.options) == set(OPTIONS[spec.name])
    again = CodecSpec.parse(spec.to_text())
    assert again == spec
    assert again.to_text() == spec.to_text()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("none", "none"), ("auto", "auto"), (" int8 ", "int8"), ("int8:", "int8"), ("int8:block=256", "int8"),
        ("int8:stochastic", "int8:rounding=stochastic"), ("topk", "topk:density=0.01"),
        ("topk:0.001", "topk:density=0.001"), ("topk: 1e-3 , exact=TRUE", "topk:density=0.001,exact=true"),
        ("powersgd:2", "powersgd:rank=2"), ("sign:1024", "sign:block=1024"),
        ("threshold:2", "threshold:value=2.0"), ("fp16:false", "fp16:feedback=false"),
        ("my.own.codec", "my.own.codec"),
    ],
)  # fmt: skip
def test_the_shortest_text(text: str, written: str) -> None:
    assert CodecSpec.parse(text).to_text() == written


def test_every_default_is_one_that_may_be_given() -> None:
    for name, known in OPTIONS.items():
        for key, option in known.items():
            assert option.fits(option.default), (name, key)
            assert CodecSpec.parse(f"{name}:{key}={option.default}") == CodecSpec.parse(name)


BAD = [
    ("intt8", "unknown codec 'intt8'; did you mean 'int8'?"),
    ("top-k", "unknown codec 'top-k'; did you mean 'topk'?"),
    ("power_sgd:4", "unknown codec 'power_sgd'; did you mean 'powersgd'?"),
    (
        "xyz",
        "unknown codec 'xyz'; known: auto, bf16, fp16, fp8, int4, int8, none, powersgd, randomk, sign, "
        "threshold, topk",
    ),
    ("", "unknown codec ''; known: auto, bf16"),
    (":4", "unknown codec ''; known: auto, bf16"),
    ("topk:0", "density = 0, expected a share above 0 and at most 1"),
    ("topk:-0.1", "density = -0.1, expected a share above 0 and at most 1"),
    ("topk:1.01", "density = 1.01, expected a share above 0 and at most 1"),
    ("topk:nan", "density = nan, expected a share above 0 and at most 1"),
    ("topk:inf", "density = inf, expected a share above 0 and at most 1"),
    ("topk:one percent", "density = 'one percent', expected a share above 0 and at most 1"),
    ("topk:1%", "density = '1%', expected a share above 0 and at most 1"),
    ("topk:exact=yes", "exact = 'yes', expected true or false"),
    ("topk:momentum=1", "momentum = 1, expected at least 0 and below 1"),
    ("topk:clip_norm=inf", "clip_norm = inf, expected at least 0"),
    ("topk:warmup_steps=-1", "warmup_steps = -1, expected at least 0"),
    ("topk:warmup_steps=1.5", "warmup_steps = '1.5', expected at least 0"),
    ("topk:0.1,0.2", "expected key=value, got '0.2'"),
    ("topk:0.1,density=0.2", "density is given twice"),
    ("topk:dens=0.1", "topk has no option 'dens'; did you mean 'density'?"),
    ("topk:=0.1", "topk has no option ''"),
    ("topk:momentum=0.9,feedback=false", "feedback=false forgets it; leave one of them out"),
    ("randomk:clip_norm=1,feedback=false", "feedback=false forgets it; leave one of them out"),
    ("threshold:0", "value = 0, expected a positive number"),
    ("powersgd:0", "rank = 0, expected a whole number of at least 1"),
    ("powersgd:-1", "rank = -1, expected a whole number of at least 1"),
    ("powersgd:2.5", "rank = '2.5', expected a whole number of at least 1"),
    ("powersgd:block=16", "powersgd has no option 'block'"),
    ("int8:block=100", "block = 100, expected a power of two from 16 to 65536"),
    ("int8:block=8", "block = 8, expected a power of two from 16 to 65536"),
    ("int8:block=131072", "block = 131072, expected a power of two from 16 to 65536"),
    ("int8:up", "rounding = up, expected nearest or stochastic"),
    ("none:1", "none has no options"),
    ("none:x=1", "none has no options"),
    ("auto:1", "auto has no options"),
    ("a.b:3", "expected module.function for a user-defined codec"),
    ("a..b", "expected module.function for a user-defined codec"),
    (".b", "expected module.function for a user-defined codec"),
    ("a b.c", "expected module.function for a user-defined codec"),
    ("./codec.py", "expected module.function for a user-defined codec"),
]


@pytest.mark.parametrize(("text", "wrong"), BAD)
def test_bad_input_names_the_value_and_what_was_expected(text: str, wrong: str) -> None:
    """Each option of each codec has its own check, and so a case of its own."""
    with pytest.raises(PlanError) as caught:
        CodecSpec.parse(text)
    assert str(caught.value).startswith(f"codec = {text!r}: ")
    assert wrong in str(caught.value)
    with pytest.raises(PlanError, match=r"^plan: codec = "):
        Plan(codec=text)
    with pytest.raises(PlanError, match=r"^plan: codec_for\.fc\.\* = "):
        Plan(codec_for={"fc.*": text})


@pytest.mark.parametrize("value", [None, 3, 0.5, True, ["int8"]])
def test_what_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(PlanError, match="codec"):
        Plan(codec=value)
    with pytest.raises(PlanError, match="codec"):
        Plan.from_mapping({"codec": value}, where="plan.toml")


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    refused = ""
    try:
        spec = CodecSpec.parse(text)
        assert CodecSpec.parse(spec.to_text()) == spec
    except PlanError as problem:
        refused = str(problem)
    assert not refused or repr(text) in refused


# -- in plans --------------------------------------------------------------------------------------

PLAN = Plan(codec="topk:0.05", codec_for={"*": "int8", "*.embedding.*": "none", 'odd "name"\\': "my.codec"})


def test_plans_keep_codecs_and_their_order_in_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml(), encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_mapping()), encoding="utf-8")
    for name in ("plan.toml", "plan.json"):
        again = Plan.read(tmp_path / name)
        assert again == PLAN
        assert list(again.codec_for) == list(PLAN.codec_for), "the last pattern that fits counts"
    assert Plan.from_mapping(PLAN.to_mapping(), where="x").to_toml() == PLAN.to_toml()


def test_codec_for_as_a_table_of_toml(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('codec = "int8"\n[codec_for]\n"*.embedding.*" = "none"\nhead = "bf16"\n')
    plan = Plan.read(tmp_path / "plan.toml")
    assert plan == Plan(codec="int8", codec_for={"*.embedding.*": "none", "head": "bf16"})


def test_codec_for_on_the_command_line() -> None:
    settings = parse_settings(["codec=int8", 'codec_for={"*.embedding.*": "topk:density=0.1,exact=true"}'])
    plan = Plan.from_mapping(settings, where="--set")
    assert plan == Plan(codec="int8", codec_for={"*.embedding.*": "topk:density=0.1,exact=true"})


@pytest.mark.parametrize(
    "value",
    ["int8", "[1]", '{"a": 1}', "{", "none", 3, ["int8"], {"a": 1}, {"a": None}, {"fc": {"weight": "int8"}}],
)
def test_codec_for_that_is_no_table_of_texts(value: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_mapping({"codec_for": value}, where="plan.toml")
    assert str(caught.value) == f"plan.toml: codec_for: expected a table of texts, got {value!r}"


def test_what_two_plans_differ_in() -> None:
    assert Plan().differences(Plan(codec="int8", codec_for={"a": "none"})) == {
        "codec": ("none", "int8"),
        "codec_for": ({}, {"a": "none"}),
    }
